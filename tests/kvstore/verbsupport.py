"""Every verb of any client, with valid arguments."""

from __future__ import annotations

import inspect
from typing import Any

from kvsupport import fresh_prefix, payloads_of

from tiffin.kvstore.format.key_space import KeySpace

PREFIX = fresh_prefix(1)


GOOD: dict[str, Any] = {
    "match": {"prefix": PREFIX, "timeout_s": 0.05},  # it may be told to wait for blocks
    "exists": {"prefix": PREFIX},
    "get": {"prefix": PREFIX},
    "put": {"prefix": PREFIX, "payloads": payloads_of(PREFIX)},
    "reserve": {"prefix": PREFIX},
    "stream": {"prefix": PREFIX},
    "prefetch": {"prefix": PREFIX},
    "pin": {"prefix": PREFIX},
    "unpin": {"prefix": PREFIX},
    "remove": {"prefix": PREFIX},
    "statistics": {},
    "announce": {"space": KeySpace(schema="")},
    "nodes": {},
    "replicate": {"prefix": PREFIX, "to": [999]},
    "evacuate": {"node": 999},  # no node has this number
}


# Not verbs: they begin and end clients.
ENDS = {"open", "attach", "open_pool", "close"}


def verbs_of(client: Any) -> list[str]:
    """The public methods of a client, whatever they are called."""
    found = inspect.getmembers(type(client), callable)
    return [name for name, _ in found if not name.startswith("_") and name not in ENDS]
