"""The live board of `oelm board`: local web pages that show runs, curves and verdicts while runs train.

The board only reads the runs folder. `metrics` and `snapshot` read it, `curves`, `forest`, `questions` and
`pages` prepare the content, and `server` answers requests on 127.0.0.1 with HTML pages and JSON for charts.
"""
