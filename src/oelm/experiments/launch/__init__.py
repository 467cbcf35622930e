"""Launchers start the runs of a study on this machine or through SLURM and watch them until they end.

Each run is described by its config and writes its own folder. One `Job` per run says how the run ended.
"""
