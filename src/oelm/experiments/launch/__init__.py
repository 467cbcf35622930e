"""Launchers start the runs of a study on this machine or through SLURM and watch them until they end.

Each run has its own config and its own folder. A launcher returns one `Job` per run, which says how the run
ended.
"""
