"""Benchmarks of one's own machine: step time, memory and saving of each method.

In: arms as plain data. Out: ratios of step times with confidence intervals, and bytes. Comparisons with other
tools use the same harness and live in the repository's `benchmarks/` folder, outside the installed package.
"""
