"""The network's measurements, in the order of the docs."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..environment import LIBRARIES
from ..suite import Suite, later

if TYPE_CHECKING:
    from .setting import Setting

SUITE: Suite[Setting] = Suite(
    "network",
    later(
        __package__,
        {
            "remote-get": ("transfer", "remote_get"),
            "remote-small": ("transfer", "remote_small"),
            "tags": ("tags", "tags"),
            "scattered": ("transfer", "scattered"),
            "first-layer": ("readers", "first_layer"),
            "readers": ("readers", "concurrent_readers"),
            "locate": ("directory", "locate"),
            "mooncake": ("mooncake", "mooncake"),
        },
    ),
    libraries=(*LIBRARIES, "redis"),
)
