"""The built-in experiments. The list EXPERIMENTS of each module has those of one study or of a part of it."""
