"""Runs the rows one after the other. What they look like is `tiffin bench store`'s report."""

from __future__ import annotations

import json
import subprocess
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from tiffin.kvstore.errors import TiffinError
from tiffin.messenger.errors import MessengerError

from ..environment import LIBRARIES, environment
from ..store.report import Report
from .directory import locate
from .mooncake import mooncake
from .readers import concurrent_readers, first_layer
from .setting import Missing
from .transfer import remote_get, remote_small, scattered

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from pathlib import Path

    from ..store.rows import Row
    from .setting import Setting

# The order is that of the docs. Each gives one or more rows.
MEASUREMENTS: dict[str, Callable[[Setting], list[Row]]] = {
    "remote-get": remote_get,
    "remote-small": remote_small,
    "scattered": scattered,
    "first-layer": first_layer,
    "readers": concurrent_readers,
    "locate": locate,
    "mooncake": mooncake,
}

# What a measurement may die of without taking the others along.
_CRASHES = (
    TiffinError,
    MessengerError,
    OSError,
    subprocess.SubprocessError,
    AssertionError,
    ValueError,
    MemoryError,
)


@dataclass(slots=True)
class NetworkReport(Report):
    """As the store's. `missing` maps a measurement to what it would have needed."""

    missing: dict[str, str] = field(default_factory=dict)

    def plain(self) -> dict[str, Any]:
        """For JSON."""
        # Not `super()`: a dataclass with slots is another class than the one that it is written in.
        return {**Report.plain(self), "missing": self.missing}

    def write(self, folder: Path) -> Path:
        """Write `bench-network.json` into `folder`, made if need be; returns its path."""
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / "bench-network.json"
        path.write_text(json.dumps(self.plain(), indent=2) + "\n", encoding="utf-8")
        return path


def run(
    setting: Setting, names: Iterable[str] = MEASUREMENTS, started: Callable[[str], None] = print
) -> NetworkReport:
    """Carry out the named measurements; `started(name)` is called before each."""
    report = NetworkReport(environment((*LIBRARIES, "redis")), asdict(setting.sizes))
    for name in names:
        started(name)
        try:
            report.rows += MEASUREMENTS[name](setting)
        except Missing as lack:
            report.missing[name] = str(lack)
        except _CRASHES as error:
            report.crashed[name] = f"{type(error).__name__}: {error}"
    return report
