"""Replacements for projection modules: with trainable extras, or a fused Q/K/V split into its parts."""
