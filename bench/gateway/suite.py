"""The gateway's measurements, in the order of the docs.

Their modules are imported only when they run, as for `bench conductor`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..conductor.setting import Missing
from ..environment import LIBRARIES
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
    },
    lack=Missing,
    libraries=(*LIBRARIES, "aiohttp", "uvicorn", "httptools"),
)
