"""Datasets, tokenizers, token files and batches.

Input: the name of a dataset (or a path to files), a tokenizer name and a seed.
Output: batches of token ids. Each batch depends only on the data, the seed and the step.
"""
