"""Benchmarks on the user's machine: measure the step time and memory of each method.

The results are ratios of step times with confidence intervals, and memory in bytes. The folder `benchmarks/`
of the repository, which is not installed with the package, uses the same harness to compare oelm with other
tools.
"""
