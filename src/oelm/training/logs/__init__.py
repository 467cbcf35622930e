"""What a run writes while it trains: metrics, log, manifest, results, and trackers."""
