"""Checkpoints for exact resume (file.py, resume.py), and the best model (best.py).

A `Training` is saved as latest.pt, previous.pt and best/, and restored from these files.
"""
