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
    from collections.abc import Callable

    from ..store.rows import Row
    from .setting import Setting


_MEASUREMENTS: dict[str, Callable[[Setting], list[Row]]] = {
    "mooncake": mooncake, "lmcache": lmcache, "dynamo": dynamo, "sglang": sglang,
}  # fmt: skip


def _peers(setting: Setting) -> dict[str, Any]:
    return versions(setting.folder, _MEASUREMENTS)


SUITE: Suite[Setting] = Suite(
    "peers",
    _MEASUREMENTS,
    lack=Missing,
    libraries=(*LIBRARIES, "fastapi", "uvicorn", "httptools"),
    surroundings=_peers,
    in_words=in_words,
)
