"""Requests that go on at another instance while they decode: chosen, reserved, booked, counted."""

from __future__ import annotations

import contextlib
import random
from typing import TYPE_CHECKING

import pytest
from coresupport import conductor, nothing_is_promised, nothing_moves, prompt, spec, tell

from tiffin.conductor.core.decode_moves import MOVES_MAX, RETRY_S
from tiffin.conductor.core.hold import hold_of
from tiffin.conductor.errors import Conflict
from tiffin.conductor.pool.instance_orders import HandOverRequest
from tiffin.conductor.records import Decision, InstanceSpec, Load, Objectives, Request, Role

if TYPE_CHECKING:
    from tiffin.conductor.core import Conductor

D, ABLE = Role.DECODE, {"orders_url": "http://localhost/orders", "orders": "save hand_over"}
COLUMNS = ("own_queued", "own_batch", "own_context_tokens", "own_kv_used_tokens", "heavy")


def decoder(name: str, **changes: object) -> InstanceSpec:
    return spec(name, D, labels=ABLE, **changes)


def decoding(made: Conductor, *names: str, output_tokens: int = 500, **changes: object) -> None:
    """Place requests at d1, of which a second token was given at 2.0."""
    for name in names:
        request = Request(name, "m", 1000, output_tokens=output_tokens, **changes)  # type: ignore[arg-type]
        decision = made.schedule(request, 1.0)
        assert isinstance(decision, Decision)
        assert decision.decode == "d1"
        tell(made, name, "prefill_done", now=1.5)
        tell(made, name, "first_token", now=1.5)
        tell(made, name, "tokens", now=2.0, tokens=1)


def flipping(*more: InstanceSpec, **changes: object) -> Conductor:
    """Two requests decode at d1, which is to prefill, beside d2 and `more`."""
    settings = {"flips": {"requests": "hand_over"}}
    made = conductor(spec("p", Role.PREFILL), decoder("d1", **changes), planner=settings)
    decoding(made, "long", output_tokens=900)
    decoding(made, "short")
    for one in (decoder("d2"), *more):
        made.register(one, 2.0)
    made.flip("d1", Role.PREFILL, 2.5)
    return made


def columns(made: Conductor, name: str) -> dict[str, int]:
    row = made.cluster.row(name)
    return {column: int(getattr(made.cluster, column)[row]) for column in COLUMNS}


def test_they_go_on_elsewhere_and_the_flip_goes_on() -> None:
    made = flipping()
    steered = made.steering.tick({}, 3.0)
    assert steered.hand_overs == [
        HandOverRequest("d1", "long", "d2"),
        HandOverRequest("d1", "short", "d2"),
    ]
    assert made.requests_at("d1") == 2, "they are still there"
    before = columns(made, "d1")
    assert columns(made, "d2")["own_kv_used_tokens"] == before["own_kv_used_tokens"]
    assert len(made.bookings) > 2, "their KV is on its way"
    assert made.steering.tick({}, 4.0).hand_overs == [], "once each"
    for name in ("long", "short"):
        made.moves.ended(name, 4.5)
    assert not len(made.moves)
    assert set(columns(made, "d1").values()) == {0}
    assert columns(made, "d2") == before
    assert (made.requests_at("d1"), made.requests_at("d2")) == (0, 2)
    decision = made.decision("long")
    assert isinstance(decision, Decision)
    flight = made.ledger.get("long")
    assert flight is not None
    assert flight.decision.decode == "d2"
    assert made.schedule(Request("long", "m", 1000, output_tokens=900), 4.6) == flight.decision
    made.horizon.check()
    made.steering.tick({}, 5.0)
    assert made.steering.flips()[-1].step == "saving"
    for name in ("long", "short"):
        tell(made, name, "tokens", now=5.0, tokens=3)
        tell(made, name, "finished", now=6.0)
    for name in ("d1", "d2"):
        assert set(columns(made, name).values()) == {0}
    assert nothing_moves(made)
    assert not len(made.horizon)


def test_who_is_not_handed_over_stays_and_is_tried_again_later() -> None:
    made = flipping()
    assert len(made.steering.tick({}, 3.0).hand_overs) == 2
    before = columns(made, "d1")
    for name in ("long", "short"):
        made.moves.ended(name, 3.5, "no answer")
    assert columns(made, "d1") == before
    assert set(columns(made, "d2").values()) == {0}
    assert made.steering.tick({}, 4.0).hand_overs == []
    assert len(made.steering.tick({}, 3.5 + RETRY_S).hand_overs) == 2


def test_only_a_few_at_a_time_the_longest_first() -> None:
    made = conductor(
        spec("p", Role.PREFILL), decoder("d1"), planner={"flips": {"requests": "hand_over"}}
    )
    for number in range(9):
        decoding(made, f"r{number}", output_tokens=100 * (number + 1))
    made.register(decoder("d2"), 2.0)
    made.flip("d1", Role.PREFILL, 2.5)
    first = made.steering.tick({}, 3.0).hand_overs
    assert [order.request_id for order in first] == ["r8", "r7", "r6", "r5"][:MOVES_MAX]
    made.moves.ended("r8", 3.5)
    assert [order.request_id for order in made.steering.tick({}, 4.0).hand_overs] == ["r4"]


@pytest.mark.parametrize("why", ["wait", "can't", "no room", "not decoding"])
def test_who_can_not_go_stays(why: str) -> None:
    mode = "wait" if why == "wait" else "hand_over"
    labels = {} if why == "can't" else ABLE
    made = conductor(
        spec("p", Role.PREFILL),
        spec("d1", D, labels=labels),
        planner={"flips": {"requests": mode}},
    )
    decoding(made, "x")
    if why == "not decoding":
        tell(made, "x", "finished", now=2.0)
        assert isinstance(made.schedule(prompt("y", 2), 2.0), Decision)
    room = 1000 if why == "no room" else 100_000
    made.register(decoder("d2", kv_capacity_tokens=room), 2.0)
    made.flip("d1", Role.PREFILL, 2.5)
    assert made.steering.tick({}, 3.0).hand_overs == []
    assert made.requests_at("d1") == 1


def test_nobody_is_slowed_down_beyond_what_was_promised() -> None:
    """The steps at d2 are longer than the objective of the one that would come."""
    made = conductor(
        spec("p", Role.PREFILL),
        decoder("d1"),
        planner={"flips": {"requests": "hand_over"}},
        admission={"mode": "early"},
    )
    step_s = made.cluster.d0[1] + made.cluster.d1[1] + made.cluster.d2[1] * 2000
    decoding(made, "x", objectives=Objectives(tbt_s=float(step_s) * 2))
    made.register(decoder("d2"), 2.0)
    made.flip("d1", Role.PREFILL, 2.5)
    row = made.cluster.row("d2")
    made.cluster.d0[row] *= 100
    assert made.steering.tick({}, 3.0).hand_overs == []
    made.cluster.d0[row] /= 100
    assert len(made.steering.tick({}, 3.0 + RETRY_S).hand_overs) == 1


@pytest.mark.parametrize("who", ["request", "target", "source"])
def test_what_leaves_on_the_way_leaves_nothing_behind(who: str) -> None:
    made = flipping(decoder("d3"))
    assert len(made.steering.tick({}, 3.0).hand_overs) == 2
    if who == "request":
        tell(made, "long", "cancelled", now=3.2)
        tell(made, "short", "finished", now=3.2)
    else:
        for name in ("d2", "d3") if who == "target" else ("d1",):
            made.remove(name, 3.2)
    for name in ("long", "short"):
        made.moves.ended(name, 3.5)
    assert not len(made.moves)
    for name in ("long", "short"):
        if who == "target":
            tell(made, name, "finished", now=4.0)
    assert nothing_is_promised(made)
    assert nothing_moves(made)


def test_one_that_is_held_decodes_elsewhere_as_soon_as_it_is_asked_about() -> None:
    made = conductor(spec("p", Role.PREFILL), decoder("d1"), queue={"ahead_max": 1, "ahead_s": 0.0})
    for name in ("first", "held"):
        assert isinstance(made.schedule(prompt(name, 2), 1.0), Decision)
    assert hold_of(made, "held", 1.0).state == "held"
    made.register(decoder("d2"), 1.5)
    made.dispatch.ended()
    made.flip("d1", Role.PREFILL, 2.0)
    assert made.dispatch.ended() == ["held"], "who waits for it is told"
    assert hold_of(made, "held", 2.0).state == "moved"
    decision = made.schedule(prompt("held", 2), 2.0)
    assert isinstance(decision, Decision)
    assert decision.decode == "d2"
    assert hold_of(made, "held", 2.0).state == "held"


@pytest.mark.parametrize("seed", range(3))
def test_whatever_happens_all_that_was_added_is_taken_away(seed: int) -> None:
    dice = random.Random(seed)
    made = conductor(
        spec("p", Role.PREFILL),
        *(decoder(f"d{number}") for number in range(4)),
        planner={"flips": {"requests": "hand_over", "drain_s": 20.0, "blocks": "leave"}},
    )
    alive, orders, now = list[str](), list[HandOverRequest](), 1.0
    for step in range(400):
        now += 0.5
        name = f"r{step}"
        if isinstance(made.schedule(Request(name, "m", 500, output_tokens=200), now), Decision):
            alive.append(name)
            for kind in ("prefill_done", "first_token"):
                tell(made, name, kind, now=now)
        for name in dice.sample(alive, min(3, len(alive))):
            tell(made, name, "tokens", now=now, tokens=2)
        one = dice.choice([name for name in made.cluster.names if name != "p"])
        with contextlib.suppress(Conflict):  # too few would be left, or another one is flipped
            made.flip(one, dice.choice([D, Role.PREFILL]), now)
        orders += made.steering.tick({}, now).hand_overs
        dice.shuffle(orders)
        for order in [orders.pop() for _ in range(len(orders) // 2)]:
            made.moves.ended(order.request_id, now + 0.1, dice.choice(["", "", "broken"]))
        while len(alive) > 12:
            tell(made, alive.pop(dice.randrange(len(alive))), "finished", now=now)
        made.horizon.check()
    assert any(flip.step == "ready" for flip in made.steering.flips())
    for name in alive:
        tell(made, name, "finished", now=now)
    assert nothing_is_promised(made)
    assert not made.cluster.heavy.any()
    assert nothing_moves(made)
    assert not len(made.moves)


def test_who_is_held_for_an_instance_that_falls_silent_is_told() -> None:
    made = conductor(
        spec("p", Role.PREFILL),
        decoder("d1"),
        queue={"ahead_max": 1, "ahead_s": 0.0},
        core={"heartbeat_timeout_s": 2.0},
    )
    for name in ("first", "held"):
        assert isinstance(made.schedule(prompt(name, 60), 1.0), Decision)
    made.dispatch.ended()
    made.heartbeat("p", Load(), 3.0)
    made.tick(3.5)
    assert made.dispatch.ended() == ["held"]
    assert hold_of(made, "held", 3.5).state == "moved"
