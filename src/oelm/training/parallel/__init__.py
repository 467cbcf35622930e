"""One run on several processes: data parallel (world.py) or sharded (sharding.py).

In: the environment variables of a rank. Out: a `World`, whose calls do nothing special for one process.
"""
