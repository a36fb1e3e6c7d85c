"""Checks of rows, for the tests of all suites."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tiffin.bench.store.rows import Row


def check(rows: list[Row]) -> None:
    """There are rows, each with a unique name, texts, and plausible numbers."""
    assert rows
    assert len({row.name for row in rows}) == len(rows)
    for row in rows:
        assert row.value.p20 <= row.value.p50 <= row.value.p80, row
        assert min(row.value.p50, row.limit.p50, row.ratio) > 0, row
        assert row.what, row
        assert row.limit_what, row
