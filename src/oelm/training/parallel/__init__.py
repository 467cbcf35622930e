"""Train one run on several processes (ranks): data parallel (world.py) or sharded (sharding.py).

A `World` reads rank and number of ranks from environment variables. With a single process it communicates
with nobody, so that the training loop is the same in both cases.
"""
