"""Save a model with its method, load it again, and fold the method's extras into a plain state dict."""
