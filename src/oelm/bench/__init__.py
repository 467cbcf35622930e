"""Benchmarks on the user's machine: step time and memory of each method, and what it saves.

Input: the arms of a comparison (the methods to measure) as plain data. Output: ratios of step times with
confidence intervals, and memory in bytes. The repository's `benchmarks/` folder uses the same harness to
compare oelm with other tools; it is not part of the installed package.
"""
