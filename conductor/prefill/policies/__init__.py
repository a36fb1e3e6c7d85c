"""Prefill policies: they choose the prefill instance. One interface, selected by name."""

# Each module registers its policies by name (`policy_registry.policy`).
from . import (
    algorithm_1,
    kv_cost,
    kvcache_centric,
    preble,
    prefix_aware,
    simple,
    weighted_factors,
)

__all__ = [
    "algorithm_1",
    "kv_cost",
    "kvcache_centric",
    "preble",
    "prefix_aware",
    "simple",
    "weighted_factors",
]
