"""How the promises of other conductors are counted, who keeps a request, and what travels."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule
from sharingsupport import spec

from tiffin.conductor.records import Load, Role
from tiffin.conductor.replicas.bulletins import (
    BULLETIN_BYTES_MAX,
    EndedRequest,
    Happened,
    HeardBulletin,
    Instance,
    LoadRow,
    Placed,
    Rows,
    SentSchema,
    pack,
    unpack,
)
from tiffin.conductor.replicas.remote_load import (
    REPORTED,
    SETTLE_S,
    Elsewhere,
    PeerLoads,
    counts_of,
    rank,
)
from tiffin.conductor.state.instance_table import Cluster

if TYPE_CHECKING:
    import random

    from tiffin.conductor.replicas.bulletins import Word

LATENCY = (0.01, 1e-4, 0.0, 0.02, 1e-4, 1e-7)
INSTANCES = ("i0", "i1", "i2")


def a_cluster(*names: str) -> Cluster:
    cluster = Cluster()
    for name in names:
        cluster.register(spec(name), LATENCY, 0.0)
    return cluster


def report(cluster: Cluster, loads: PeerLoads, name: str, load: Load, now: float) -> None:
    """A heartbeat."""
    cluster.heard(name, load, now)
    loads.report(cluster.row(name), load, now)


def placed(request_id: str = "r", **changes: object) -> Placed:
    whole = Placed(
        request_id, 0, 1000.0, 120.0, 1, bytes(16), "m", 600, "normal", "", "", None, 0.1, "i0",
        "i1", "random", 0.5, 0.02, 0, 0, (), False, "", None, (), (), (), 0.4, 0.4, 600,
        {"i1": 700}, False, False,
    )  # fmt: skip
    return msgspec.structs.replace(whole, **changes)


# -- one report and one word -----------------------------------------------------------------------


def test_a_report_and_a_word_of_the_same_requests_count_once() -> None:
    cluster = a_cluster("i0")
    loads = PeerLoads(cluster)
    loads.tell("a", [LoadRow("i0", batch=8)], 0.0)
    report(cluster, loads, "i0", Load(running=10), 0.0)
    assert cluster.batch[0] == 10  # eight of them are conductor a's, two are strangers'


def test_after_a_report_others_promises_count_on_top_of_strangers() -> None:
    cluster = a_cluster("i0")
    loads = PeerLoads(cluster)
    loads.tell("a", [LoadRow("i0", batch=8)], 0.0)
    report(cluster, loads, "i0", Load(running=10), 0.0)
    later = SETTLE_S + 0.1
    loads.tell("a", [LoadRow("i0", batch=12)], later)
    loads.blend(later)
    assert cluster.batch[0] == 14


def test_a_word_that_comes_just_after_the_report_is_of_requests_that_were_in_it() -> None:
    cluster = a_cluster("i0")
    loads = PeerLoads(cluster)
    report(cluster, loads, "i0", Load(running=10), 0.0)
    loads.tell("a", [LoadRow("i0", batch=8)], SETTLE_S / 2)
    loads.blend(SETTLE_S / 2)
    assert cluster.batch[0] == 10


def test_what_is_promised_here_counts_at_once_and_is_left_alone() -> None:
    cluster = a_cluster("i0")
    loads = PeerLoads(cluster)
    loads.tell("a", [LoadRow("i0", kv_used_tokens=500)], 0.0)
    loads.blend(0.0)
    cluster.promise(0, kv_used_tokens=100)
    assert cluster.kv_used_tokens[0] == 600
    loads.blend(0.0)
    assert (cluster.kv_used_tokens[0], cluster.own_kv_used_tokens[0]) == (600, 100)


def test_a_dead_conductors_requests_stay_as_far_as_the_instance_reported_them() -> None:
    cluster = a_cluster("i0", "i1")
    loads = PeerLoads(cluster)
    loads.tell("a", [LoadRow("i0", batch=8), LoadRow("i1", batch=3)], 0.0)
    report(cluster, loads, "i0", Load(running=6), 0.0)
    loads.blend(0.0)
    assert cluster.batch[:2].tolist() == [8, 3]
    loads.forget("a", 1.0)
    loads.blend(1.0)
    assert cluster.batch[:2].tolist() == [6, 0]
    report(cluster, loads, "i0", Load(running=0), 2.0)
    assert cluster.batch[0] == 0


def test_what_will_come_counts_from_now_on() -> None:
    cluster = a_cluster("i0")
    loads = PeerLoads(cluster)
    loads.tell("a", [LoadRow("i0", batch=1, coming=4, coming_tokens=4000, context_tokens=10)], 0.0)
    report(cluster, loads, "i0", Load(running=1, context_tokens=10), 0.0)
    assert (cluster.batch[0], cluster.context_tokens[0]) == (5, 4010)


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


def test_a_row_that_is_given_again_begins_with_nothing() -> None:
    cluster = a_cluster("i0")
    loads = PeerLoads(cluster)
    loads.tell("a", [LoadRow("i0", batch=5)], 0.0)
    report(cluster, loads, "i0", Load(running=5), 0.0)
    loads.tell("a", [LoadRow("i0")], 0.0)
    loads.blend(SETTLE_S + 0.01)
    loads.vacate(cluster.row("i0"))
    cluster.remove("i0")
    cluster.register(spec("other"), LATENCY, 0.0)
    loads.blend(SETTLE_S + 0.02)
    assert cluster.batch[cluster.row("other")] == 0


def test_what_is_said_of_an_instance_before_it_registers_is_counted_after() -> None:
    cluster = a_cluster("i0")
    loads = PeerLoads(cluster)
    loads.tell("a", [LoadRow("late", batch=5)], 0.0)
    loads.blend(0.0)
    cluster.register(spec("late"), LATENCY, 0.0)
    loads.blend(0.0)
    assert cluster.batch[cluster.row("late")] == 5


def test_a_conductor_dies_just_when_an_instance_registers() -> None:
    cluster = a_cluster("i0")
    loads = PeerLoads(cluster)
    loads.tell("a", [LoadRow("i0", batch=5)], 0.0)
    loads.tell("b", [LoadRow("i0", batch=2)], 0.0)
    cluster.register(spec("i1"), LATENCY, 0.0)
    loads.forget("a", 0.0)
    loads.check()
    loads.blend(0.0)
    assert cluster.batch[0] == 2


# -- whatever happens ------------------------------------------------------------------------------

counts = st.integers(0, 50)
rows = st.builds(
    LoadRow, st.sampled_from((*INSTANCES, "elsewhere")), counts, counts, counts, counts, counts,
    counts, counts, st.floats(0, 5),
)  # fmt: skip


class Columns(RuleBasedStateMachine):
    """Two others, three instances that come and go, reports of anything, in any order."""

    @initialize()
    def begin(self) -> None:
        self.now = 0.0
        self.cluster = a_cluster(*INSTANCES)
        self.loads = PeerLoads(self.cluster)
        self.told: dict[tuple[str, str], LoadRow] = {}
        self.own: dict[str, list[int]] = {name: [0] * len(REPORTED) for name in INSTANCES}
        self.reported: set[str] = set()

    @rule(peer=st.sampled_from("ab"), row=rows)
    def tell(self, peer: str, row: LoadRow) -> None:
        self.loads.tell(peer, [row], self.now)
        self.told[peer, row.instance] = row

    @rule(peer=st.sampled_from("ab"))
    def die(self, peer: str) -> None:
        self.loads.forget(peer, self.now)
        self.told = {key: row for key, row in self.told.items() if key[0] != peer}

    @rule(name=st.sampled_from(INSTANCES), at=st.integers(0, len(REPORTED) - 1), amount=counts)
    def promise(self, name: str, at: int, amount: int) -> None:
        if name in self.cluster:
            self.cluster.promise(self.cluster.row(name), **{REPORTED[at]: amount})
            self.own[name][at] += amount

    @rule(name=st.sampled_from(INSTANCES), running=counts, tokens=counts)
    def report(self, name: str, running: int, tokens: int) -> None:
        """The instance counts at least what is said to be promised, and `running` of strangers."""
        if name not in self.cluster:
            return
        row = self.cluster.row(name)
        load = Load(running=running, queued_prefill_tokens=tokens)
        report(self.cluster, self.loads, name, load, self.now)
        self.reported.add(name)
        for at, told in ((REPORTED.index("batch"), running), (1, tokens)):
            own, others = self.own[name][at], self.others(name)[at]
            coming = self.others(name)[5] if REPORTED[at] == "batch" else 0
            expected = max(own + others, max(told, own)) + coming
            assert getattr(self.cluster, REPORTED[at])[row] == expected

    @rule(name=st.sampled_from(INSTANCES))
    def leave_or_come(self, name: str) -> None:
        self.reported.discard(name)
        if name in self.cluster:
            self.loads.vacate(self.cluster.row(name))
            self.cluster.remove(name)
            self.own[name] = [0] * len(REPORTED)
        else:
            self.cluster.register(spec(name), LATENCY, self.now)

    @rule(seconds=st.sampled_from((0.05, SETTLE_S, 3.0)))
    def wait(self, seconds: float) -> None:
        self.now += seconds

    def others(self, name: str) -> tuple[int, ...]:
        told = [counts_of(row) for (_, of), row in self.told.items() if of == name]
        return tuple(map(sum, zip(*told, strict=True))) if told else (0,) * 7

    @rule()
    def columns_are_sums(self) -> None:
        self.loads.blend(self.now)
        self.loads.check()
        for name in self.cluster.names:
            row, others = self.cluster.row(name), self.others(name)
            for at, of in enumerate(REPORTED):
                coming = {"batch": others[5], "context_tokens": others[6]}.get(of, 0)
                value = int(getattr(self.cluster, of)[row])
                known = self.own[name][at] + others[at] + coming
                assert getattr(self.cluster, f"own_{of}")[row] == self.own[name][at]
                assert value >= known
                assert value == known or name in self.reported

    def teardown(self) -> None:
        """When all have gone, and everything has ended, nothing is left."""
        if not hasattr(self, "loads"):
            return
        self.columns_are_sums()
        for peer in "ab":
            self.loads.forget(peer, self.now)
        for name in self.cluster.names:
            row = self.cluster.row(name)
            amounts = dict(zip(REPORTED, self.own[name], strict=True))
            self.cluster.promise(row, **{of: -amount for of, amount in amounts.items()})
            report(self.cluster, self.loads, name, Load(0, 0, 0, 0, 0), self.now)
        self.loads.blend(self.now)
        for of in (*REPORTED, "others_s"):
            assert not np.any(getattr(self.cluster, of))


TestColumns = Columns.TestCase


# -- whose it is -----------------------------------------------------------------------------------


def test_whoever_took_a_request_over_last_has_it() -> None:
    known = Elsewhere()
    known.put("a", placed(), 0.0)
    known.put("b", placed(claim=1, decided_at=900.0), 0.0)
    known.put("a", placed(), 1.0)  # it says so again, and does not know yet
    entry = known.get("r")
    assert entry is not None
    assert entry.owner == "b"
    known.ended("a", "r")
    assert known.get("r") is entry
    known.ended("b", "r")
    assert known.get("r") is None


@given(
    st.lists(
        st.tuples(st.sampled_from("abc"), st.integers(0, 2), st.floats(0, 10)),
        min_size=1,
        unique_by=lambda claim: claim[0],
    ),
    st.randoms(use_true_random=False),
)
def test_all_agree_whose_it_is_in_whatever_order_they_hear_it(
    claims: list[tuple[str, int, float]], dice: random.Random
) -> None:
    winners = set()
    for _ in range(3):
        known = Elsewhere()
        for owner, claim, at in dice.sample(claims, len(claims)):
            known.put(owner, placed(claim=claim, decided_at=at), 0.0)
        entry = known.get("r")
        assert entry is not None
        winners.add(entry.owner)
    best = max(claims, key=lambda one: rank(placed(claim=one[1], decided_at=one[2]), one[0]))
    assert winners == {best[0]}


def test_what_is_not_spoken_of_is_forgotten() -> None:
    known = Elsewhere(most=3)
    for number in range(5):
        known.put("a", placed(f"r{number}", ttl_s=10.0), float(number))
    assert [known.get(f"r{number}") is not None for number in range(5)] == [False] * 2 + [True] * 3
    known.expire(13.5)
    assert len(known) == 1


# -- what travels ----------------------------------------------------------------------------------

WORDS: list[Word] = [
    Rows([LoadRow("i0", queued=3, queued_s=1.5)]),
    placed(),
    EndedRequest(["r1", "r2"]),
    Happened("r", "tokens", 8),
    Happened("r", "first_token", 0, ("p1", "d0")),
    HeardBulletin("i0", Load(running=3)),
    Instance("i0", 1000.0, spec("i0", labels={"rack": "7"}), "mixed", True),
    Instance("gone", 1000.0, None),
    SentSchema("m", "{}"),
]


def test_every_word_comes_back() -> None:
    (raw,), left_out = pack("a", 7, WORDS, asks=True, whole=True)
    bulletin = unpack(raw)
    assert bulletin is not None
    assert (bulletin.by, bulletin.seq, bulletin.asks, bulletin.whole) == ("a", 7, True, True)
    assert bulletin.words == WORDS
    assert left_out == 0


def test_a_bulletin_is_never_too_large_and_no_word_is_lost() -> None:
    many: list[Word] = [placed(f"r{number}") for number in range(1000)]
    huge = placed("huge", shards=tuple((f"instance-{n}", n) for n in range(10_000)))
    raws, left_out = pack("a", 0, [*many[:500], huge, *many[500:]], asks=True)
    bulletins = [unpack(raw) for raw in raws]
    assert max(map(len, raws)) <= BULLETIN_BYTES_MAX
    assert [word for one in bulletins if one is not None for word in one.words] == many
    assert [one.seq for one in bulletins if one is not None] == list(range(len(raws)))
    assert [one.asks for one in bulletins if one is not None] == [True] + [False] * (len(raws) - 1)
    assert left_out == 1


@given(st.binary(max_size=200), st.integers(0, 10_000))
def test_what_is_not_ours_is_nothing(noise: bytes, at: int) -> None:
    (raw,), _ = pack("a", 0, WORDS)
    at %= len(raw)
    for forged in (noise, raw[:at], raw[:at] + noise + raw[at:]):
        found = unpack(forged)  # raises nothing
        assert found is None or found.version == 1
    assert unpack(raw + bytes(BULLETIN_BYTES_MAX)) is None


@pytest.mark.parametrize(
    "word",
    [
        Rows([LoadRow("i0", queued=-1)]),
        Rows([LoadRow("i0", queued_s=float("nan"))]),
        Rows([LoadRow("i0", queued_s=float("inf"))]),
        Rows([LoadRow("i0", batch=1 << 41)]),
        Rows([LoadRow("")]),
        placed(prompt_tokens=0),
        placed(predicted_ttft_s=-1.0),
        placed(shares={}),
        SentSchema("m", "x" * 20_000),
    ],
)
def test_impossible_numbers_are_not_taken(word: Word) -> None:
    (raw,), _ = pack("a", 0, [word])
    assert unpack(raw) is None


def test_another_version_is_not_understood() -> None:
    (raw,), _ = pack("a", 0, WORDS)
    assert unpack(msgspec.msgpack.encode([2, *msgspec.msgpack.decode(raw)[1:]])) is None


def test_roles_travel() -> None:
    for role in Role:
        (raw,), _ = pack("a", 0, [Instance("i0", 1.0, spec("i0", role), role.value)])
        bulletin = unpack(raw)
        assert bulletin is not None
        assert bulletin.words[0].spec.role is role  # type: ignore[union-attr]
