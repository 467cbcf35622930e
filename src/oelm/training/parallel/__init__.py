"""Train one run on several processes (ranks): data parallel (world.py) or sharded (sharding.py).

A `World` reads rank and number of ranks from environment variables. With a single process its
methods do not communicate, so that the training loop is the same for one process and for many.
"""
