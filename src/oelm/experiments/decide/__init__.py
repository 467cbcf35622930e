"""Run seeds until the questions of a study are answered: `oelm decide`.

`look.py` reads the run folders and answers the questions, `next_runs.py` chooses the runs that follow, and
`loop.py` alternates between them and a launcher.
"""
