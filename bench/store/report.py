"""Runs the rows one after the other and shows them: a table for people, JSON for programs."""

from __future__ import annotations

import json
import subprocess
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from rich.table import Table

from tiffin.kvstore.errors import TiffinError
from tiffin.messenger.errors import MessengerError

from ..environment import environment
from .bandwidth import get_into, put
from .disk import nvme, restart
from .latency import keys, leased_get, match
from .memory import allocator, memory

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from pathlib import Path

    from .rows import Row
    from .setting import Setting

# The order is that of the docs. Each gives one or more rows.
MEASUREMENTS: dict[str, Callable[[Setting], list[Row]]] = {
    "leased-get": leased_get,
    "get-into": get_into,
    "put": put,
    "nvme": nvme,
    "keys": keys,
    "match": match,
    "restart": restart,
    "memory": memory,
    "allocator": allocator,
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
class Report:
    """What one run found. `crashed` maps a measurement to what it died of."""

    environment: dict[str, Any]
    sizes: dict[str, Any]
    rows: list[Row] = field(default_factory=list)
    crashed: dict[str, str] = field(default_factory=dict)

    def plain(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "environment": self.environment,
            "sizes": self.sizes,
            "rows": [row.plain() for row in self.rows],
            "crashed": self.crashed,
        }

    def write(self, folder: Path) -> Path:
        """Write `bench-store.json` into `folder`, which is made if need be; returns its path."""
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / "bench-store.json"
        path.write_text(json.dumps(self.plain(), indent=2) + "\n", encoding="utf-8")
        return path


def run(
    setting: Setting, names: Iterable[str] = MEASUREMENTS, started: Callable[[str], None] = print
) -> Report:
    """Carry out the named measurements; `started(name)` is called before each."""
    report = Report(environment(), asdict(setting.sizes))
    for name in names:
        started(name)
        try:
            report.rows += MEASUREMENTS[name](setting)
        except _CRASHES as error:
            report.crashed[name] = f"{type(error).__name__}: {error}"
    return report


def table(report: Report) -> Table:
    """One line per row: met green, missed red."""
    found = Table(show_lines=True)
    for column in ("row", "measured", "limit in the same run"):
        found.add_column(column, overflow="fold")
    for column in ("p20 / p50 / p80", "best", "limit p50", "ratio", "best ratio"):
        found.add_column(column, justify="right")
    found.add_column("target")
    for row in report.rows:
        found.add_row(*_cells(row))
    for name, why in report.crashed.items():
        found.add_row(f"[bold red]{name}[/]", f"[red]crashed: {why}[/]")
    return found


def _cells(row: Row) -> list[str]:
    value, limit = row.value, row.limit
    if value.samples > 1:
        spread = f"{number(value.p20)} / {number(value.p50)} / {number(value.p80)} {row.unit}"
    else:
        spread = f"{number(value.p50)} {row.unit}"
    verdict = {True: "[green]met[/]", False: "[red]missed[/]", None: "[dim]-[/]"}[row.met]
    what = row.what + (f"\n[dim]{row.note}[/]" if row.note else "")
    return [
        row.name,
        what,
        row.limit_what,
        spread,
        number(value.best),
        f"{number(limit.p50)} {row.unit}",
        number(row.ratio),
        number(row.best_ratio),
        f"{row.target_text}\n{verdict}",
    ]


def number(value: float) -> str:
    """Three digits, or four when they are there anyway."""
    return f"{value:.0f}" if abs(value) >= 100 and value % 1 else f"{value:.3g}"


def markdown(report: Report) -> str:
    """The table of the docs."""
    lines = [
        "| row | p20 | p50 | p80 | unit | limit (p50) | ratio | best ratio | target | |",
        "|---|--:|--:|--:|---|--:|--:|--:|---|---|",
    ]
    for row in report.rows:
        spread = " | ".join(number(x) for x in (row.value.p20, row.value.p50, row.value.p80))
        verdict = {True: "met", False: "**missed**", None: ""}[row.met]
        lines.append(
            f"| `{row.name}` | {spread} | {row.unit} | {number(row.limit.p50)} "
            f"| {number(row.ratio)} | {number(row.best_ratio)} | {row.target_text} | {verdict} |"
        )
    return "\n".join(lines)
