"""Batches for training and evaluation.

Input: tokenized splits, a batch size and a seed. Output: torch tensors. A training batch is a pure function
of seed and step, so a resumed run gets the same batches.
"""
