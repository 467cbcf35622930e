"""Train one run on several processes (ranks): data parallel (world.py) or sharded (sharding.py).

A `World` is made from the environment variables of a rank. With a single process its calls do nothing
special.
"""
