"""From run folders to comparisons, statistics and verdicts.

Input: run folders and the catalogued configs. Output: an `Analysis` object that `oelm.report` shows. Every
statement is a field or a `Message`; nothing here formats a document.
"""
