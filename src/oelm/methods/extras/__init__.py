"""Modules that replace projections: one adds trainable extras, the other splits a fused Q/K/V."""
