"""Estimates of transfers (measured links, tiers, transfers in flight) against plain loops."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tiffin.conductor.cost import transfer_model
from tiffin.conductor.cost.transfer_model import NODES_MAX, TransferModel, TransferSettings
from tiffin.conductor.state.instance_table import Cluster
from tiffin.conductor.state.prefix_index import TIERS
from tiffin.kvstore.directory import base

HBM, DRAM, NVME = (TIERS.index(tier) for tier in ("hbm", "dram", "nvme"))
GB = 10**9
SETTINGS = TransferSettings(
    link_bandwidth_bytes_s=1e9,
    link_latency_s=0.001,
    hbm_bandwidth_bytes_s=50e9,
    dram_bandwidth_bytes_s=20e9,
    nvme_bandwidth_bytes_s=4e9,
    link_weight=0.5,
)
NUMBERS = st.integers(-1, 12)


def made(nodes: int = 4) -> TransferModel:
    """Nodes n0, n1, ... have the numbers 0, 1, ..."""
    cluster = Cluster()
    for at in range(nodes):
        assert cluster.node_number(f"n{at}") == at
    return TransferModel(cluster.node_number, SETTINGS)


def seconds(all_ways: TransferModel, source: int, target: int, nbytes: int = GB) -> float:
    return float(all_ways.seconds(source, DRAM, target, nbytes))


def test_a_way_that_nobody_knows_is_the_defaults() -> None:
    assert seconds(made(), 0, 1) == pytest.approx(1.001, rel=1e-5)
    assert seconds(made(), 0, -1) == pytest.approx(1.001, rel=1e-5)
    assert seconds(made(), 900, 901) == pytest.approx(1.001, rel=1e-5)


def test_a_node_reports_what_it_reads_from_others() -> None:
    ways = made()
    ways.observe("n1", {"n0": [10e9, 0.002]})
    assert seconds(ways, 0, 1) == pytest.approx(0.102, rel=1e-5)
    assert seconds(ways, 1, 0) == pytest.approx(0.102, rel=1e-5), "the way back, as long as unknown"
    ways.observe("n0", {"n1": [5e9, 0.001]})
    assert seconds(ways, 1, 0) == pytest.approx(0.201, rel=1e-5)
    assert seconds(ways, 0, 1) == pytest.approx(0.102, rel=1e-5)
    shown = ways.ways()
    assert shown["n0"]["n1"] == (pytest.approx(10e9), pytest.approx(0.002))
    assert shown["n1"]["n0"] == (pytest.approx(5e9), pytest.approx(0.001))


def test_reports_are_averaged() -> None:
    ways = made()
    ways.observe("n1", {"n0": [10e9, 0.0]})
    ways.observe("n1", {"n0": [5e9, 0.0]})
    assert seconds(ways, 0, 1) == pytest.approx(0.15, rel=1e-5), "of seconds per byte: 0.1 and 0.2"
    for _ in range(40):
        ways.observe("n1", {"n0": [2e9, 0.1]})
    assert seconds(ways, 0, 1) == pytest.approx(0.6, rel=2e-3)


def taught(ways: TransferModel, target: int, byte_s: float, late_s: float = 0.3) -> None:
    """Transfers of several sizes from 0, each with a delay that is not the network's."""
    for size in range(1, 7):
        ways.moved(0, target, size * GB, size * GB * byte_s + late_s)


def test_transfers_that_ended_count_as_reports() -> None:
    ways = made()
    ways.observe("n2", {"n3": [8e9, 0.0]})
    taught(ways, 1, 0.2e-9)
    assert seconds(ways, 0, 1) == pytest.approx(0.201, rel=1e-4), "the delay is not learnt"
    assert seconds(ways, 0, 2) == pytest.approx(0.201, rel=1e-4), "nor is this link known better"
    assert seconds(ways, 3, 2) == pytest.approx(0.125, rel=1e-4), "this one was measured"
    for source, target, nbytes in ((0, 0, GB), (-1, 0, GB), (0, -1, GB), (0, 1, 0)):
        ways.moved(source, target, nbytes, 99.0)
    assert ways.ignored == 0
    for took_s in (0.0, -1.0, math.nan, math.inf):
        ways.moved(0, 1, GB, took_s)
    assert ways.ignored == 4
    assert seconds(ways, 0, 1) == pytest.approx(0.201, rel=1e-4)
    ways.forget([0, 1])
    assert seconds(ways, 0, 1) == pytest.approx(0.201, rel=1e-4), "as links in general"
    ways.configure(TransferSettings(link_bandwidth_bytes_s=2e9, link_latency_s=0.0))
    assert seconds(ways, 0, 1) == pytest.approx(0.5, rel=1e-4), "whoever sets it knows better"


BANDWIDTHS = (0.0, -1e9, math.nan, math.inf, 1e5, 1e14)
LATENCIES = (-0.1, math.nan, math.inf, 11.0)


@pytest.mark.parametrize(
    "way",
    [
        *([bandwidth, 0.0] for bandwidth in BANDWIDTHS),
        *([1e9, latency_s] for latency_s in LATENCIES),
        [1e9],
        [1e9, 0.0, 0.0],
    ],
)
def test_reports_that_make_no_sense_are_ignored_and_counted(way: list[float]) -> None:
    ways = made()
    ways.observe("n1", {"n0": way, "n2": [10e9, 0.0]})
    assert ways.ignored == 1
    assert seconds(ways, 0, 1) == pytest.approx(1.001, rel=1e-5)
    assert seconds(ways, 2, 1) == pytest.approx(0.1, rel=1e-5), "others of the same report count"
    ways.observe("n1", {"n1": [10e9, 0.0]})
    assert ways.ignored == 2, "of itself"


def test_the_slower_of_link_and_tier_counts() -> None:
    ways = made()
    ways.observe("n1", {"n0": [40e9, 0.0]})
    times = ways.seconds(0, np.array([HBM, DRAM, NVME]), 1, GB)
    assert times == pytest.approx([1 / 40, 1 / 20, 1 / 4])
    local = ways.seconds(1, np.array([HBM, DRAM, NVME]), 1, GB)
    assert local == pytest.approx([1 / 50, 1 / 20, 1 / 4])


def test_two_instances_without_a_node_are_not_on_one() -> None:
    assert seconds(made(), -1, -1) == pytest.approx(1.001, rel=1e-5)


def test_no_bytes_take_no_time() -> None:
    ways = made()
    ways.begin(0, GB)
    assert ways.seconds(0, DRAM, np.arange(3), np.array([0, GB, 0])).tolist() == [
        0.0,
        pytest.approx(2.001, rel=1e-5),
        0.0,
    ]


def test_what_a_sender_has_promised_is_waited_for() -> None:
    ways = made()
    ways.begin(0, 3 * GB)
    assert seconds(ways, 0, 1) == pytest.approx(4.001, rel=1e-5)
    assert seconds(ways, 1, 2) == pytest.approx(1.001, rel=1e-5), "of other senders it is not"
    assert seconds(ways, 0, 0) == pytest.approx(0.05), "within the node there is no network"
    assert ways.in_flight_bytes(0) == 3 * GB
    ways.end(0, 3 * GB)
    assert seconds(ways, 0, 1) == pytest.approx(1.001, rel=1e-5)
    ways.end(0, GB)
    assert ways.in_flight_bytes(0) == 0, "ended twice"
    for nobody in (-1, 10**6):
        ways.begin(nobody, GB)
        assert ways.in_flight_bytes(nobody) == 0
        ways.end(nobody, GB)


def test_a_receiver_is_waited_for_as_well() -> None:
    """Several senders to one receiver (incast)."""
    ways = made()
    ways.begin(0, 2 * GB, 0.0, target_node=3)
    ways.begin(1, 3 * GB, 0.0, target_node=3)
    assert ways.receiving_bytes(3) == 5 * GB
    took = ways.seconds_from(2, DRAM, np.array([3, 1, 2]), np.full(3, GB), 0.0)
    assert took == pytest.approx([6.001, 1.001, 0.05], rel=1e-5)
    took = ways.seconds_from(0, DRAM, np.array([3, 1]), np.full(2, GB), 1.0)
    assert took == pytest.approx([5.001, 2.001], rel=1e-5), "the longer wait, less what has passed"
    ways.end(1, 3 * GB, target_node=3)
    assert seconds(ways, 2, 3) == pytest.approx(3.001, rel=1e-5)
    ways.end(0, 2 * GB, target_node=3)
    assert ways.idle


def test_a_receivers_rate_is_that_of_its_fastest_link() -> None:
    ways = made()
    ways.observe("n1", {"n0": [10e9, 0.0], "n2": [4e9, 0.0]})
    ways.begin(3, 4 * GB, target_node=1)
    assert seconds(ways, 0, 1) == pytest.approx(0.4 + 0.1, rel=1e-5)
    ways.forget([0])
    assert seconds(ways, 2, 1) == pytest.approx(1.0 + 0.25, rel=1e-5)


def test_what_is_planned_comes_before_what_begins_later_and_shares_with_what_begins_now() -> None:
    ways = made()
    ways.plan(0, 1, 2 * GB, 4.0)
    targets, nbytes = np.array([1, 2]), np.full(2, GB)

    def later(at: float) -> list[float]:
        return ways.later_seconds_from(0, DRAM, targets, nbytes, at, 0.0).tolist()

    assert later(4.0) == pytest.approx([3.001, 3.001], rel=1e-5)
    assert later(5.0) == pytest.approx([2.001, 2.001], rel=1e-5)
    assert later(6.0) == pytest.approx([1.001, 1.001], rel=1e-5)
    # A third of the time until 6.0 is planned at the receiver, by whom it may be.
    others = ways.later_seconds_from(3, DRAM, targets, nbytes, 4.0, 0.0)
    assert others == pytest.approx([2 / 3 + 1.001, 1.001], rel=1e-5)
    assert ways.sender_waits_s(np.array([0, 1, 900]), 5.0).tolist() == [1.0, 0.0, 0.0]
    # Until 6.0, a third of the time goes to the plan.
    assert float(ways.seconds(0, DRAM, 2, GB, 0.0)) == pytest.approx(0.001 + 1.5, rel=1e-5)
    assert float(ways.seconds(0, DRAM, 2, GB, 4.0)) == pytest.approx(0.001 + 2.0, rel=1e-5)
    assert float(ways.seconds(2, DRAM, 3, GB, 4.0)) == pytest.approx(1.001, rel=1e-5)
    ways.unplan(0, 1, 2 * GB)
    assert ways.idle
    assert later(4.0) == pytest.approx([1.001, 1.001], rel=1e-5)


def test_a_sender_waits_at_the_rate_of_its_fastest_link() -> None:
    ways = made()
    ways.observe("n1", {"n0": [10e9, 0.0]})
    ways.observe("n2", {"n0": [2e9, 0.0]})
    ways.begin(0, GB)
    assert seconds(ways, 0, 2) == pytest.approx(0.1 + 0.5, rel=1e-5)


def test_promises_fade_as_time_goes_by() -> None:
    ways = made()
    ways.begin(0, 2 * GB, now=100.0)
    waits = [float(ways.seconds(0, DRAM, 1, GB, now)) - 1.001 for now in (100.0, 101.0, 103.0)]
    assert waits == pytest.approx([2.0, 1.0, 0.0], abs=1e-4)
    ways.begin(0, 2 * GB, now=101.0)
    assert float(ways.seconds(0, DRAM, 1, GB, 101.0)) - 1.001 == pytest.approx(3.0, rel=1e-4)
    ways.end(0, 2 * GB)
    assert float(ways.seconds(0, DRAM, 1, GB, 101.0)) - 1.001 == pytest.approx(2.0, rel=1e-4)
    ways.end(0, 2 * GB)
    assert float(ways.seconds(0, DRAM, 1, GB, 101.0)) == pytest.approx(1.001, rel=1e-5)


def test_waits_are_those_of_a_queue() -> None:
    """Transfers at random times from one sender take as long as in an M/D/1 queue:
    1 + u / (2 (1 - u)) times that of an idle one."""
    dice = np.random.default_rng(5)
    ways, now, ended = made(), 0.0, []
    slowdowns = []
    for gap_s in dice.exponential(1 / 0.6, 8000):
        now += gap_s
        while ended and ended[0] <= now:
            ended.pop(0)
            ways.end(0, GB)
        took_s = float(ways.seconds(0, DRAM, 1, GB, now))
        ways.begin(0, GB, now)
        ended.append(now + took_s - 0.001)
        slowdowns.append(took_s / 1.001)
    assert np.mean(slowdowns) == pytest.approx(1 + 0.6 / (2 * 0.4), rel=0.08)


def test_a_node_leaves_and_its_number_is_new() -> None:
    ways = made()
    ways.observe("n1", {"n0": [10e9, 0.0], "n2": [10e9, 0.0]})
    ways.observe("n0", {"n2": [40e9, 0.0]})
    ways.begin(0, GB)
    ways.forget([0, 900])
    assert seconds(ways, 0, 1) == seconds(ways, 1, 0) == pytest.approx(1.001, rel=1e-5)
    assert seconds(ways, 2, 1) == pytest.approx(0.1, rel=1e-5)
    assert "n0" not in ways.ways()
    assert seconds(ways, 0, 0) == pytest.approx(0.05)
    ways.begin(2, GB)
    assert seconds(ways, 2, 1) == pytest.approx(0.2, rel=1e-5), "its fastest way has gone"


def test_settings_change_what_is_not_measured() -> None:
    ways = made()
    ways.observe("n1", {"n0": [10e9, 0.0]})
    ways.configure(TransferSettings(link_bandwidth_bytes_s=2e9, link_latency_s=0.5))
    assert seconds(ways, 0, 1) == pytest.approx(0.1, rel=1e-5)
    assert seconds(ways, 2, 1) == pytest.approx(1.0, rel=1e-5)
    ways.begin(3, GB)
    assert seconds(ways, 3, 1) == pytest.approx(1.5, rel=1e-5), "its rate is the new default"


def test_more_nodes_than_were_there_keep_what_is_known() -> None:
    ways = made(300)
    ways.observe("n1", {"n0": [10e9, 0.0]})
    ways.begin(0, GB)
    ways.observe("n299", {"n0": [5e9, 0.0]})
    assert seconds(ways, 0, 1) == pytest.approx(0.2, rel=1e-5)
    assert seconds(ways, 0, 299) == pytest.approx(0.3, rel=1e-5)
    assert seconds(ways, 299, 299) == pytest.approx(0.05)


def test_nodes_beyond_the_limit_are_served_at_the_defaults(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transfer_model, "NODES_MAX", 80)
    ways = made(100)
    ways.observe("n90", {"n0": [10e9, 0.0]})
    ways.observe("n1", {"n90": [10e9, 0.0]})
    ways.moved(90, 1, GB, 0.1)
    ways.begin(90, GB, 0.0, target_node=1)
    ways.plan(1, 90, GB, 0.0)
    ways.end(90, GB, target_node=1)
    ways.unplan(1, 90, GB)
    ways.forget([90])
    assert ways.ignored == 2
    times = ways.seconds(np.array([90, 90, 0, 3]), DRAM, np.array([1, 90, 90, 3]), GB)
    assert times == pytest.approx([1.001, 0.05, 1.001, 0.05], rel=1e-5)


def test_the_limit_is_the_pools() -> None:
    assert NODES_MAX == base.NODES_MAX


@given(
    st.lists(st.tuples(NUMBERS, NUMBERS, st.floats(1e7, 1e11), st.floats(0, 1)), max_size=20),
    st.lists(st.tuples(NUMBERS, st.integers(1, 10 * GB)), max_size=5),
    st.lists(
        st.tuples(NUMBERS, st.integers(0, 2), NUMBERS, st.integers(0, 5 * GB)),
        min_size=1,
        max_size=20,
    ),
)
def test_columns_say_what_loops_say(
    reports: list[tuple[int, int, float, float]],
    promises: list[tuple[int, int]],
    asked: list[tuple[int, int, int, int]],
) -> None:
    ways = made(13)
    known: dict[tuple[int, int], tuple[float, float]] = {}
    own: set[tuple[int, int]] = set()
    for source, target, bandwidth, latency_s in reports:
        if min(source, target) < 0 or source == target or (source, target) in own:
            continue
        ways.observe(f"n{target}", {f"n{source}": [bandwidth, latency_s]})
        own.add((source, target))
        known[source, target] = bandwidth, latency_s
        if (target, source) not in own:
            known[target, source] = bandwidth, latency_s
    for source, nbytes in promises:
        ways.begin(source, nbytes)
    columns = [np.array(column) for column in zip(*asked, strict=True)]
    found = ways.seconds(columns[0], columns[1], columns[2], columns[3])
    tiers = (50e9, 20e9, 4e9)
    for at, (source, tier, target, nbytes) in enumerate(asked):
        expected = 0.0
        if nbytes and source == target >= 0:
            expected = nbytes / tiers[tier]
        elif nbytes:
            bandwidth, latency_s = known.get((source, target), (1e9, 0.001))
            rates = [way[0] for (sender, _), way in known.items() if sender == source]
            waiting = sum(promised for sender, promised in promises if sender == source >= 0)
            expected = latency_s + nbytes / min(bandwidth, tiers[tier])
            expected += waiting / max(rates, default=1e9)
        assert found[at] == pytest.approx(expected, rel=1e-4)
        for now in (0.0, 1.0):
            from_one = ways.seconds_from(source, tier, columns[2], columns[3], now)
            among = ways.seconds(source, tier, columns[2], columns[3], now)
            assert from_one == pytest.approx(among)


@given(st.integers(0, 10 * GB), st.integers(0, 10 * GB), st.integers(0, 5 * GB))
def test_more_never_takes_less(nbytes: int, more: int, promised: int) -> None:
    ways = made()
    before_s = seconds(ways, 0, 1, nbytes)
    assert seconds(ways, 0, 1, nbytes + more) >= before_s
    ways.begin(0, promised)
    assert seconds(ways, 0, 1, nbytes) >= before_s
