"""Check that interrupted runs resume exactly: `oelm doctor --resume`."""
