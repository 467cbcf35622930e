"""Modules that replace projections: one adds trainable extras, one splits a fused Q/K/V into its parts."""
