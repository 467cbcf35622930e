"""Run folders: the schema of their files, the states of runs, locks, scanning, archives and disk space.

Input: the files that training writes. Output: runs as typed objects, read from run folders or results files.
"""
