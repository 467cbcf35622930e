"""Modules that replace projections: one adds a method's trainable parameters, one splits a fused Q/K/V."""
