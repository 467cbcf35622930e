"""Write the results of an analysis for readers, in English or Chinese.

Input: an `Analysis`. Output: the full report as one HTML file, a short report in Markdown, the page of
claims, and the sections that `oelm analyze` prints.
"""
