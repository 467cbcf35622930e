"""Tokenizers, parallel tokenization, and the token cache on disk.

Input: the rows of a `Corpus`. Output: memory-mapped token ids, checked by SHA-256 when they are opened.
"""
