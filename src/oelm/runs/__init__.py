"""The run folder: its files, states, locks, scanning, archive and disk use.

In: what training writes. Out: runs on disk as typed objects.
"""
