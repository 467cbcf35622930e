"""Measurements of a run: step times, FLOPs, disk space and attention statistics.

They are taken from the model and from the steps of the loop, and written to the log and the run folder.
"""
