"""Measurements of a run: step times, FLOPs, disk space and attention statistics.

Input: the model, and the steps of the training loop. Output: numbers for the log and the run folder.
"""
