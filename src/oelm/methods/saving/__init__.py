"""Save and load a model with a method, and fold it into a plain state dict."""
