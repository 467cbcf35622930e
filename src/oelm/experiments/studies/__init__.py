"""The catalogue's entries, one module per study. Each offers EXPERIMENTS."""
