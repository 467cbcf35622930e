"""What a network is trained for. Each task cuts batches, sums a loss and scores a split."""
