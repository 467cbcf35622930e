"""Batches for training and evaluation.

Input: encoded splits, a batch size and a seed. Output: torch tensors; the order of the training batches is
a pure function of seed and step, so a resumed run sees the same batches.
"""
