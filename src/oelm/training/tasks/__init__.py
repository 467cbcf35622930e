"""The three training tasks: language modelling, classification and denoising.

A task is created from tokenized splits. It returns the batches of any optimizer step, the loss of a batch,
and the scores of a split.
"""
