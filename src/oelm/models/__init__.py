"""Our GPT: one trunk, a language-modelling head and a classification head."""
