"""What a run writes while it trains: log, metrics, status, manifest, results, and external trackers.

In: numbers and messages from the loop. Out: files of the run folder. metrics.jsonl is the source of truth.
"""
