"""The report of an analysis, for people.

In: an `Analysis`. Out: one HTML file with everything, a short Markdown page, the page of claims, and the
sections that `oelm analyze` prints; in English or Chinese.
"""
