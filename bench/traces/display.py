"""Tables of a trace's figures."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.table import Table

from ..display import number

if TYPE_CHECKING:
    from collections.abc import Iterable

    from .comparison import ComparedFigure, Figure


def figures_table(name: str, figures: Iterable[Figure]) -> Table:
    """One figure per line."""
    table = _table(name)
    for figure in figures:
        table.add_row(figure.label, _value(figure.value, figure.unit), figure.unit)
    return table


def comparison_table(name: str, figures: Iterable[ComparedFigure]) -> Table:
    """The figures of a trace and of one like it, and the ratio of the second to the first."""
    table = _table(name, "look-alike")
    table.add_column("ratio", justify="right")
    for one in figures:
        values = (_value(value, one.unit) for value in (one.original, one.generated))
        ratio = "" if one.ratio is None else f"{one.ratio:.2f}"
        table.add_row(one.label, *values, one.unit, ratio)
    return table


def _table(*names: str) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column("", no_wrap=True)
    for name in names:
        table.add_column(name, justify="right")
    table.add_column("", no_wrap=True)
    return table


def _value(value: float, unit: str) -> str:
    if unit == "%":
        return f"{value:.1f}"
    return f"{value:,.0f}" if abs(value) >= 100 else number(value)
