"""What is said of queues can be wrong, and every way and order has its row."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tiffin.bench.reproduce.goals import queues
from tiffin.bench.reproduce.goals.queues import AT_ONCE, DEFAULT, Times
from tiffin.bench.reproduce.registry import Effort

if TYPE_CHECKING:
    from tiffin.bench.reproduce.evidence import Statement

FEW, MANY = Times(2.0, 5.0), Times(50.0, 100.0)


def said(few: Times = FEW, many: Times = MANY, still: float = 0.0) -> tuple[Statement, ...]:
    """Where all is sent at once, everybody waits for 50 s."""
    found = {AT_ONCE: (MANY, MANY), DEFAULT: (few, many)}
    orders = {("shortest-first", 60.0): few, ("fcfs", 10.0): Times(9.0, 30.0)}
    return queues._said(found, found, orders, {DEFAULT: [still]})  # type: ignore[arg-type]


def test_it_may_not_hold() -> None:
    assert all(one.holds for one in said())
    assert [one.holds for one in said(few=Times(6.0, 9.0))] == [False, True] * 2 + [False, True]
    assert [one.holds for one in said(many=Times(60.0, 99.0))] == [True, False] * 2 + [True] * 2
    assert not said(still=0.01)[-1].holds


@pytest.mark.slow
def test_each_way_and_order_has_its_row(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(queues, "SPAN_S", 40.0)
    monkeypatch.setattr(queues, "AT_ONCE_REQUESTS", 10)
    found = queues.queues(Effort(seeds=(0,)), lambda text: None)
    classes, tenants, orders, idle = found.grids
    assert [row[0] for row in classes.rows] == [row[0] for row in idle.rows] == list(queues.WAYS)
    assert [row[0] for row in tenants.rows] == [AT_ONCE, DEFAULT]
    assert len(orders.rows) == len(queues.ORDERS)
    assert all(float(cell) >= 0 for row in (*classes.rows, *tenants.rows) for cell in row[1:])
