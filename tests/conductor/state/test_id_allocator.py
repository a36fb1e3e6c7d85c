"""Numbers of names are reused, and a new name inherits nothing from the previous owner of its
number."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import pytest
from coresupport import BLOCK, conductor, keys, prompt, spec, tell
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from tiffin.conductor.cost.transfer_model import TIERS
from tiffin.conductor.errors import UnknownModel
from tiffin.conductor.events.index_updates import NODE_TIERS, Added, Gone, HolderInventory
from tiffin.conductor.pool.orders import Copy
from tiffin.conductor.records import Decision, InstanceSpec, Load, Rejection, Request
from tiffin.conductor.state import id_allocator as names_module
from tiffin.conductor.state import instance_table as cluster_module
from tiffin.conductor.state.id_allocator import SWEEP_S, IdAllocator
from tiffin.conductor.state.instance_table import IDLE_MODELS_MAX, Cluster

if TYPE_CHECKING:
    from tiffin.conductor.core import Conductor

DRAM = TIERS.index("dram")
GB = 10**9
FAST = [100e9, 0.0]


def follow(made: Conductor, node: str, now: float) -> None:
    """A feed reports a node without blocks."""
    made.apply(HolderInventory(node, "dram", [], first=True, last=True), now)


def seconds(made: Conductor, source: str, target: str) -> float:
    numbers = made.cluster.node_number(source), made.cluster.node_number(target)
    return float(made.transfers.seconds(numbers[0], DRAM, numbers[1], GB))


def sweep_at(made: Conductor, now: float) -> float:
    made.tick(now + SWEEP_S)
    return now + SWEEP_S


class NumbersMachine(RuleBasedStateMachine):
    """The allocator against a dict and a set."""

    NAMES = st.sampled_from("abcdefgh")

    def __init__(self) -> None:
        super().__init__()
        self.numbers = IdAllocator()
        self.known: dict[str, int] = {}

    @rule(name=NAMES)
    def give(self, name: str) -> None:
        number = self.numbers.give(name)
        if name not in self.known:
            free = set(range(len(self.known) + 1)) - set(self.known.values())
            assert number <= min(free), "the lowest, and none that was never needed"
            assert number not in self.known.values()
        self.known.setdefault(name, number)

    @rule(kept=st.sets(NAMES), busy=st.sets(st.integers(0, 8)))
    def take_back(self, kept: set[str], busy: set[int]) -> None:
        gone = {n: at for n, at in self.known.items() if n not in kept and at not in busy}
        assert self.numbers.take_back_all_but(kept, busy) == list(gone.values())
        self.known = {n: at for n, at in self.known.items() if n not in gone}

    @rule(name=NAMES)
    def lower(self, name: str) -> None:
        if name not in self.known:
            with pytest.raises(KeyError):
                self.numbers.lower(name)
            return
        lowest = min(set(range(len(self.known) + 1)) - set(self.known.values()))
        lowered = self.numbers.lower(name)
        if lowest < self.known[name]:
            assert lowered == (self.known[name], lowest)
            self.known[name] = lowest
        else:
            assert lowered is None

    @invariant()
    def is_the_dict(self) -> None:
        assert list(self.numbers) == list(self.known)
        assert len(self.numbers) == len(self.known)
        assert {name: self.numbers.find(name) for name in "abcdefgh"} == {
            name: self.known.get(name) for name in "abcdefgh"
        }


NumbersMachine.TestCase.settings = hypothesis_settings(max_examples=50, stateful_step_count=40)
TestNumbers = NumbersMachine.TestCase


class TestNodes:
    def test_thousands_come_and_go(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Pods get new names daily. Live nodes keep their measured links, new ones have none."""
        monkeypatch.setattr(cluster_module, "NODES_MAX", 64)
        made, now = conductor(spec("stays", node="stays")), 0.0
        for day in range(150):
            today = [f"day-{day}-{i}" for i in range(20)]
            for node in today:
                made.register(spec(node, node=node), now)
                follow(made, node, now)
                assert seconds(made, "stays", node) == pytest.approx(seconds(made, node, "none"))
            made.links("stays", dict.fromkeys(today, FAST))
            assert all(seconds(made, node, "stays") < 0.02 for node in today)
            assert set(made.transfers.ways()) == set(today)
            for node in today:
                made.remove(node, now)
                made.apply(Gone(node, NODE_TIERS), now)
            made.heartbeat("stays", Load(), now)
            now = sweep_at(made, now)
            made.heartbeat("stays", Load(), now)
        assert made.transfers.ways() == {}
        assert max(made.cluster.node_number(f"next-{i}") for i in range(20)) < 64
        assert made.index.width < 200

    @pytest.mark.parametrize("how", ["instance", "blocks", "followed", "in flight"])
    def test_what_is_referred_to_stays(self, how: str) -> None:
        made = conductor()
        number = made.cluster.node_number("n")
        if how == "instance":
            made.register(spec("i", node="n"), 0.0)
        elif how == "blocks":
            made.apply(Added("n", "nvme", keys("x", 1)), 0.0)
        elif how == "followed":
            follow(made, "n", 0.0)
        else:
            made.register(spec("i", node="other"), 0.0)
            made.bookings.ordered(Copy(7, (), b"", 0, "n", "node-other", GB, "hot"), 0.0)
        made.cluster.node_number("of nobody")
        made.names.sweep()
        assert made.cluster.find_node("n") == number
        assert made.cluster.find_node("of nobody") == -1
        if how == "in flight":
            assert made.transfers.in_flight_bytes(number) == GB
            made.bookings.carried_out(7, 0, 1.0)
        elif how == "instance":
            made.remove("i", 1.0)
        else:
            made.apply(Gone("n", NODE_TIERS), 1.0)
        made.names.sweep()
        assert made.cluster.find_node("n") == -1
        assert made.index.find("n", "dram") is made.index.find("n", "nvme") is None

    def test_an_instance_moves_to_another_node(self) -> None:
        made = conductor(spec("i", node="old"))
        made.register(spec("i", node="new"), 1.0)
        made.names.sweep()
        assert made.cluster.find_node("old") == -1
        assert made.index.find("old", "dram") is None
        assert made.index.find("new", "dram") is not None

    def test_names_in_others_reports_are_no_reason_to_keep_anything(self) -> None:
        made = conductor(spec("a", node="a"), spec("b", node="b"))
        made.links("a", {f"made up {i}": FAST for i in range(5000)} | {"b": FAST})
        assert made.transfers.ways() == {"b": {"a": (pytest.approx(100e9), 0.0)}}
        assert made.cluster.names_numbered == 3  # two nodes and a model

    def test_names_may_come_faster_than_time_passes(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """A client registers one instance repeatedly, on another node each time."""
        monkeypatch.setattr(names_module, "CROWDED_MIN", 50)
        made = conductor()
        made.names.sweep()
        for i in range(2000):
            made.register(spec("i", node=f"node-{i}"), 0.0)
            assert made.cluster.names_numbered + len(made.index.numbers()) < 200

    def test_who_had_too_high_a_number_gets_a_lower_one(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(cluster_module, "NODES_MAX", 4)
        made = conductor(*(spec(f"i{i}", node=f"n{i}") for i in range(6)))
        for name in ("i0", "i2"):
            made.remove(name, 1.0)
        made.names.sweep()
        rows = [made.cluster.row(f"i{i}") for i in (1, 3, 4, 5)]
        assert sorted(made.cluster.node[rows].tolist()) == [0, 1, 2, 3]
        for i, row in zip((1, 3, 4, 5), rows, strict=True):
            assert made.cluster.node[row] == made.cluster.find_node(f"n{i}")
        made.links("n4", {"n5": FAST})
        assert seconds(made, "n5", "n4") < 0.02

    @pytest.mark.parametrize("seed", range(10))
    def test_against_a_dict(self, seed: int) -> None:
        """Instances, feeds, reports, requests and time in any order: a live node has the links that
        were reported since it came, and no other ones."""
        life = _Life(seed)
        for _ in range(400):
            life.step()
            life.check()


class TestModels:
    def test_models_come_and_go(self) -> None:
        made = conductor(spec("stays"))
        for day in range(3 * IDLE_MODELS_MAX):
            of_today = InstanceSpec("i", f"m{day}", *_REST, block_bytes=1 << 20, node="n")
            made.register(of_today, float(day))
            if day % 100 == 0:
                made.names.sweep()
        made.remove("i", float(day))
        made.names.sweep()
        assert made.cluster.names_numbered <= IDLE_MODELS_MAX + 3
        assert made.cluster.model_number("m0") is None
        with pytest.raises(UnknownModel):
            made.schedule(Request("r", "m0", 10), 1.0)
        outcome = made.schedule(Request("r", f"m{day}", 10), 1.0)
        assert isinstance(outcome, Rejection), "one that was there a moment ago may come back"
        assert isinstance(made.schedule(prompt("s"), 1.0), Decision)

    def test_a_number_that_is_given_again_is_the_new_models(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(cluster_module, "IDLE_MODELS_MAX", 1)
        cluster = Cluster()
        for i in range(20):
            one = InstanceSpec(f"i{i}", f"m{i}", *_REST, node="n")
            cluster.register(one, (0.0,) * 6, 0.0)
            if i % 2:
                cluster.remove(f"i{i}")
            cluster.forget_models()
        for i in range(0, 20, 2):
            assert cluster.rows_for(f"m{i}", prefill=True).tolist() == [cluster.row(f"i{i}")]
        assert cluster.names_numbered <= 12


_REST = (spec("any").role, spec("any").profile)


class _Life:
    NODES = tuple(f"n{i}" for i in range(8))

    def __init__(self, seed: int) -> None:
        self.dice = random.Random(seed)
        self.made = conductor()
        self.now = 0.0
        self.beside: dict[str, str] = {}  # instance: node
        self.followed: set[str] = set()
        self.ways: dict[tuple[str, str], float] = {}  # links measured since both nodes came
        self.requests = 0

    @property
    def live(self) -> set[str]:
        booked, find = self.made.bookings.nodes(), self.made.cluster.find_node
        moving = {node for node in self.NODES if find(node) in booked}
        return set(self.beside.values()) | self.followed | moving

    def step(self) -> None:
        dice, made = self.dice, self.made
        before = self.live
        node, other = dice.sample(self.NODES, 2)
        name = f"i{dice.randrange(5)}"
        match dice.randrange(8):
            case 0 | 1:
                made.register(spec(name, node=node), self.now)
                self.beside[name] = node
            case 2 if name in self.beside:
                made.remove(name, self.now)
                del self.beside[name]
            case 3:
                follow(made, node, self.now)
                self.followed.add(node)
            case 4 if node in self.followed:
                made.apply(Gone(node, NODE_TIERS), self.now)
                self.followed.discard(node)
            case 5 if {node, other} <= self.live:
                speed = dice.choice([2e9, 20e9, 100e9])
                if (other, node) not in self.ways:
                    made.links(other, {})  # it is in the directory as well
                    made.links(node, {other: [speed, 0.0], "made up": [1e12, 0.0]})
                    self.ways[other, node] = speed
            case 6 if self.beside:
                self.requests += 1
                one = Request(f"r{self.requests}", "m", 2 * BLOCK + 1, keys("x", 2))
                made.schedule(one, self.now)
                if dice.random() < 0.7:
                    tell(made, one.id, "finished", now=self.now)
            case 7:
                self.now += 0.5
                for known in self.beside:
                    made.heartbeat(known, Load(), self.now)
                made.tick(self.now)
        # Removed names are forgotten here at the latest, so that the dict can do the same.
        made.names.sweep()
        gone = before - self.live
        self.ways = {way: at for way, at in self.ways.items() if not gone & set(way)}

    def check(self) -> None:
        cluster = self.made.cluster
        numbers = {node: cluster.find_node(node) for node in self.NODES}
        given = {node: at for node, at in numbers.items() if at >= 0}
        assert set(self.beside.values()) <= given.keys() <= self.live
        assert len(set(given.values())) == len(given)
        for name, node in self.beside.items():
            assert cluster.node[cluster.row(name)] == numbers[node]
        found = {
            (source, target): speed
            for source, ways in self.made.transfers.ways().items()
            for target, (speed, _) in ways.items()
        }
        assert found == pytest.approx(self.ways, rel=1e-5)
        default_s = float(self.made.transfers.seconds(-1, DRAM, -1, GB))
        for source in self.live:
            for target in self.live - {source}:
                if not {(source, target), (target, source)} & self.ways.keys():
                    took_s = seconds(self.made, source, target)
                    busy = self.made.bookings.nodes()
                    idle = busy.isdisjoint(map(cluster.find_node, (source, target)))
                    assert not idle or took_s == pytest.approx(default_s, rel=1e-5)
