"""Where a prompt is prefilled: policies behind one interface, chosen by name."""

# Each registers its policies by name (`base.policy`).
from . import joint, kv_cost, kvcache_centric, preble, prefix_aware, simple

__all__ = ["joint", "kv_cost", "kvcache_centric", "preble", "prefix_aware", "simple"]
