"""Measurements of a run: step times, FLOPs, disk space, attention statistics.

In: a model, or the events of the loop. Out: plain numbers for the log and the run folder.
"""
