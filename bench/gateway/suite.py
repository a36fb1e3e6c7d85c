"""The gateway's measurements, in the order of the docs.

Their modules are imported only when they run, as for `bench conductor`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..conductor.setting import Missing
from ..environment import LIBRARIES
from ..peers.environments import in_words, versions
from ..peers.routers import ROUTERS
from ..suite import Suite

if TYPE_CHECKING:
    from collections.abc import Callable

    from ..store.rows import Row
    from .setting import Setting

    Measurement = Callable[[Setting], list[Row]]


def _requests(name: str) -> Measurement:
    def measure(setting: Setting) -> list[Row]:
        from .requests import MEASUREMENTS

        return MEASUREMENTS[name](setting)

    return measure


def _beside(setting: Setting) -> list[Row]:
    from .beside import beside

    return beside(setting)


def _routers(setting: Setting) -> dict[str, Any]:
    return versions(setting.environments, ROUTERS)


def _left_out(setting: Setting) -> dict[str, str]:
    return setting.left_out


def _streams(name: str) -> Measurement:
    def measure(setting: Setting) -> list[Row]:
        from .streams import MEASUREMENTS

        return MEASUREMENTS[name](setting)

    return measure


SUITE: Suite[Setting] = Suite(
    "gateway",
    {
        "requests": _requests("requests"),
        "cpu": _requests("cpu"),
        "workers": _requests("workers"),
        "latency": _requests("latency"),
        "streams": _streams("streams"),
        "memory": _streams("memory"),
        "overload": _requests("overload"),
        "routers": _beside,
    },
    lack=Missing,
    libraries=(*LIBRARIES, "aiohttp", "uvicorn", "httptools"),
    surroundings=_routers,
    in_words=in_words,
    left_out=_left_out,
)
