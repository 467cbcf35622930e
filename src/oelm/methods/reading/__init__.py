"""Find the query and key projections of any model, and verify numerically that they are Q and K."""
