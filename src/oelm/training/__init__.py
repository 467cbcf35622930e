"""One loop for every task, with exact resume and honest timing."""
