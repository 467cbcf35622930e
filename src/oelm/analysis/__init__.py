"""Compare the runs of a runs folder, with statistics and verdicts.

The input is run folders and the configs of the catalogue. The output is an `Analysis`, which contains numbers
and `Message` objects (sentences). `oelm.report` makes documents from an `Analysis`.
"""
