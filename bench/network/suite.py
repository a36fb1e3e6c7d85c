"""The network's measurements, in the order of the docs."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..environment import LIBRARIES
from ..suite import Suite
from .directory import locate
from .mooncake import mooncake
from .readers import concurrent_readers, first_layer
from .setting import Missing
from .tags import tags
from .transfer import remote_get, remote_small, scattered

if TYPE_CHECKING:
    from .setting import Setting

SUITE: Suite[Setting] = Suite(
    "network",
    {
        "remote-get": remote_get,
        "remote-small": remote_small,
        "tags": tags,
        "scattered": scattered,
        "first-layer": first_layer,
        "readers": concurrent_readers,
        "locate": locate,
        "mooncake": mooncake,
    },
    lack=Missing,
    libraries=(*LIBRARIES, "redis"),
)
