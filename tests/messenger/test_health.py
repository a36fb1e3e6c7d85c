"""When a node that failed is asked again."""

from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from tiffin.messenger.health import FIRST_S, MAX_S, Health


def test_who_never_failed_is_well() -> None:
    health = Health()
    assert health.well
    assert not health.rests(-math.inf)
    assert health.admits(0.0)


def test_one_answer_ends_the_rest() -> None:
    health = Health()
    for _ in range(5):
        health.failed(100.0, late=True)
    assert health.rests(100.0)
    assert health.late
    health.answered()
    assert health.well
    assert not health.late
    assert not health.rests(100.0)
    health.failed(100.0)
    assert health.retry_at == 100.0 + FIRST_S, "the doubling begins anew"


def test_failures_in_a_row_double_the_rest_up_to_a_bound() -> None:
    health, rests = Health(), []
    for _ in range(100):
        health.failed(0.0)
        rests.append(health.retry_at)
    assert rests[:5] == [FIRST_S, 2 * FIRST_S, 4 * FIRST_S, 8 * FIRST_S, 16 * FIRST_S]
    assert set(rests[5:]) == {MAX_S}


def test_jitter_shortens_a_rest_by_half_at_most() -> None:
    for jitter, rest_s in ((0.0, 1.0), (0.5, 1.5), (1.0, 2.0)):
        health = Health(2.0, 8.0, lambda jitter=jitter: jitter)
        health.failed(0.0)
        assert health.retry_at == rest_s


def test_one_probe_at_a_time() -> None:
    health = Health(0.1, 2.0)
    health.failed(0.0)
    assert not health.well
    assert not health.admits(0.05)
    assert health.admits(0.1)
    assert not health.admits(0.1), "the others do not wait with the probe"
    health.answered()
    assert health.admits(0.1)


def test_probes_get_rarer() -> None:
    health, now, waits = Health(0.1, 2.0), 0.0, []
    for _ in range(10):
        health.failed(now)
        failed = now
        while not health.admits(now):
            now += 0.01
        waits.append(round(now - failed, 1))
    assert waits[0] == 0.1
    assert waits == sorted(waits)
    assert waits[-1] == 2.0


@given(st.lists(st.tuples(st.floats(0, 5), st.sampled_from(["fail", "late", "answer", "ask"]))))
def test_a_probe_is_due_within_the_longest_rest(events: list[tuple[float, str]]) -> None:
    """After any events, a failed node is asked again, and a healthy node is always asked."""
    health, now = Health(), 0.0
    for after_s, event in events:
        now += after_s
        if event == "answer":
            health.answered()
        elif event == "ask":
            health.admits(now)
        else:
            health.failed(now, late=event == "late")
        assert health.retry_at <= now + MAX_S
        assert not health.well or health.admits(now)
    assert health.admits(now + MAX_S)
