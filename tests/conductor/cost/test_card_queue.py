"""The cards' promises: each begun one ends, and waits are those of a queue in order."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tiffin.conductor.cost.card_queue import CardQueue

GB = 10**9


def made(nodes: int = 3) -> CardQueue:
    """Cards of 1 GB/s."""
    queue = CardQueue()
    queue.grow(nodes)
    queue.rate_bytes_s = np.full(nodes + 1, 1e9)
    return queue


def test_a_promise_is_waited_for_until_it_can_have_been_kept() -> None:
    queue = made()
    queue.begin(1, 2 * GB, 10.0)
    queue.begin(1, GB, 11.0)
    assert [queue.wait_s(1, now) for now in (11.0, 12.5, 99.0)] == pytest.approx([2.0, 0.5, 0.0])
    assert queue.waits_s(11.0).tolist() == [0.0, 2.0, 0.0, 0.0]
    queue.end(1, 2 * GB)
    assert queue.wait_s(1, 11.0) == pytest.approx(1.0), "only what is left"
    queue.end(1, GB)
    queue.end(1, GB)
    assert queue.idle
    assert queue.wait_s(1, 11.0) == 0.0


def test_a_plan_is_behind_all_that_is_promised_by_then() -> None:
    queue = made()
    queue.begin(0, 4 * GB, 0.0)
    queue.plan(0, GB, 2.0)  # ready at 2, sent from 4 to 5
    queue.plan(0, 2 * GB, 9.0)  # sent from 9 to 11
    at = np.array([0, 0, 0])
    assert queue.later_waits_s(at, np.array([3.0, 9.0, 12.0])) == pytest.approx([7.0, 2.0, 0.0])
    assert queue.planned_shares(1.0)[0] == pytest.approx(3 / 10)
    queue.unplan(0, GB)
    queue.unplan(0, 2 * GB)
    assert not queue.planning
    assert queue.planned_shares(1.0)[0] == 0.0
    queue.plan(0, 0, 5.0)
    assert not queue.planning, "nothing to send"


def test_plans_of_many_are_waited_for_by_the_share_of_time_that_they_fill() -> None:
    queue, at = made(), np.array([0, 1, 2])
    queue.plan(0, GB, 19.0)  # busy for 1 s of the next 20
    for ready in range(5):
        queue.plan(1, 4 * GB, float(ready))  # busy until 20
    assert queue.shared_waits_s(at, 2.0, 0.0) == pytest.approx([1 / 20, 18.0, 0.0])
    queue.begin(0, 5 * GB, 0.0)
    assert queue.shared_waits_s(at, 2.0, 0.0)[0] == pytest.approx(3.0), "in flight counts whole"


def test_more_nodes_keep_what_is_promised_and_forgotten_ones_do_not() -> None:
    queue = made(2)
    queue.begin(1, GB, 0.0)
    queue.plan(1, GB, 5.0)
    queue.grow(5)
    queue.rate_bytes_s = np.full(6, 1e9)
    assert (queue.wait_s(1, 0.0), queue.wait_s(2, 0.0)) == (1.0, 0.0)
    queue.forget([1, 2])
    assert queue.idle
    queue.end(1, GB)  # of its earlier node
    assert queue.idle


CARD, NBYTES = st.integers(0, 2), st.integers(1, 9 * GB)


@given(
    st.lists(st.tuples(CARD, NBYTES, st.booleans(), st.floats(0, 9)), max_size=12),
    st.randoms(use_true_random=False),
)
def test_in_whatever_order_they_end_nothing_is_left(
    promises: list[tuple[int, int, bool, float]], dice: object
) -> None:
    queue = made()
    for node, nbytes, planned, at in promises:
        if planned:
            queue.plan(node, nbytes, at)
        else:
            queue.begin(node, nbytes, at)
    dice.shuffle(promises)  # type: ignore[attr-defined]
    for node, nbytes, planned, _ in promises:
        assert not queue.idle
        if planned:
            queue.unplan(node, nbytes)
        else:
            queue.end(node, nbytes)
    assert queue.idle
    assert not queue.planning
    assert not queue.bytes.any()
    assert not queue.later_waits_s(np.arange(3), 0.0).any()
