"""The load promised by other conductors: how it is counted, and how it is encoded."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule
from msgspec.structs import astuple
from sharingsupport import spec

from tiffin.conductor.records import Load, Role
from tiffin.conductor.replicas.remote_load import REPORTED, PeerLoads
from tiffin.conductor.replicas.states import (
    DemandRow,
    HeardRow,
    InstanceRecord,
    LoadRow,
    State,
    pack,
    unpack,
)
from tiffin.conductor.state.instance_table import Cluster

LATENCY = (0.01, 1e-4, 0.0, 0.02, 1e-4, 1e-7)
INSTANCES = ("i0", "i1", "i2")


def a_cluster(*names: str) -> Cluster:
    cluster = Cluster()
    for name in names:
        cluster.register(spec(name), LATENCY, 0.0)
    return cluster


def report(cluster: Cluster, loads: PeerLoads, name: str, load: Load, now: float) -> None:
    """Send a heartbeat."""
    cluster.heard(name, load, now, loads.at(cluster.row(name), load.age_s, now))
    loads.blend(now)


# -- reports and states ----------------------------------------------------------------------------


def test_a_report_and_a_state_of_the_same_requests_count_once() -> None:
    cluster = a_cluster("i0")
    loads = PeerLoads(cluster)
    loads.tell("a", [LoadRow("i0", batch=8)], 0.0)
    report(cluster, loads, "i0", Load(running=10), 0.0)
    assert cluster.batch[0] == 10  # eight are conductor a's, two are unknown
    loads.tell("a", [LoadRow("i0", batch=12)], 1.0)
    loads.blend(1.0)
    assert cluster.batch[0] == 14


def test_what_is_promised_here_counts_at_once_and_is_left_alone() -> None:
    cluster = a_cluster("i0")
    loads = PeerLoads(cluster)
    loads.tell("a", [LoadRow("i0", kv_used_tokens=500)], 0.0)
    loads.blend(0.0)
    cluster.promise(0, 0.0, kv_used_tokens=100)
    assert cluster.kv_used_tokens[0] == 600
    loads.blend(0.0)
    assert (cluster.kv_used_tokens[0], cluster.own_kv_used_tokens[0]) == (600, 100)


def test_what_will_come_counts_from_now_on() -> None:
    cluster = a_cluster("i0")
    loads = PeerLoads(cluster)
    loads.tell("a", [LoadRow("i0", batch=1, coming=4, coming_tokens=4000, context_tokens=10)], 0.0)
    report(cluster, loads, "i0", Load(running=1, context_tokens=10), 0.0)
    assert (cluster.batch[0], cluster.context_tokens[0]) == (5, 4010)


def test_a_late_report_is_compared_with_what_peers_had_then() -> None:
    cluster = a_cluster("i0")
    loads = PeerLoads(cluster)
    for now, batch in ((0.0, 8), (2.0, 3), (4.0, 1)):
        loads.tell("a", [LoadRow("i0", batch=batch)], now)
        loads.blend(now)
    report(cluster, loads, "i0", Load(running=10, age_s=4.0), 4.0)
    assert cluster.batch[0] == 1 + round(2 * 0.5 ** (4.0 / 20.0)), "eight were the peer's then"
    report(cluster, loads, "i0", Load(running=10, age_s=0.0), 6.0)
    assert cluster.batch[0] == 1 + 9


def test_queued_seconds_pass() -> None:
    cluster = a_cluster("i0")
    loads = PeerLoads(cluster)
    loads.tell("a", [LoadRow("i0", queued=2, queued_tokens=100, queued_s=3.0)], 10.0)
    loads.tell("b", [LoadRow("i0", queued=1, queued_tokens=100, queued_s=1.0)], 10.0)
    seen = []
    for now in (10.0, 10.5, 12.0, 20.0):
        loads.blend(now)
        seen.append(float(cluster.others_s[0]))
    assert seen == pytest.approx([4.0, 3.0, 1.0, 0.0])


# -- random events ---------------------------------------------------------------------------------

counts = st.integers(0, 50)
rows = st.builds(
    LoadRow, st.sampled_from((*INSTANCES, "elsewhere")), counts, counts, counts, counts, counts,
    counts, counts, st.floats(0, 5),
)  # fmt: skip


class Columns(RuleBasedStateMachine):
    """Two other conductors, three instances that come and go, random reports, in any order."""

    @initialize()
    def begin(self) -> None:
        self.cluster = a_cluster(*INSTANCES)
        self.loads = PeerLoads(self.cluster)
        self.told: dict[str, dict[str, LoadRow]] = {}
        self.own = {name: [0] * len(REPORTED) for name in INSTANCES}
        self.strangers = {name: [0] * len(REPORTED) for name in INSTANCES}

    @rule(peer=st.sampled_from("ab"), told=st.lists(rows, unique_by=lambda row: row.instance))
    def tell(self, peer: str, told: list[LoadRow]) -> None:
        self.loads.tell(peer, told, 0.0)
        self.told[peer] = {row.instance: row for row in told}

    @rule(peer=st.sampled_from("ab"))
    def die(self, peer: str) -> None:
        if self.told.pop(peer, None) is not None:
            self.loads.forget(peer)

    @rule(name=st.sampled_from(INSTANCES), at=st.integers(0, len(REPORTED) - 1), amount=counts)
    def promise(self, name: str, at: int, amount: int) -> None:
        if name in self.cluster:
            self.cluster.promise(self.cluster.row(name), 0.0, **{REPORTED[at]: amount})
            self.own[name][at] += amount

    @rule(name=st.sampled_from(INSTANCES), running=counts, tokens=counts)
    def report(self, name: str, running: int, tokens: int) -> None:
        if name in self.cluster:
            load = Load(running=running, queued_prefill_tokens=tokens)
            report(self.cluster, self.loads, name, load, 0.0)
            for at, reported in ((REPORTED.index("batch"), running), (1, tokens)):
                others = self.loads.at(self.cluster.row(name), None, 0.0)
                assert others[at] >= self.others(name)[at], "the most of then, or what is now"
                known = self.own[name][at] + others[at]
                self.strangers[name][at] = max(reported - known, 0)

    @rule(name=st.sampled_from(INSTANCES))
    def leave_or_come(self, name: str) -> None:
        if name in self.cluster:
            self.cluster.remove(name)
            self.own[name] = [0] * len(REPORTED)
            self.strangers[name] = [0] * len(REPORTED)
        else:
            self.cluster.register(spec(name), LATENCY, 0.0)

    def others(self, name: str) -> tuple[int, ...]:
        told = [astuple(rows[name])[1:8] for rows in self.told.values() if name in rows]
        return tuple(map(sum, zip(*told, strict=True))) if told else (0,) * 7

    @rule()
    def columns_are_sums(self) -> None:
        self.loads.blend(0.0)
        for name in self.cluster.names:
            row, others = self.cluster.row(name), self.others(name)
            for at, of in enumerate(REPORTED):
                coming = {"batch": others[5], "context_tokens": others[6]}.get(of, 0)
                known = self.own[name][at] + others[at] + coming
                assert getattr(self.cluster, f"own_{of}")[row] == self.own[name][at]
                assert getattr(self.cluster, of)[row] == known + self.strangers[name][at]

    def teardown(self) -> None:
        """At the end no load is left."""
        if not hasattr(self, "cluster"):
            return
        for peer in self.told:
            self.loads.forget(peer)
        for name in self.cluster.names:
            row = self.cluster.row(name)
            self.cluster.promise(
                row, 0.0, **{of: -n for of, n in zip(REPORTED, self.own[name], strict=True)}
            )
            report(self.cluster, self.loads, name, Load(0, 0, 0, 0, 0), 0.0)
        self.loads.blend(0.0)
        for of in (*REPORTED, "others_s"):
            assert not np.any(getattr(self.cluster, of))


TestColumns = Columns.TestCase


# -- encoding --------------------------------------------------------------------------------------

STATE = State(
    "a",
    7,
    "http://10.0.0.9:7800",
    [LoadRow("i0", queued=3, queued_s=1.5)],
    [HeardRow("i0", 9, 8, Load(running=3))],
    [DemandRow("m", [2.0, 800.0, 600.0, 180_000.0, 1e5, 2e7, 5e9])],
)
RECORDS = [
    InstanceRecord("i0", spec("i0", role, labels={"rack": "7"}), role.value, True, ("decode", "a"))
    for role in Role
] + [InstanceRecord("gone", None, removed_at=1.7e9)]


def test_what_is_written_is_read() -> None:
    assert unpack(pack(STATE), State) == STATE
    assert [unpack(pack(one), InstanceRecord) for one in RECORDS] == RECORDS


@given(st.binary(max_size=200), st.integers(0, 10_000))
def test_what_is_not_ours_is_nothing(noise: bytes, at: int) -> None:
    raw = pack(STATE)
    at %= len(raw)
    for forged in (noise, raw[:at], raw[:at] + noise + raw[at:]):
        unpack(forged, State)  # raises nothing
        assert unpack(forged, InstanceRecord) is None


@pytest.mark.parametrize(
    "changes",
    [
        {"loads": [LoadRow("i0", queued=-1)]},
        {"loads": [LoadRow("i0", queued_s=float("nan"))]},
        {"loads": [LoadRow("i0", queued_s=float("inf"))]},
        {"loads": [LoadRow("i0", batch=1 << 41)]},
        {"loads": [LoadRow("")]},
        {"heard": [HeardRow("i0", -1)]},
        {"demand": [DemandRow("m", [1.0, float("nan"), 0.0, 0.0])]},
        {"address": "x" * 4096},
    ],
)
def test_impossible_numbers_are_not_taken(changes: dict[str, object]) -> None:
    assert unpack(pack(msgspec.structs.replace(STATE, **changes)), State) is None
