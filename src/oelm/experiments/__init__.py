"""Experiments: the catalogue, tuning, planning and the launchers.

In: experiment IDs, seeds and changed settings. Out: run folders that have ended, one for each run.
`catalogue` finds experiments, `study` turns them into runs, `launch` starts the runs.
"""
