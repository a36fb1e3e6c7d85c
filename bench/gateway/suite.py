"""The gateway's measurements, in the order of the docs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..environment import LIBRARIES
from ..peers.environments import in_words, versions
from ..peers.routers import ROUTERS
from ..suite import Suite, later

if TYPE_CHECKING:
    from .setting import Setting


def _routers(setting: Setting) -> dict[str, Any]:
    return versions(setting.environments, ROUTERS)


def _left_out(setting: Setting) -> dict[str, str]:
    return setting.left_out


SUITE: Suite[Setting] = Suite(
    "gateway",
    later(
        __package__,
        {
            **{name: ("requests", name) for name in ("requests", "cpu", "workers", "latency")},
            **{name: ("streams", name) for name in ("streams", "memory")},
            "overload": ("requests", "overload"),
            "routers": ("beside", "beside"),
        },
    ),
    libraries=(*LIBRARIES, "aiohttp", "uvicorn", "httptools"),
    surroundings=_routers,
    in_words=in_words,
    left_out=_left_out,
)
