"""Lost, repeated or late batches: batches are applied in order, each once, or the state is marked
as doubtful."""

from __future__ import annotations

import itertools
import random

from hypothesis import given
from hypothesis import strategies as st

from tiffin.conductor.events import sequence_numbers
from tiffin.conductor.events.sequence_numbers import (
    PATIENCE_S,
    PROBE_S,
    Apply,
    Current,
    Doubt,
    Numbering,
    ReplayRequest,
    Restarted,
    Step,
)


def apply(*seqs: int) -> list[Step]:
    return [Apply(seq, str(seq).encode()) for seq in seqs]


def live(follower: Numbering, *seqs: int, now: float = 0.0) -> list[Step]:
    return [step for seq in seqs for step in follower.live(seq, str(seq).encode(), now)]


def replayed(follower: Numbering, *seqs: int, now: float = 0.0) -> list[Step]:
    return [step for seq in seqs for step in follower.replayed(seq, str(seq).encode(), now)]


def test_in_order_nothing_is_to_be_done_but_apply() -> None:
    follower = Numbering(replays=False, now=0.0)
    assert follower.begin(0.0) == []
    assert live(follower, 0, 1, 2) == apply(0, 1, 2)


def test_the_beginning_is_replayed_and_nothing_is_applied_twice() -> None:
    follower = Numbering(replays=True, now=0.0)
    assert follower.begin(0.0) == [ReplayRequest(0)]
    assert live(follower, 4) == []
    assert replayed(follower, 0, 1, 2, 3, 4) == apply(0, 1, 2, 3, 4)
    assert live(follower, 5) == []
    assert follower.replay_ended(0.0) == [*apply(5), Current()]
    assert live(follower, 6) == apply(6)


def test_live_copies_of_replayed_batches_that_come_after_the_replay_are_no_restart() -> None:
    """A replay comes by a connection of its own, which may be the faster one."""
    follower = Numbering(replays=True, now=0.0)
    follower.begin(0.0)
    assert replayed(follower, 0, 1, 2) == apply(0, 1, 2)
    assert follower.replay_ended(0.0) == [Current()]
    assert live(follower, 1, 2, 3) == apply(3)
    assert live(follower, 1) == [Restarted(), ReplayRequest(0)]  # in order, 1 comes no more


def test_a_restart_among_late_copies_is_noticed() -> None:
    follower = Numbering(replays=True, now=0.0)
    follower.begin(0.0)
    replayed(follower, 0, 1, 2)
    follower.replay_ended(0.0)
    assert live(follower, 0) == []
    assert follower.live(0, b"another", 0.0) == [Restarted(), Apply(0, b"another")]


def test_a_gap_is_replayed() -> None:
    follower = Numbering(replays=True, now=0.0)
    follower.begin(0.0)
    assert follower.replay_ended(0.0) == [Current()]
    assert live(follower, 0, 3) == [*apply(0), ReplayRequest(0)]
    assert replayed(follower, 0, 1, 2) == apply(1, 2)
    assert follower.replay_ended(0.0) == [*apply(3), Current()]


def test_what_cannot_be_replayed_is_doubted() -> None:
    without = Numbering(replays=False, now=0.0)
    assert live(without, 7) == apply(7)  # there is no state yet that could be wrong
    assert live(without, 9) == [Doubt(), *apply(9)]
    forgotten = Numbering(replays=True, now=0.0)
    forgotten.begin(0.0)
    forgotten.replay_ended(0.0)
    assert live(forgotten, 0, 9) == [*apply(0), ReplayRequest(0)]
    assert replayed(forgotten, 7, 8) == [Doubt(), *apply(7, 8)]
    silent = Numbering(replays=True, now=0.0)
    silent.begin(0.0)
    silent.replay_ended(0.0)
    assert live(silent, 0, 5) == [*apply(0), ReplayRequest(0)]
    assert silent.look(PATIENCE_S - 0.1) == []
    assert silent.look(PATIENCE_S) == [Doubt(), *apply(5)]
    assert replayed(silent, 1, 2) == []  # too late


def test_a_restart_is_noticed_also_during_a_replay() -> None:
    follower = Numbering(replays=True, now=0.0)
    follower.begin(0.0)
    follower.replay_ended(0.0)
    live(follower, 0, 1, 2)
    assert live(follower, 0) == [Restarted(), *apply(0)]
    live(follower, 1, 2)
    assert live(follower, 1) == [Restarted(), ReplayRequest(0)]
    assert replayed(follower, 0, 1) == apply(0, 1)
    assert live(follower, 2, 0) == [Restarted(), *apply(0)]
    without = Numbering(replays=False, now=0.0)
    assert live(without, 5, 3) == [*apply(5), Restarted(), *apply(3)]


def test_a_quiet_publisher_is_asked_whether_it_said_anything() -> None:
    follower = Numbering(replays=True, now=0.0)
    follower.begin(0.0)
    replayed(follower, 0)
    follower.replay_ended(0.0)
    live(follower, 1, now=1.0)
    assert follower.look(PROBE_S) == []
    assert follower.look(1.0 + PROBE_S) == [ReplayRequest(1)]
    assert replayed(follower, 1, 2, now=7.0) == apply(2)
    assert follower.replay_ended(7.0) == [Current()]
    assert follower.look(7.0 + PROBE_S) == [ReplayRequest(2)]
    assert follower.look(7.0 + PROBE_S + PATIENCE_S) == []  # no answer proves nothing


def asked(follower: Numbering, now: float) -> None:
    """Bring a follower to: applied 0 to 2, replayed, and asking again."""
    follower.begin(0.0)
    replayed(follower, 0, 1, 2)
    follower.replay_ended(0.0)
    assert follower.look(now) == [ReplayRequest(2)]


def test_a_restarted_publisher_that_has_said_nothing_yet_is_noticed() -> None:
    """Otherwise a router would assume its old blocks for hours."""
    follower = Numbering(replays=True, now=0.0)
    asked(follower, PROBE_S)
    assert follower.replay_ended(PROBE_S) == [Restarted(), Current()]
    assert live(follower, 0) == apply(0)


def test_a_restarted_publisher_that_says_as_much_again_is_noticed() -> None:
    follower = Numbering(replays=True, now=0.0)
    asked(follower, PROBE_S)
    assert follower.replayed(2, b"other", PROBE_S) == [Restarted()]
    assert follower.replayed(3, b"more", PROBE_S) == []  # the batches before it are needed
    assert live(follower, 4) == []
    assert follower.replay_ended(PROBE_S) == [ReplayRequest(0)]
    assert replayed(follower, 0, 1, 2, 3, 4) == apply(0, 1, 2, 3, 4)
    assert follower.replay_ended(PROBE_S) == [Current()]


def test_a_busy_publisher_shows_once_that_it_keeps_what_it_says() -> None:
    """Without that, an empty replay proves nothing; and the publisher may die before it is ever
    quiet."""
    follower = Numbering(replays=True, now=0.0)
    follower.begin(0.0)
    follower.replay_ended(0.0)
    live(follower, 0, now=PROBE_S - 1)
    assert follower.look(PROBE_S - 1) == []
    assert follower.look(PROBE_S) == [ReplayRequest(0)]
    assert replayed(follower, 0, now=PROBE_S) == []
    assert follower.replay_ended(PROBE_S) == [Current()]
    live(follower, 1, now=2 * PROBE_S - 1)
    assert follower.look(2 * PROBE_S) == [], "it is not quiet, and once is enough"
    assert follower.look(3 * PROBE_S) == [ReplayRequest(1)]
    assert follower.replay_ended(3 * PROBE_S) == [Restarted(), Current()]


def test_of_a_publisher_that_keeps_nothing_a_replay_tells_nothing() -> None:
    follower = Numbering(replays=True, now=0.0)
    follower.begin(0.0)
    follower.replay_ended(0.0)
    live(follower, 0, 1)
    assert follower.look(PROBE_S) == [ReplayRequest(1)]
    assert follower.replay_ended(PROBE_S) == [Current()]


def test_what_is_held_during_a_replay_is_bounded() -> None:
    follower = Numbering(replays=True, now=0.0)
    follower.begin(0.0)
    steps = live(follower, *range(10, 11 + sequence_numbers.HELD_MAX))
    assert steps == apply(*range(10, 11 + sequence_numbers.HELD_MAX))
    assert not follower.asking


@given(st.integers(0, 2**32), st.booleans())
def test_against_a_publisher_that_loses_and_restarts(seed: int, replays: bool) -> None:
    """Batches applied since the last restart are in order; gaps in them were marked as doubtful;
    with a complete replay there are no gaps, and nothing of an earlier life.

    A publisher that restarts at once is heard at once here: if its first batches were lost until
    just the expected number came, it could not be distinguished from its earlier life."""
    dice, now = random.Random(seed), 0.0
    follower, log = Numbering(replays=replays, now=0.0), [b"0/0"]
    applied: list[bytes] = []
    life, doubts = 0, 0

    def carry_out(steps: list[Step]) -> None:
        nonlocal doubts
        for step in steps:
            if isinstance(step, Apply):
                applied.append(step.payload)
            elif isinstance(step, Restarted):
                applied.clear()
                doubts = 0
            elif isinstance(step, Doubt):
                doubts += 1
            elif isinstance(step, ReplayRequest):
                for seq, payload in list(enumerate(log))[step.seq :]:
                    carry_out(follower.replayed(seq, payload, now))
                carry_out(follower.replay_ended(now))

    carry_out(follower.begin(0.0))
    for _ in range(60):
        at_once = False
        if dice.random() < 0.05:
            life += 1
            log = []
            at_once = dice.random() < 0.5
            if not at_once:
                now += PROBE_S + PATIENCE_S
                carry_out(follower.look(now))
        log.append(f"{life}/{len(log)}".encode())
        if at_once or dice.random() < 0.7:
            carry_out(follower.live(len(log) - 1, log[-1], now))
    if dice.random() < 0.5:
        life += 1
        log = []
    now += PROBE_S + PATIENCE_S
    carry_out(follower.look(now))
    lives = {int(payload.split(b"/")[0]) for payload in applied}
    assert not replays or lives <= {life}
    numbers = [int(payload.split(b"/")[1]) for payload in applied]
    assert numbers == sorted(set(numbers))
    holes = sum(b != a + 1 for a, b in itertools.pairwise(numbers))
    assert holes <= doubts
    assert not replays or doubts == 0
