"""Honest benchmarks: interleaved arms, a FLOP model, peers."""
