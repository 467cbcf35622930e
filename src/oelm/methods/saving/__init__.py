"""Save a model with its method, load it again, and fold the method into a plain state dict."""
