"""Experiments: the catalogue, learning-rate tuning, planning and the launchers.

The user names experiment IDs, seeds and changed settings. Module `catalogue` finds the experiments, `study`
turns them into runs, and `launch` starts the runs. The result is one folder per run.
"""
