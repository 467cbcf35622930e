"""Write the results of an analysis for readers, in English or Chinese.

From an `Analysis`, this package makes the full report as one HTML file, a short report in Markdown, the page
that checks the claims of the original study, and the sections that `oelm analyze` prints.
"""
