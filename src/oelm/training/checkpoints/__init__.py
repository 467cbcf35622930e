"""Checkpoints for exact resume (file.py, resume.py), and the best model (best.py).

In: a `Training` after some step. Out: latest.pt, previous.pt and best/; and the same `Training` again
from them.
"""
