"""The core's bookings of transfers: where bytes move, when, and what it learns of links."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from coresupport import BLOCK, conductor, keys, nothing_moves, prompt, spec, tell

from tiffin.conductor.events.index_updates import Added
from tiffin.conductor.pool.orders import Copy, Drop, Ended
from tiffin.conductor.records import Decision, RequestEvent, Role

if TYPE_CHECKING:
    from tiffin.conductor.core import Conductor
    from tiffin.conductor.records import Request

BLOCK_BYTES = 160 << 20  # as `spec` says
GB = 10**9
PAIR = (spec("p", Role.PREFILL), spec("d", Role.DECODE))


def decided(made: Conductor, request: Request, now: float = 1.0) -> Decision:
    decision = made.schedule(request, now)
    assert isinstance(decision, Decision)
    return decision


def number(made: Conductor, instance: str) -> int:
    return int(made.cluster.node[made.cluster.row(instance)])


def test_a_hand_over_is_planned_then_in_flight_at_both_ends() -> None:
    made = conductor(*PAIR)
    decided(made, prompt("a"))
    p, d, nbytes = number(made, "p"), number(made, "d"), BLOCK_BYTES * (8 * BLOCK + 10) // BLOCK
    assert made.transfers.planned_bytes(p) == nbytes
    tell(made, "a", "prefill_began", now=1.5)
    assert made.transfers.in_flight_bytes(p) == 0, "it leaves when it has been computed"
    tell(made, "a", "prefill_done", now=2.0)
    assert made.transfers.planned_bytes(p) == 0
    assert made.transfers.in_flight_bytes(p) == made.transfers.receiving_bytes(d) == nbytes
    tell(made, "a", "handed_over", now=2.5)
    assert made.transfers.idle


def test_events_may_come_in_another_order() -> None:
    made = conductor(*PAIR)
    decided(made, prompt("a"))
    tell(made, "a", "handed_over", now=2.0)
    assert made.transfers.idle
    tell(made, "a", "prefill_done", "fetched", "prefill_began", now=2.1)
    assert made.transfers.idle, "it has been handed over"


def test_overlapped_it_leaves_from_the_begin_of_the_prefill() -> None:
    made = conductor(*PAIR, disaggregation={"overlapped": True})
    decided(made, prompt("a"))
    p = number(made, "p")
    tell(made, "a", "prefill_began", now=1.5)
    sent = made.transfers.in_flight_bytes(p)
    assert sent > 0
    tell(made, "a", "prefill_began", "prefill_done", now=2.0)
    assert made.transfers.in_flight_bytes(p) == sent, "once"
    tell(made, "a", "handed_over", now=2.1)
    assert made.transfers.idle


@pytest.mark.parametrize("phase", ["placed", "prefill_done", "handed_over"])
@pytest.mark.parametrize(
    "how", ["finished", "cancelled", "expired", "prefill removed", "decode removed", "rescheduled"]
)
def test_however_it_ends_its_transfers_end_once(phase: str, how: str) -> None:
    made = conductor(*PAIR, spec("q", Role.PREFILL), core={"decision_ttl_s": 5.0})
    made.apply(Added("node-p", "dram", keys("a", 8)), 0.5)
    made.drain("p", 0.5)  # so that `q` fetches
    decision = decided(made, prompt("a", 16))
    assert (decision.prefill, len(decision.fetches)) == ("q", 1)
    if phase != "placed":
        tell(made, "a", "prefill_done", now=1.1)
    if phase == "handed_over":
        tell(made, "a", "handed_over", now=1.2)
    if how in ("finished", "cancelled"):
        tell(made, "a", how, now=2.0)
    elif how == "expired":
        made.tick(60.0)
    elif how == "rescheduled":
        made.schedule(prompt("a", 16, exclude=("d",)), 2.0)
    else:
        made.remove("q" if how == "prefill removed" else "d", 2.0)
        assert made.transfers.idle
        if made.ledger.get("a") is not None:
            tell(made, "a", "finished", now=3.0)
    assert nothing_moves(made)


def held_fetch() -> tuple[Conductor, Decision]:
    """`q` has three prompts of 64 blocks, one of which is held, then one that fetches a block."""
    made = conductor(*PAIR, spec("q", Role.PREFILL))
    made.apply(Added("node-p", "dram", keys("a", 8)), 0.5)
    made.drain("p", 0.5)
    for name in ("x", "y", "z"):
        decided(made, prompt(name, 64))
    return made, decided(made, prompt("a"))


def test_who_is_held_fetches_when_it_is_released() -> None:
    made, decision = held_fetch()
    source, (fetch,) = number(made, "p"), decision.fetches
    assert made.dispatch.holds("a")
    assert made.transfers.planned_bytes(source) == fetch.nbytes
    for name, at in (("x", 5.0), ("y", 10.0)):
        assert made.transfers.in_flight_bytes(source) == 0
        tell(made, name, "prefill_done", now=at)
    assert not made.dispatch.holds("a")
    assert made.transfers.planned_bytes(source) == 0
    assert made.transfers.in_flight_bytes(source) == fetch.nbytes
    tell(made, "a", "fetched", now=10.5)
    assert made.transfers.in_flight_bytes(source) == 0
    for name in "xyza":
        tell(made, name, "finished", now=20.0)
    assert nothing_moves(made)


def test_who_fetches_is_served_when_it_was_predicted_behind_all_before_it() -> None:
    made, last = held_fetch()
    sizes = {name: made.ledger.get(name) for name in "xyza"}
    engine = [name for name in sizes if not made.dispatch.holds(name)]
    assert engine == ["x", "y"]
    served, now = list[str](), 1.0
    while engine:  # first come, first served
        name = engine.pop(0)
        flight = sizes[name]
        assert flight is not None
        now += flight.prefill_s
        served.append(name)
        tell(made, name, "prefill_done", now=now)
        made.tick(now)
        engine += [one for one in made.dispatch.ended() if one not in served]
    assert "".join(served) == "xyza"
    assert now - 1.0 == pytest.approx(last.predicted_ttft_s, rel=0.01)


@pytest.mark.parametrize("how", ["finished", "cancelled", "expired", "removed", "fetched"])
def test_however_a_held_one_ends_nothing_is_planned(how: str) -> None:
    made, _ = held_fetch()
    source = number(made, "p")
    if how in ("finished", "cancelled", "fetched"):
        tell(made, "a", how, now=2.0)
    elif how == "expired":
        made.tick(1000.0)
    else:
        made.remove("q", 2.0)
    assert made.transfers.planned_bytes(source) == made.transfers.in_flight_bytes(source) == 0


def test_an_instance_without_a_node_has_a_card_of_its_own() -> None:
    made = conductor(
        spec("p", Role.PREFILL, node=""), spec("q", Role.PREFILL, node=""), spec("d", node="")
    )
    assert len({number(made, name) for name in "pqd"}) == 3
    made.drain("q", 0.5)
    made.drain("d", 0.5)
    made.register(spec("e", Role.DECODE, node=""), 0.5)
    decision = decided(made, prompt("a"))
    assert (decision.prefill, decision.decode) == ("p", "e")
    tell(made, "a", "prefill_done", now=2.0)
    assert made.transfers.in_flight_bytes(number(made, "p")) > 0
    assert made.transfers.in_flight_bytes(number(made, "q")) == 0
    made.names.sweep()
    assert made.transfers.in_flight_bytes(number(made, "p")) > 0


def test_what_the_instance_that_decodes_has_is_not_moved() -> None:
    made = conductor(*PAIR)
    made.apply(Added("d", "hbm", keys("a", 6)), 0.5)
    decided(made, prompt("a"))
    assert (
        made.transfers.planned_bytes(number(made, "p")) == BLOCK_BYTES * (2 * BLOCK + 10) // BLOCK
    )


def test_a_busy_card_makes_the_second_token_late_and_is_avoided() -> None:
    """Both have the prompt's blocks; the card of one has a hand-over of 8 seconds to send."""
    slow = {"link_bandwidth_bytes_s": 1e9}
    for busy, free in (("p", "q"), ("q", "p")):
        made = conductor(
            spec("p", Role.PREFILL), spec("q", Role.PREFILL), spec("d", Role.DECODE),
            transfers=slow,
        )  # fmt: skip
        for name in ("p", "q"):
            made.apply(Added(name, "hbm", keys("a", 8)), 0.5)
        made.transfers.begin(number(made, busy), 8 * GB, 1.0)
        decision = decided(made, prompt("a"))
        assert decision.prefill == free
        waits = {one.instance: one.terms["handover_wait_s"] for one in decision.candidates}
        assert waits[busy] == pytest.approx(8.0 - decision.predicted_ttft_s, rel=0.01)
        assert waits[free] == 0.0


def test_tokens_come_later_where_kv_waits() -> None:
    """Its time between tokens holds the hand-over, spread over the answer."""
    tbt_s = []
    for promised in (0, 6 * GB):
        made = conductor(*PAIR, transfers={"link_bandwidth_bytes_s": 1e9})
        made.transfers.begin(number(made, "p"), promised, 1.0)
        tbt_s.append(decided(made, prompt("a", 8, output_tokens=100)).predicted_tbt_s)
    ttft_s = decided(conductor(*PAIR), prompt("a", 8)).predicted_ttft_s
    assert tbt_s[1] - tbt_s[0] == pytest.approx((6.0 - ttft_s) / 100, rel=0.02)


def test_a_first_token_from_the_instance_that_decodes_waits_for_the_kv() -> None:
    """Its TTFT holds the hand-over and a step, and its time between tokens does not. The prefill
    takes as long as ever."""
    found = {}
    for source in ("prefill", "decode"):
        made = conductor(*PAIR, transfers={"link_bandwidth_bytes_s": 1e9})
        made.transfers.begin(number(made, "p"), 6 * GB, 1.0)
        asked = prompt("a", 8, output_tokens=100, first_token_from=source)
        found[source] = decided(made, asked)
        flight = made.ledger.get("a")
        assert flight is not None
        assert (
            flight.prefilled_s
            == flight.own_s
            == pytest.approx(decided(conductor(*PAIR), prompt("a")).predicted_ttft_s)
        )
        tell(made, "a", "prefill_done", now=2.0)
        sending = made.transfers.in_flight_bytes(number(made, "p"))
        tell(made, "a", "first_token", now=9.0)
        came = sending - made.transfers.in_flight_bytes(number(made, "p"))
        assert bool(came) is (source == "decode"), "the KV is there, by its first token"
    early, late = found["prefill"], found["decode"]
    step_s = late.predicted_tbt_s
    moving_s = (early.predicted_tbt_s - step_s) * 100
    sending_s = 6.0 - early.predicted_ttft_s + BLOCK_BYTES * (8 * BLOCK + 10) / BLOCK / 1e9
    assert moving_s == pytest.approx(sending_s, rel=0.01)
    assert late.predicted_ttft_s == pytest.approx(early.predicted_ttft_s + moving_s + step_s)


# -- what is learnt --------------------------------------------------------------------------------


def handed_over(made: Conductor, blocks: int, now: float, took_s: float) -> None:
    name = f"r{now}"
    decided(made, prompt(name, blocks), now)
    tell(made, name, "prefill_done", "first_token", now=now + 50.0)
    tell(made, name, "handed_over", now=now + 50.0 + took_s)
    tell(made, name, "finished", now=now + 60.0)


def speed_bytes_s(made: Conductor) -> float:
    """Of the link from `p` to `d`."""
    p, d = number(made, "p"), number(made, "d")
    took = [float(made.transfers.seconds(p, 0, d, size)) for size in (GB, 2 * GB)]
    return GB / (took[1] - took[0])


def test_hand_overs_teach_the_speed_of_a_link() -> None:
    made = conductor(*PAIR)
    for turn, blocks in enumerate((4, 8, 16, 24, 32, 40)):
        late_s = 0.2
        took_s = (blocks * BLOCK + 10) * BLOCK_BYTES / BLOCK / 3e9 + late_s
        handed_over(made, blocks, 100.0 * turn, took_s)
    assert speed_bytes_s(made) == pytest.approx(3e9, rel=0.02)


def test_company_teaches_nothing() -> None:
    """Each shares the sender's card for a while with another transfer, and takes twice as long."""
    made = conductor(*PAIR)
    known = speed_bytes_s(made)
    p, d = number(made, "p"), number(made, "d")
    for turn, blocks in enumerate((4, 8, 16, 24, 32, 40)):
        now = 100.0 * turn
        decided(made, prompt(f"r{turn}", blocks), now)
        tell(made, f"r{turn}", "prefill_done", now=now + 50.0)
        made.transfers.begin(p, GB, now + 50.1, target_node=d)
        made.transfers.end(p, GB, target_node=d)
        tell(made, f"r{turn}", "handed_over", "finished", now=now + 50.0 + blocks)
    assert speed_bytes_s(made) == pytest.approx(known)


def test_tokens_teach_nothing() -> None:
    """They say that the KV came, not when."""
    made = conductor(*PAIR)
    known = speed_bytes_s(made)
    for turn, blocks in enumerate((4, 8, 16, 24, 32, 40)):
        now, name = 100.0 * turn, f"r{turn}"
        decided(made, prompt(name, blocks), now)
        tell(made, name, "prefill_done", now=now + 1.0)
        tell(made, name, "tokens", "finished", now=now + 1.0 + blocks, tokens=9)
    assert speed_bytes_s(made) == pytest.approx(known)


def test_copies_by_orders_are_booked_and_teach() -> None:
    made = conductor(*PAIR)
    p, d = number(made, "p"), number(made, "d")
    book = made.bookings
    for turn, blocks in enumerate((4, 8, 16, 24, 32, 40)):
        now, nbytes = 100.0 * turn, blocks * BLOCK_BYTES
        copy = Copy(turn, keys("c", blocks), b"", 0, "node-p", "node-d", nbytes, "hot")
        book.ordered(copy, now)
        book.ordered(Drop(1000 + turn, copy.keys, "node-p", "cold"), now)
        assert made.transfers.in_flight_bytes(p) == made.transfers.receiving_bytes(d) == nbytes
        made.steering.ended(Ended(turn, blocks=blocks), now + 0.5 + nbytes / 2e9)
        made.steering.ended(Ended(turn, blocks=blocks), now + 99.0)
        assert made.transfers.idle
    assert speed_bytes_s(made) == pytest.approx(2e9, rel=0.02)
    for number_, blocks in ((50, 0), (51, 3)):
        book.ordered(Copy(number_, keys("c", 9), b"", 0, "node-p", "node-d", 9 * GB, ""), 900.0)
        made.steering.ended(Ended(number_, blocks=blocks, error="Full" * (not blocks)), 999.0)
    assert made.transfers.idle
    assert speed_bytes_s(made) == pytest.approx(2e9, rel=0.02), "failed, or in part"


def test_events_of_another_route_of_a_race_say_nothing_of_this_one() -> None:
    made = conductor(*PAIR)
    decided(made, prompt("a"))
    tell(made, "a", "prefill_done", now=2.0)
    made.observe(RequestEvent("a", "handed_over", route=("x", "d")), 2.5)
    assert not made.transfers.idle
    made.observe(RequestEvent("a", "handed_over", route=("p", "d")), 2.5)
    assert made.transfers.idle
