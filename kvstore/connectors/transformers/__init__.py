"""The connector for Hugging Face causal language models: stores KV caches in a pool, by prefix."""

from __future__ import annotations

from .cache_schema import identity, schema_of
from .prefix_cache import LastCall, PrefixCache, SaveResult

__all__ = ["LastCall", "PrefixCache", "SaveResult", "identity", "schema_of"]
