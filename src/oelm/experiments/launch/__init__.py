"""Launchers: start the runs of a study on this machine or through SLURM.

In: configs of runs. Out: run folders that have ended, and one `Job` per run that says how.
"""
