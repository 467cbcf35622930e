"""The experiments of the catalogue. Each module defines a list EXPERIMENTS of one study or a part of it."""
