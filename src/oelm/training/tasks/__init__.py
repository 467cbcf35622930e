"""The three training tasks: language modelling, classification and denoising.

A task takes encoded splits, and returns the batches of any step, the loss of a batch, and the scores of a
split.
"""
