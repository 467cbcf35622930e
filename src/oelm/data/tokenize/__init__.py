"""Tokenizers, encoding of a corpus in parallel, and the cache of tokens on disk."""
