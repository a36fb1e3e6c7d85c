"""Bindings of spread contexts: when they are looked at, what is ordered, and what is counted."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from coresupport import conductor, nothing_is_promised, spec, tell

from tiffin.conductor.pool.instance_orders import RebindRequest
from tiffin.conductor.records import Decision, Request, Role

if TYPE_CHECKING:
    from tiffin.conductor.core import Conductor

EVERY_S = 10.0
LABELS = {"orders_url": "http://localhost/orders", "orders": "rebind"}


def skewed(
    labels: dict[str, str] = LABELS, every_s: float = EVERY_S
) -> tuple[Conductor, list[str]]:
    """Of eight contexts on two instances, those bound to one of these have ended; returns the
    conductor, the instance with the four that are left, and the other one."""
    spreads = {"enabled": True, "buckets": [[10_000, 2]], "rebind_s": 0.0}
    made = conductor(
        spec("p", Role.PREFILL),
        *(spec(name, Role.DECODE, labels=labels) for name in ("d1", "d2")),
        spread=spreads | {"rebind_every_s": every_s},
    )
    bound: dict[str, list[str]] = {"d1": [], "d2": []}
    for number in range(8):
        name = f"r{number}"
        decision = made.schedule(Request(name, "m", 8_000, output_tokens=5_000), 1.0)
        assert isinstance(decision, Decision)
        assert len(decision.shards) == 2
        bound[decision.decode].append(name)
        tell(made, name, "prefill_done", "first_token", now=1.5)
    assert [len(names) for names in bound.values()] == [4, 4]
    for name in bound["d2"]:
        tell(made, name, "finished", now=2.0)
    return made, bound["d1"]


def batches(made: Conductor) -> list[int]:
    return [int(made.cluster.own_batch[made.cluster.row(name)]) for name in ("d1", "d2")]


def ordered(made: Conductor, now: float) -> list[str]:
    """The requests whose bindings are to move from d1 to d2."""
    orders = made.steering.tick({}, now).rebinds
    for order in orders:
        assert order == RebindRequest("d1", order.request_id, "d2")
    return [order.request_id for order in orders]


def test_half_of_them_move_and_count_there_when_the_instance_has_said_so() -> None:
    made, left = skewed()
    moving = ordered(made, 3.0)
    assert len(moving) == 2
    assert set(moving) < set(left)
    assert batches(made) == [4, 0]
    assert ordered(made, 3.0 + EVERY_S) == [], "their outcome is not known yet"
    made.rebinder.ended(moving[0], 14.0)
    made.rebinder.ended(moving[1], 14.0, "no answer")
    assert batches(made) == [3, 1]
    decision = made.schedule(Request(moving[0], "m", 8_000, output_tokens=5_000), 14.0)
    assert isinstance(decision, Decision)
    assert decision.decode == "d2"
    assert len(ordered(made, 15.0)) == 1, "one of the three"
    assert ordered(made, 16.0) == [], "not before it is time again"
    for name in left:
        tell(made, name, "finished", now=17.0)
    assert nothing_is_promised(made)
    assert not made.cluster.heavy.any()


@pytest.mark.parametrize("why", ["off", "no label", "no url", "another order"])
def test_nothing_moves_where_nobody_could(why: str) -> None:
    labels = {
        "no label": {},
        "no url": {"orders": "rebind"},
        "another order": LABELS | {"orders": "save hand_over"},
    }.get(why, LABELS)
    made, _ = skewed(labels, 0.0 if why == "off" else EVERY_S)
    assert ordered(made, 3.0) == []


@pytest.mark.parametrize("who", ["requests", "d1", "d2"])
def test_what_has_left_meanwhile_is_not_counted(who: str) -> None:
    made, left = skewed()
    moving = ordered(made, 3.0)
    if who == "requests":
        for name in left:
            tell(made, name, "cancelled", now=3.5)
    else:
        made.remove(who, 3.5)
    for name in moving:
        made.rebinder.ended(name, 4.0)
    for name in left:
        if who != "requests":
            tell(made, name, "finished", now=5.0)
    assert nothing_is_promised(made)
    assert not made.cluster.heavy.any()
