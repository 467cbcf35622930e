"""Find the query and key projections in any model, and prove numerically that they are."""
