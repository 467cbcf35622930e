"""Train one run: one loop for every task, with exact resume and timing.

In: a `RunConfig`, a `Machine` and a run folder. Out: the files of the run folder, and an `Outcome`.
Start reading at fit.py (entry point, failures), then loop.py (steps, validation) and setup.py.
"""
