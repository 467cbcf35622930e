"""What a run writes while it trains: log, metrics, status, manifest and results.

Input: numbers and messages from the training loop. Output: files in the run folder and, if the user asks for
it, dashboards such as TensorBoard. Analyses read only metrics.jsonl, not the dashboards.
"""
