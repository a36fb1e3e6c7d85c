"""The conductor's measurements, in the order of the docs.

Their modules are imported only when they run: every `tiffin` command imports this module for their
names, and the conductor's own libraries may not be installed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..environment import LIBRARIES
from ..suite import Suite
from .setting import Missing

if TYPE_CHECKING:
    from collections.abc import Callable

    from ..store.rows import Row
    from .setting import Setting

    Measurement = Callable[[Setting], list[Row]]


def _decisions(setting: Setting) -> list[Row]:
    from .decision import decisions

    return decisions(setting)


def _policies(setting: Setting) -> list[Row]:
    from .decision import policies

    return policies(setting)


def _walk(setting: Setting) -> list[Row]:
    from ..conductor import index

    return index.walk(setting.sizes.instances, setting.sizes.rounds)


def _events(setting: Setting) -> list[Row]:
    from ..conductor import index

    sizes = setting.sizes
    return index.events(sizes.index_blocks, sizes.instances, sizes.index_rounds)


def _memory(setting: Setting) -> list[Row]:
    from ..conductor import index

    return index.memory(setting.sizes.index_blocks)


def _resync(setting: Setting) -> list[Row]:
    from ..conductor import index

    return index.resync(setting.sizes.index_blocks, setting.sizes.index_rounds)


def _folding(setting: Setting) -> list[Row]:
    from ..conductor import index

    return index.folding(setting.sizes.folded_blocks, setting.sizes.index_rounds)


def _service(setting: Setting) -> list[Row]:
    from .service import service

    return service(setting)


def _whole_requests(setting: Setting) -> list[Row]:
    from .whole_requests import whole_requests

    return whole_requests(setting)


def _stalls(setting: Setting) -> list[Row]:
    from .stalls import stalls

    return stalls(setting)


def _busy(setting: Setting) -> list[Row]:
    from .busy import busy
    from .service import lacking

    lacking()
    return busy(setting)


def _floods(setting: Setting) -> list[Row]:
    from .stalls import floods

    return floods(setting)


def _dynamo(setting: Setting) -> list[Row]:
    from .dynamo import dynamo

    return dynamo(setting)


def _as_crash(measure: Measurement) -> Measurement:
    """Turn a ConductorError into a ValueError, which ends this measurement, and not the suite."""

    def measured(setting: Setting) -> list[Row]:
        from tiffin.conductor.errors import ConductorError

        try:
            return measure(setting)
        except ConductorError as error:
            raise ValueError(f"the conductor refused: {type(error).__name__}: {error}") from error

    return measured


_MEASUREMENTS: dict[str, Measurement] = {
    "decision": _decisions,
    "policies": _policies,
    "walk": _walk,
    "events": _events,
    "memory": _memory,
    "resync": _resync,
    "folding": _folding,
    "service": _service,
    "whole-requests": _whole_requests,
    "busy": _busy,
    "stalls": _stalls,
    "floods": _floods,
    "dynamo": _dynamo,
}

SUITE: Suite[Setting] = Suite(
    "conductor",
    {name: _as_crash(measure) for name, measure in _MEASUREMENTS.items()},
    lack=Missing,
    libraries=(*LIBRARIES, "fastapi", "uvicorn"),
)
