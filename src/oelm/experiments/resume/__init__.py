"""Proof of exact resume on the user's machine: interrupt a run, go on, compare byte by byte."""
