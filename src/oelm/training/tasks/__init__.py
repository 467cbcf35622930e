"""The three tasks: language modelling, classification, denoising.

In: encoded splits. Out: batches for any step, the loss of a batch, and the scores of a split.
"""
