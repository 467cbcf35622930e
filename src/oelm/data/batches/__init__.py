"""Batches of token windows or labelled rows, in an order that depends on the seed and the step alone."""
