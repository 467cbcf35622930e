"""Train one run, with one loop for every task; an interrupted run resumes exactly.

The input is a `RunConfig`, a `Machine` and a run folder. The output is the files of the run folder, and an
`Outcome`. Start reading at fit.py (entry point, failures), then loop.py (training steps, validation) and
setup.py.
"""
