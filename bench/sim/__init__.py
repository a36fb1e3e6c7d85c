"""A simulated cluster, by discrete events, that drives the conductor's own core.

`clock.py` is the clock; `network.py`, `block_cache.py`, `prefill_instance.py` and
`decode_instance.py` are what a cluster is made of; `simulation.py` drives the conductor with them;
`outcomes.py` measures. `colocated.py` has engines that prefill and decode on the same GPUs, to
compare with (`colocated_instance.py`, `engine_options.py`).
"""
