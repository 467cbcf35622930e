"""Checks of fairness: why a comparison gets no verdict, and the notes that are shown with it."""
