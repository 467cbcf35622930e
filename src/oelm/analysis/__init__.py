"""Compare the runs of a runs folder, with statistics and verdicts.

The input is run folders and the catalogued configs. The output is an `Analysis`, whose statements are fields
or `Message` objects. `oelm.report` makes documents from it; nothing here formats a document.
"""
