"""The measurements beside peers, in the order of the docs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..environment import LIBRARIES
from ..suite import Suite
from .dynamo import dynamo
from .environments import Missing, in_words, versions
from .lmcache import lmcache
from .mooncake import mooncake
from .sglang import sglang

if TYPE_CHECKING:
    from .setting import Setting


def _peers(setting: Setting) -> dict[str, Any]:
    return versions(setting.folder)


SUITE: Suite[Setting] = Suite(
    "peers",
    {"mooncake": mooncake, "lmcache": lmcache, "dynamo": dynamo, "sglang": sglang},
    lack=Missing,
    libraries=(*LIBRARIES, "fastapi", "uvicorn", "httptools"),
    surroundings=_peers,
    in_words=in_words,
)
