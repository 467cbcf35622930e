"""The experiments of the catalogue, one module per study; each module has a list EXPERIMENTS."""
