"""The table of a run: each row ours beside a peer's, and the ratio with its range."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.table import Table

from ..display import number
from .turns import PeerRow

if TYPE_CHECKING:
    from ..suite import SuiteReport


def table(report: SuiteReport) -> Table:
    """For a terminal, within 80 columns. Ratios are green where ours took less."""
    found = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0))
    for column in ("row", "ours", "peer's", "", "ours/peer's", "from", "to"):
        words = column in ("row", "")
        found.add_column(column, justify="left" if words else "right", no_wrap=True)
    for row in peer_rows(report):
        colour = "green" if row.ratio <= 1.0 else "red"
        found.add_row(
            row.name,
            number(row.value.p50),
            number(row.limit.p50),
            row.unit,
            f"[{colour}]{number(row.ratio)}[/]",
            number(min(row.ratios)),
            number(max(row.ratios)),
        )
    return found


def markdown(report: SuiteReport) -> str:
    """The table of the docs."""
    lines = [
        "| row | ours | p20 to p80 | peer's | p20 to p80 | unit | ours/peer's | range |",
        "|---|--:|--:|--:|--:|---|--:|--:|",
    ]
    for row in peer_rows(report):
        sides = " | ".join(
            f"{number(side.p50)} | {number(side.p20)} to {number(side.p80)}"
            for side in (row.value, row.limit)
        )
        low, high = number(min(row.ratios)), number(max(row.ratios))
        lines.append(
            f"| `{row.name}` | {sides} | {row.unit} | **{number(row.ratio)}** | {low} to {high} |"
        )
    return "\n".join(lines)


def peer_rows(report: SuiteReport) -> list[PeerRow]:
    """The rows of the report, which all have a peer."""

    return [row for row in report.rows if isinstance(row, PeerRow)]


def verdict(report: SuiteReport) -> str:
    """In words: in how many rows ours took less."""
    rows = peer_rows(report)
    less = sum(row.ratio <= 1.0 for row in rows)
    crashed = f", {len(report.crashed)} crashed" if report.crashed else ""
    return f"ours took less, or as much, in {less} of {len(rows)} rows{crashed}"
