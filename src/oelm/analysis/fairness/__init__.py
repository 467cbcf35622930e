"""Checks whether a comparison is fair: what withholds its verdict, and what is said beside it."""
