"""The name by which a model takes a cache."""

from __future__ import annotations

import inspect
from typing import Any


def with_cache(model: Any, cache: Any) -> dict[str, Any]:
    """`cache` as the keyword argument that `model` and its `generate` take: `cache`, and before
    transformers 5.24 `past_key_values`, which that version calls deprecated."""
    taken = inspect.signature(model.forward).parameters
    return {"cache" if "cache" in taken else "past_key_values": cache}
