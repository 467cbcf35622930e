"""The live board of `oelm board`: a local web page that shows runs, curves and verdicts while they come in.

In: a runs folder, which is only read. Out: HTML pages and JSON for their charts, on 127.0.0.1.
Order: `metrics` and `snapshot` read, `curves`, `forest` and `pages` prepare, `server` answers requests.
"""
