"""Datasets, tokenizers, token files and batches."""
