"""Small trainable parts added to frozen projections: low-rank adapters and convolutions."""
