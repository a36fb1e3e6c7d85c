"""The measurements beside peers, in the order of the docs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..environment import LIBRARIES
from ..suite import Suite, later
from .environments import in_words, versions

if TYPE_CHECKING:
    from .setting import Setting

_PEERS = ("mooncake", "lmcache", "dynamo", "sglang")


def _peers(setting: Setting) -> dict[str, Any]:
    return versions(setting.folder, _PEERS)


SUITE: Suite[Setting] = Suite(
    "peers",
    later(__package__, {name: (name, name) for name in _PEERS}),
    libraries=(*LIBRARIES, "fastapi", "uvicorn", "httptools"),
    surroundings=_peers,
    in_words=in_words,
)
