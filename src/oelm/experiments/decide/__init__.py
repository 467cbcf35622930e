"""The command `oelm decide`: run more and more seeds until the questions of a study are answered.

`look.py` reads the run folders and answers the questions. `next_runs.py` chooses the runs to train next.
`loop.py` repeats these two steps and trains the chosen runs with a launcher. `study.py` tunes first.
"""
