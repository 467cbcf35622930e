"""What a run writes while it trains: log, metrics, status, manifest and results.

The loop passes numbers and messages; they are written to files of the run folder and, if the user asks for
it, to dashboards such as TensorBoard. The authoritative record of the metrics is metrics.jsonl.
"""
