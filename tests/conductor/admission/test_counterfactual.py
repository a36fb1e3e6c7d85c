"""The shadow account: outcomes of admitted requests, estimated outcomes of rejected ones."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tiffin.conductor.admission.counterfactual import (
    RATIOS,
    Ghost,
    Shadow,
    ShadowCounts,
    ShadowSettings,
)
from tiffin.conductor.records import Objectives

WITHIN_2_S = Objectives(ttft_s=2.0)
PACE = Objectives(tbt_s=0.1)
BOTH = Objectives(ttft_s=2.0, tbt_s=0.1)
P, D = 0, 1  # rows


def ghost(
    at: float = 0.0,
    objectives: Objectives = WITHIN_2_S,
    own_s: float = 1.0,
    joining_s: float = 0.0,
    prefill_row: int = P,
) -> Ghost:
    return Ghost(prefill_row, D, objectives, own_s, 10.0, at, joining_s)


def serve(shadow: Shadow, name: str, at: float, done_at: float, own_s: float = 1.0) -> None:
    """One admitted request without objectives, from its arrival to its first token."""
    shadow.admitted(name, P, D, Objectives(), own_s, at)
    shadow.first_token(name, done_at)


def calibrated() -> Shadow:
    """A Shadow in which one request has shown that the model of prefill is right."""
    shadow = Shadow()
    serve(shadow, "first", -2.0, -1.0)
    return shadow


# -- the admitted ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("token_at", "tbt_s", "met"),
    [(2.0, 0.1, True), (2.1, 0.1, False), (2.0, 0.11, False), (1.0, None, True)],
)
def test_admitted_requests_are_held_to_their_objectives(
    token_at: float, tbt_s: float | None, met: bool
) -> None:
    shadow = Shadow()
    shadow.admitted("a", P, D, BOTH, 1.0, 0.0)
    shadow.prefill_done("a", token_at - 0.1)
    shadow.first_token("a", token_at)
    shadow.finished("a", tbt_s, 5.0)
    assert shadow.counts == ShadowCounts(admitted_met=met, admitted_missed=not met)


def test_who_has_no_objective_is_not_counted_and_who_gave_up_is_unknown() -> None:
    shadow = Shadow()
    serve(shadow, "no objective", 0.0, 9.0)
    shadow.finished("no objective", 9.0, 20.0)
    shadow.admitted("gave up", P, D, BOTH, 1.0, 0.0)
    shadow.cancelled("gave up", 1.0)
    shadow.admitted("silent", P, D, BOTH, 1.0, 0.0)
    shadow.finished("silent", 0.01, 2.0)
    assert shadow.counts == ShadowCounts(admitted_unknown=2)


# -- TTFT of the refused ---------------------------------------------------------------------------


@pytest.mark.parametrize(("done_at", "met"), [(0.9, True), (1.1, False)])
def test_a_ghost_begins_when_who_was_before_it_is_done(done_at: float, met: bool) -> None:
    shadow = calibrated()
    shadow.admitted("before", P, D, Objectives(), done_at, 0.0)
    shadow.rejected(ghost(at=0.0))
    assert shadow.counts.ghosts == 1
    shadow.prefill_done("before", done_at)
    assert shadow.counts == ShadowCounts(
        rejected_would_have_met=met, rejected_would_have_missed=not met
    )


def test_who_comes_after_it_is_not_waited_for() -> None:
    shadow = calibrated()
    shadow.rejected(ghost())
    shadow.admitted("after", P, D, Objectives(), 50.0, 0.0)
    assert shadow.counts.rejected_would_have_met == 1


def test_a_wrong_model_does_not_judge_a_second_time() -> None:
    """The model took prefill for ten times as slow as it is: the rejected request would have met
    its objective."""
    shadow = Shadow()
    serve(shadow, "a", 0.0, 1.0, own_s=10.0)
    shadow.rejected(ghost(at=2.0, own_s=15.0))
    assert shadow.counts.rejected_would_have_met == 1


def test_a_few_outliers_do_not_count() -> None:
    shadow = Shadow()
    for number in range(RATIOS):
        slow = number % 4 == 0
        serve(shadow, f"r{number}", 100.0 * number, 100.0 * number + (90.0 if slow else 1.0))
    shadow.rejected(ghost(at=5000.0))
    assert shadow.counts.rejected_would_have_met == 1


def test_an_instance_that_was_not_seen_is_judged_by_the_others() -> None:
    shadow = calibrated()
    shadow.rejected(ghost(prefill_row=7))
    assert shadow.counts.rejected_would_have_met == 1


def test_an_instance_that_was_seen_is_judged_by_itself() -> None:
    shadow = calibrated()
    for number in range(RATIOS):
        at = 10.0 * number
        shadow.admitted(f"slow-{number}", 7, D, Objectives(), 1.0, at)
        shadow.first_token(f"slow-{number}", at + 5.0)
    shadow.rejected(ghost(at=500.0))
    shadow.rejected(ghost(at=500.0, prefill_row=7))
    assert shadow.counts == ShadowCounts(rejected_would_have_met=1, rejected_would_have_missed=1)


def test_without_any_observation_nothing_is_claimed() -> None:
    shadow = Shadow()
    shadow.rejected(ghost())
    shadow.tick(119.0)
    assert shadow.counts == ShadowCounts(ghosts=1)
    shadow.tick(120.0)
    assert shadow.counts == ShadowCounts(rejected_unknown=1)


def test_an_observation_that_comes_later_still_counts() -> None:
    shadow = Shadow()
    shadow.rejected(ghost())
    serve(shadow, "a", 10.0, 11.0)
    shadow.tick(120.0)
    assert shadow.counts.rejected_would_have_met == 1


def test_when_who_was_before_it_gives_up_it_moves_up() -> None:
    shadow = calibrated()
    shadow.admitted("a", P, D, Objectives(), 1.0, 0.0)
    shadow.admitted("b", P, D, Objectives(), 9.0, 0.0)
    shadow.rejected(ghost(own_s=0.5))
    shadow.cancelled("b", 0.5)
    shadow.check()
    assert shadow.counts.ghosts == 1
    shadow.prefill_done("a", 1.0)
    assert shadow.counts.rejected_would_have_met == 1


def test_when_nobody_is_left_before_it_it_begins() -> None:
    shadow = calibrated()
    shadow.admitted("a", P, D, Objectives(), 9.0, 0.0)
    shadow.rejected(ghost())
    shadow.cancelled("a", 0.5)
    assert shadow.counts.rejected_would_have_met == 1


# -- TBT of the refused ----------------------------------------------------------------------------


@pytest.mark.parametrize(("tbt_s", "met"), [(0.08, True), (0.095, False)])
def test_a_ghost_would_have_had_the_pace_of_who_decoded_there(tbt_s: float, met: bool) -> None:
    shadow = calibrated()
    shadow.rejected(ghost(objectives=BOTH, joining_s=0.01))
    assert shadow.counts.ghosts == 1
    shadow.finished("first", tbt_s, 4.0)
    assert shadow.counts == ShadowCounts(
        rejected_would_have_met=met, rejected_would_have_missed=not met
    )


def test_one_miss_is_enough() -> None:
    shadow = calibrated()
    shadow.rejected(ghost(objectives=BOTH, own_s=3.0))
    assert shadow.counts.rejected_would_have_missed == 1


def test_who_ended_before_it_or_began_after_it_says_nothing() -> None:
    shadow = calibrated()
    serve(shadow, "before", 0.0, 0.5, own_s=0.5)
    shadow.rejected(ghost(at=1.0, objectives=PACE, own_s=4.0))  # would decode from 5 to 15 s
    shadow.finished("before", 9.0, 4.9)
    serve(shadow, "after", 14.5, 15.5)
    shadow.finished("after", 9.0, 30.0)
    shadow.check()
    assert shadow.counts.ghosts == 1
    shadow.finished("first", 0.05, 30.0)
    assert shadow.counts.rejected_would_have_met == 1


# -- limits ----------------------------------------------------------------------------------------


def test_ghosts_are_as_many_as_allowed() -> None:
    shadow = Shadow(ShadowSettings(ghosts_max=3))
    shadow.admitted("a", P, D, Objectives(), 1.0, 0.0)
    for number in range(10):
        shadow.rejected(ghost(at=float(number), objectives=BOTH))
        shadow.check()
    assert len(shadow) == 3
    assert shadow.counts == ShadowCounts(rejected_unknown=7, ghosts=3)


def test_it_can_be_switched_off_and_does_not_follow_who_cannot_miss() -> None:
    off = Shadow(ShadowSettings(ghosts_max=0))
    off.rejected(ghost())
    shadow = calibrated()
    shadow.rejected(ghost(objectives=Objectives()))
    assert off.counts == shadow.counts == ShadowCounts()


def test_an_instance_that_leaves_takes_its_ghosts_with_it() -> None:
    shadow = calibrated()
    shadow.admitted("a", P, D, BOTH, 1.0, 0.0)
    shadow.rejected(ghost(objectives=BOTH))
    shadow.rejected(ghost(objectives=BOTH, prefill_row=5))
    shadow.forget_row(P)
    shadow.check()
    assert shadow.counts == ShadowCounts(rejected_unknown=1, ghosts=1)
    shadow.forget_row(D)
    shadow.check()
    shadow.first_token("a", 9.0)  # of no use as a ratio: it may have waited for other requests
    shadow.finished("a", 0.2, 10.0)
    assert shadow.counts == ShadowCounts(admitted_missed=1, rejected_unknown=2)


def test_settings_have_bounds() -> None:
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert({"expire_s": 0}, ShadowSettings)
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert({"ghosts": 5}, ShadowSettings)


# -- against what would have happened --------------------------------------------------------------

QUARTERS = st.integers(1, 40).map(lambda count: count / 4)


@given(
    st.lists(st.tuples(st.integers(0, 20), QUARTERS), min_size=2, max_size=12),
    st.integers(0, 11),
    st.sampled_from([0.1, 0.5, 1.0, 4.0, 10.0]),
    st.integers(1, 40).map(lambda count: count / 4 + 0.1),
)
def test_one_refused_request_is_judged_as_if_it_had_been_let_in(
    arrivals: list[tuple[int, float]], which: int, bias: float, objective_s: float
) -> None:
    """A queue in order of arrival, without one of its requests, against the same queue with it: for
    a single rejected request, and a model that is off by a factor, the estimate is exact."""
    arrivals = [(float(at), took) for at, took in sorted(arrivals)]
    which %= len(arrivals)
    done_at, free_at = [], 0.0
    for at, took in arrivals:
        free_at = max(at, free_at) + took
        done_at.append(free_at)
    truth = done_at[which] - arrivals[which][0] <= objective_s

    shadow = Shadow()
    events, free_at = [], 0.0
    for number, (at, took) in enumerate(arrivals):
        events.append((at, 1, number))
        if number != which:
            free_at = max(at, free_at) + took
            events.append((free_at, 0, number))
    for time_s, arrives, number in sorted(events):
        own_s = arrivals[number][1] * bias
        if not arrives:
            shadow.first_token(f"r{number}", time_s)
        elif number == which:
            shadow.rejected(ghost(time_s, Objectives(ttft_s=objective_s), own_s))
        else:
            shadow.admitted(f"r{number}", P, D, Objectives(), own_s, time_s)
        shadow.check()
    shadow.tick(1e6)
    assert shadow.counts == ShadowCounts(
        rejected_would_have_met=truth, rejected_would_have_missed=not truth
    )


NAMES = st.sampled_from(["a", "b", "c", "d"])
ROWS = st.integers(0, 2)
EVENTS = st.one_of(
    st.tuples(st.just("admitted"), NAMES, ROWS, ROWS),
    st.tuples(st.just("rejected"), st.sampled_from([BOTH, PACE, WITHIN_2_S]), ROWS, ROWS),
    st.tuples(st.sampled_from(["prefill_done", "first_token", "cancelled", "finished"]), NAMES),
    st.tuples(st.just("forget_row"), ROWS),
    st.tuples(st.just("tick")),
)


@settings(max_examples=300, deadline=None)
@given(st.lists(EVENTS, max_size=40), st.integers(1, 5))
def test_whatever_happens_each_request_is_counted_once(
    events: list[tuple[object, ...]], ghosts_max: int
) -> None:
    shadow = Shadow(ShadowSettings(ghosts_max=ghosts_max, expire_s=10.0))
    rejected, now = 0, 0.0
    for event in events:
        now += 1.0
        match event:
            case ("admitted", str(name), int(prefill), int(decode)):
                shadow.admitted(name, prefill, decode, BOTH, 1.0, now)
            case ("rejected", Objectives() as objectives, int(prefill), int(decode)):
                shadow.rejected(Ghost(prefill, decode, objectives, 1.0, 5.0, now))
                rejected += 1
            case ("finished", str(name)):
                shadow.finished(name, 0.05, now)
            case (str(kind), str(name)):
                getattr(shadow, kind)(name, now)
            case ("forget_row", int(row)):
                shadow.forget_row(row)
            case _:
                shadow.tick(now)
        shadow.check()
        counts = shadow.counts
        judged = counts.rejected_would_have_met + counts.rejected_would_have_missed
        assert judged + counts.rejected_unknown + counts.ghosts == rejected
    for name in ("a", "b", "c", "d"):
        shadow.cancelled(name, now)
    shadow.tick(now + 10.0)
    shadow.check()
    assert len(shadow) == 0


def test_each_rejection_is_judged_by_its_own_prefill() -> None:
    shadow = calibrated()
    for own_s in (1.0, 3.0, 4.0, 5.0):
        shadow.rejected(ghost(own_s=own_s))
    assert shadow.counts == ShadowCounts(rejected_would_have_met=1, rejected_would_have_missed=3)
