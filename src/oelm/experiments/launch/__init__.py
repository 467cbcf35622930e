"""Start runs: on this machine, on SLURM, on several processes."""
