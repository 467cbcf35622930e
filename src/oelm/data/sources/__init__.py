"""Read the rows of a dataset from local files, the Hugging Face hub, a pip package, or built-in text.

Input: a dataset of the catalogue or a path. Output: a `Corpus` with train, validation and test rows.
"""
