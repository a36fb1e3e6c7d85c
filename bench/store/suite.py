"""The store's measurements, in the order of the docs."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..suite import Suite
from .bandwidth import get_into, put
from .disk import nvme, restart
from .latency import keys, leased_get, match
from .memory import allocator, memory

if TYPE_CHECKING:
    from .setting import Setting

SUITE: Suite[Setting] = Suite(
    "store",
    {
        "leased-get": leased_get,
        "get-into": get_into,
        "put": put,
        "nvme": nvme,
        "keys": keys,
        "match": match,
        "restart": restart,
        "memory": memory,
        "allocator": allocator,
    },
)
