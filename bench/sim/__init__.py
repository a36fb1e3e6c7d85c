"""A simulated cluster, by discrete events, that drives the conductor's own core.

`clock.py` is the clock, `nodes/` and `instances/` are what a cluster is made of; `cluster/` has
clusters, with the conductor's core in them; `results/` measures; `cli.py` is `tiffin simulate`.
"""
