"""Built-in datasets that are generated from a seed, for machines without a network connection.

Input: the name of a built-in dataset and a split. Output: the same rows on every machine.
"""
