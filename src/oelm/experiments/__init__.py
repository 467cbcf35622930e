"""Experiments: the catalogue, learning-rate tuning, planning and the launchers.

The user gives experiment IDs, seeds and settings to change. Module `catalogue` finds the experiments,
`request` turns them into the configs of runs, `study` tunes learning rates and runs the arms, and `launch`
starts each run. A run writes its results to a folder of its own.
"""
