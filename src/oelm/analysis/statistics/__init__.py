"""Statistics of paired differences: intervals, sequential looks, means over datasets, effects."""
