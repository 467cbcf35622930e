"""The run folder: one typed schema for its files, states, locks, scanning, archives, disk space.

Input: what training writes. Output: runs as typed objects, read from run folders or results files.
"""
