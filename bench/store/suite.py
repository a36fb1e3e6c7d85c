"""The store's measurements, in the order of the docs."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..suite import Suite, later

if TYPE_CHECKING:
    from .setting import Setting

SUITE: Suite[Setting] = Suite(
    "store",
    later(
        __package__,
        {
            "leased-get": ("latency", "leased_get"),
            "get-into": ("bandwidth", "get_into"),
            "put": ("bandwidth", "put"),
            "nvme": ("disk", "nvme"),
            "keys": ("latency", "keys"),
            "match": ("latency", "match"),
            "restart": ("disk", "restart"),
            "memory": ("memory", "memory"),
            "allocator": ("memory", "allocator"),
        },
    ),
)
