"""Where rows come from: the Hugging Face hub, a local folder, or text that is built in."""
