"""Text, labelled tasks and probes that are generated, for machines without a network."""
