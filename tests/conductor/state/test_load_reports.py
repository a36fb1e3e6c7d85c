"""Reports of load count as of the time when they were measured."""

from __future__ import annotations

import pytest
from coresupport import conductor, prompt, spec, tell
from hypothesis import given
from hypothesis import strategies as st

from tiffin.conductor.records import Decision, Load, Role
from tiffin.conductor.state.instance_table import Cluster
from tiffin.conductor.state.load_reports import AGE_S_MAX, TRANSIT_S, UNKNOWN_AGE_S

LATENCY = (0.1, 1e-4, 1e-9, 0.02, 1e-4, 1e-8)


def a_cluster() -> Cluster:
    cluster = Cluster()
    cluster.register(spec("a"), LATENCY, 0.0)
    return cluster


def test_a_request_that_ended_meanwhile_is_not_a_strangers() -> None:
    """Measured while it was queued, told when it was over: the instance is idle."""
    cluster = a_cluster()
    cluster.promise(0, 1.0, queued=1, queued_tokens=20_000)
    cluster.promise(0, 3.0, queued=-1, queued_tokens=-20_000)
    cluster.heard("a", Load(queued_prefill_tokens=20_000, queued=1, age_s=2.0), 4.0)
    assert (cluster.queued[0], cluster.queued_tokens[0], cluster.others_s[0]) == (0, 0, 0.0)


def test_it_was_priced_as_busy_and_another_one_was_chosen() -> None:
    """The whole conductor: a late heartbeat changes no prediction."""
    made = conductor(spec("p", Role.PREFILL), spec("d", Role.DECODE))
    before = made.schedule(prompt("first", 32), 0.0)
    assert isinstance(before, Decision)
    tell(made, "first", "prefill_done", "first_token", "finished", now=3.0)
    made.heartbeat("p", Load(queued_prefill_tokens=32 * 512 + 10, queued=1, age_s=2.0), 4.0)
    after = made.schedule(prompt("second", 32), 4.0)
    assert isinstance(after, Decision)
    assert after.predicted_ttft_s == pytest.approx(before.predicted_ttft_s, rel=0.1)


def test_one_that_was_placed_since_is_not_in_the_report() -> None:
    cluster = a_cluster()
    cluster.promise(0, 3.0, batch=1)
    cluster.heard("a", Load(running=4, age_s=2.0), 4.0)
    assert cluster.batch[0] == 1 + round(4 * 0.5 ** (2.0 / 20.0))


def test_a_report_of_unknown_age_may_be_of_a_while_ago() -> None:
    cluster = a_cluster()
    cluster.promise(0, 0.0, batch=5)
    cluster.promise(0, 10.0, batch=-5)
    cluster.heard("a", Load(running=5), 10.0 + UNKNOWN_AGE_S)
    assert cluster.batch[0] == 0
    cluster.heard("a", Load(running=5), 10.0 + UNKNOWN_AGE_S + 2 * TRANSIT_S)
    assert cluster.batch[0] == 5, "so late no report is"


def test_what_strangers_do_passes() -> None:
    """Prompts at the speed of the instance; what decodes there, within some answers."""
    cluster = a_cluster()
    cluster.heard("a", Load(40_000, 4, 8, 80_000, age_s=0.0), 0.0)
    assert cluster.others_s[0] == pytest.approx(4.0)
    cluster.blend(3.0)
    assert cluster.others_s[0] == pytest.approx(1.0)
    assert (cluster.queued[0], cluster.queued_tokens[0]) == (1, 10_000)
    cluster.blend(20.0)
    assert (cluster.queued[0], cluster.others_s[0]) == (0, 0.0)
    assert (cluster.batch[0], cluster.context_tokens[0]) == (4, 40_000)


def test_heartbeats_without_a_load_do_not_keep_the_last_one() -> None:
    made = conductor(spec("a"))
    made.heartbeat("a", Load(running=60, context_tokens=600_000), 0.0)
    for now in range(1, 500):
        made.heartbeat("a", Load(), float(now))
        made.tick(float(now))
    assert (made.cluster.batch[0], made.cluster.context_tokens[0]) == (0, 0)


def test_tokens_alone_are_only_counted_differently() -> None:
    """The instance has the prompts that were placed there and no others."""
    cluster = a_cluster()
    cluster.promise(0, 0.0, queued=2, queued_tokens=10_000)
    cluster.heard("a", Load(queued_prefill_tokens=14_000, queued=2, age_s=0.0), 1.0)
    assert (cluster.queued_tokens[0], cluster.others_s[0]) == (10_000, 0.0)


def test_an_older_report_does_not_replace_a_newer_one() -> None:
    cluster = a_cluster()
    cluster.heard("a", Load(running=3, age_s=0.0), 5.0)
    cluster.heard("a", Load(running=9, age_s=4.0), 6.0)
    assert cluster.batch[0] == 3


def test_a_row_is_given_again_without_a_past() -> None:
    cluster = a_cluster()
    cluster.promise(0, 0.0, batch=5)
    cluster.heard("a", Load(running=9, queued=3), 0.0)
    cluster.remove("a")
    cluster.register(spec("b"), LATENCY, 0.5)
    cluster.heard("b", Load(running=2, queued=1), 0.5)
    assert (cluster.batch[0], cluster.queued[0]) == (2, 1)


steps = st.lists(st.tuples(st.floats(0.01, 1.0), st.integers(-3, 5)), min_size=1, max_size=30)


@given(steps, st.floats(0.0, AGE_S_MAX - 1.0), st.integers(0, 4))
def test_an_exact_report_finds_the_strangers_exactly(
    changes: list[tuple[float, int]], age_s: float, strangers: int
) -> None:
    """Whatever was placed and has ended since, if nothing did within the report's transit."""
    cluster, now = a_cluster(), 0.0
    history = [(0.0, 0)]
    for after_s, change in changes:
        now += after_s
        change = max(change, -int(cluster.own_batch[0]))
        cluster.promise(0, now, batch=change)
        history.append((now, int(cluster.own_batch[0])))
    measured_at = max(0.0, now - age_s)
    then = [own for at, own in history if at <= measured_at][-1]
    if any(measured_at - TRANSIT_S - 1e-6 < at < measured_at + 1e-6 for at, _ in history[1:]):
        return
    report = Load(running=then + strangers, age_s=now - measured_at)
    cluster.heard("a", report, now)
    left = round(strangers * 0.5 ** ((now - measured_at) / 20.0))
    assert cluster.batch[0] == int(cluster.own_batch[0]) + left
