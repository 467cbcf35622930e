"""The built-in experiments. The list EXPERIMENTS of each module has all or some experiments of one study."""
