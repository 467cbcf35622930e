"""Experiments: the catalogue, learning-rate tuning, planning and the launchers.

The user gives experiment IDs, seeds and settings to change. Module `catalogue` finds the experiments, `study`
turns them into runs, and `launch` starts the runs. Each run writes its results to a folder of its own.
"""
