"""Run folders: the schema of their files, run states, locks, scanning, archives and disk space.

Input: the files that training writes. Output: runs as typed objects, read from run folders or results files.
"""
