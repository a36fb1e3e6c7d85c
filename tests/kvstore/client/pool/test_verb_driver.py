"""The parts of a pool's client, each by itself: health, its own hints, concurrent steps."""

from __future__ import annotations

import contextlib
import math
import random
import threading
import time
from typing import TYPE_CHECKING, Any

import pytest
from kvsupport import Background, fresh_prefix, payloads_of, within

from tiffin.kvstore.client.pool.home.read_through import HomeCopies
from tiffin.kvstore.client.pool.link_health import Links
from tiffin.kvstore.client.pool.members import (
    PLACED_MAX,
    PLACED_S,
    FixedMembers,
    HomeNumber,
    Placements,
)
from tiffin.kvstore.client.pool.peers import WORKERS
from tiffin.kvstore.client.pool.pool_verbs import AskNode, Together
from tiffin.kvstore.client.pool.put_placement import _joined
from tiffin.kvstore.client.pool.replica_choice import LATE_S, ReplicaRun, cheapest, plan_reads
from tiffin.kvstore.client.pool.replication.replication_requests import ORDERS_MAX, Orders
from tiffin.kvstore.client.pool.verb_driver import VerbDriver
from tiffin.kvstore.client.verbs.block_verbs import PutResult
from tiffin.kvstore.credentials import Credentials
from tiffin.kvstore.directory.base import NodeRecord
from tiffin.kvstore.errors import (
    ClientClosed,
    InvalidInput,
    NodeUnavailable,
    NoRoom,
)
from tiffin.kvstore.node.core import messages
from tiffin.messenger.budget import SHARED, Priority
from tiffin.messenger.health import FIRST_S, MAX_S

if TYPE_CHECKING:
    from collections.abc import Iterator

    from poolsupport import Cluster


class Speeds:
    """Seconds of a read, by node."""

    def __init__(self, **seconds: float) -> None:
        self._seconds = {int(name[1:]): value for name, value in seconds.items()}

    def seconds(self, node: int, nbytes: int) -> float:
        return self._seconds.get(node, 1.0)


class TestPlans:
    def test_a_run_goes_on_with_its_node(self) -> None:
        holders = [{1, 2}, {1, 2}, {2}, {3}, set(), {1}]
        assert plan_reads(holders, 10, 1, Speeds(n1=1, n2=2, n3=3)) == [
            ReplicaRun(1, 10, 12, others=True),
            ReplicaRun(2, 12, 13, others=False),
            ReplicaRun(3, 13, 14, others=False),
        ]

    def test_one_block_that_is_nowhere_else_makes_its_run_the_only_one(self) -> None:
        assert plan_reads([{1, 2}, {1}], 0, 1, Speeds(n1=1, n2=9)) == [
            ReplicaRun(1, 0, 2, others=False)
        ]

    def test_dead_nodes_are_not_asked(self) -> None:
        dead = Speeds(n1=math.inf)
        assert plan_reads([{1}], 0, 1, dead) == []
        assert plan_reads([{1, 2}], 0, 1, dead) == [ReplicaRun(2, 0, 1, others=False)]
        assert plan_reads([{1, 2, 3}], 0, 1, dead) == [ReplicaRun(2, 0, 1, others=True)]
        assert plan_reads([{2, 3}, {1, 2}], 0, 1, dead) == [ReplicaRun(2, 0, 2, others=False)]
        assert cheapest([], 1, dead) is None

    def test_who_was_given_up_in_haste_is_the_last_that_is_asked(self) -> None:
        late = Speeds(n1=LATE_S, n2=1, n3=math.inf)
        assert plan_reads([{1, 2}], 0, 1, late) == [ReplicaRun(2, 0, 1, others=False)]
        assert plan_reads([{1, 3}], 0, 1, late) == [ReplicaRun(1, 0, 1, others=False)]


class TestLinks:
    def test_failures_in_a_row_double_the_rest(self) -> None:
        links = Links()
        for failures in range(8):
            links.failed(1, now=100.0)
            rest_s = min(MAX_S, FIRST_S * 2**failures)
            assert links.seconds(1, 1, now=100.0 + rest_s - 0.01) == math.inf
            assert links.seconds(1, 1, now=100.0 + rest_s) < 1
            assert links.down(now=100.0) == {1}
        links.answered(1)
        assert links.down(now=100.0) == set()
        links.failed(1, now=100.0, late=True)
        assert LATE_S <= links.seconds(1, 1, now=100.0) < math.inf
        links.answered(1)
        links.failed(1, now=100.0)
        assert links.seconds(1, 1, now=100.0) == math.inf
        assert links.down(now=100.0 + FIRST_S) == set()

    def test_speed_is_what_was_measured(self) -> None:
        links = Links()
        for _ in range(50):
            links.moved(1, 1, 0.001)
            links.moved(1, 1 << 30, 1.001)
            links.moved(2, 1, 0.0001)
            links.moved(2, 1 << 30, 10.0001)
        assert links.seconds(1, 1 << 30) == pytest.approx(1.0, rel=0.1)
        assert links.seconds(2, 1 << 30) == pytest.approx(10.0, rel=0.1)
        assert links.seconds(2, 1) < links.seconds(1, 1)
        assert links.seconds(3, 1 << 20) < 0.01, "who was never asked is tried"
        assert links.statistics()[1]["bytes"] == 50 * (1 + (1 << 30))

    def test_nodes_that_left_are_forgotten(self) -> None:
        links = Links()
        links.answered(1)
        links.answered(2)
        links.keep({2})
        assert list(links.statistics()) == [2]


class TestHints:
    def test_what_was_put_is_known_for_a_while(self) -> None:
        placements, keys = Placements(), [bytes([i]) * 16 for i in range(3)]
        placements.note(5, keys[:2], now=10.0)
        located: list[tuple[int, ...]] = [(1,), (), ()]
        assert placements.added_to(located, keys, now=10.0) == [(1, 5), (5,), ()]
        assert located == [(1,), (), ()]
        assert placements.added_to([(5,), (), ()], keys, now=10.0) == [(5,), (5,), ()]
        placements.forget(keys[:1])
        assert placements.added_to(located, keys, now=10.0) == [(1,), (5,), ()]
        assert placements.added_to(located, keys, now=10.0 + PLACED_S) == located

    def test_hints_are_bounded(self) -> None:
        placements = Placements()
        keys = [i.to_bytes(16, "little") for i in range(PLACED_MAX + 10)]
        placements.note(5, keys, now=0.0)
        located = placements.added_to([()] * len(keys), keys, now=0.0)
        assert located[:10] == [()] * 10
        assert located[10:] == [(5,)] * PLACED_MAX

    def test_home_has_the_number_of_its_last_registration(self) -> None:
        records = {
            3: NodeRecord("n", "", "here", "/s", 1, 1, number=3),
            4: NodeRecord("n", "", "elsewhere", "/s", 1, 1, number=4),
        }
        away = False

        def nodes() -> dict[int, NodeRecord]:
            if away:
                raise NodeUnavailable("the directory is away, and was never there")
            return records

        number = HomeNumber(nodes, "here", "/s")
        assert number() == 3
        records[9] = records.pop(3)
        assert number() == 9
        away = True
        assert number() == 9
        away = False
        del records[9]
        assert number() is None

    def test_copies_are_wanted_by_the_policy(self) -> None:
        prefix = fresh_prefix(3)
        second, always, never = (HomeCopies(p) for p in ("second", "always", "never"))
        for policy in (second, always, never):
            policy.saw(prefix, 1, 2)
        assert [second.wants(prefix, i) for i in range(4)] == [False, True, False, False]
        assert [always.wants(prefix, i) for i in range(3)] == [True] * 3
        assert not never.wants(prefix, 1)
        with pytest.raises(InvalidInput):
            HomeCopies("")

    def test_two_puts_to_one_node_add_up(self) -> None:
        first = PutResult((0, 1), (2,), (), (), "no_room")
        second = PutResult((4,), (0, 1, 2), (3,), (), None)
        assert _joined(first, second) == PutResult((0, 1, 4), (2,), (3,), (), None)


class TestTogether:
    @pytest.fixture
    def driver(self, nothing_left: None) -> Iterator[VerbDriver]:
        driver = VerbDriver(FixedMembers([("127.0.0.1", 1)]), Credentials())
        yield driver
        driver.close()

    def run(self, driver: VerbDriver, count: int) -> list[Any]:
        def verb() -> Any:
            outcomes = yield Together(
                [AskNode(n, messages.Match(0, b""), 5.0) for n in range(count)]
            )
            return outcomes

        outcomes: list[Any] = driver.run(verb())
        return outcomes

    def test_failures_are_outcomes_in_their_place(
        self, driver: VerbDriver, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def do(step: AskNode, _: Any) -> int:
            if step.node % 3 == 1:
                raise NoRoom(str(step.node))
            return step.node

        real = driver._do
        monkeypatch.setattr(
            driver, "_do", lambda s, r: do(s, r) if isinstance(s, AskNode) else real(s, r)
        )
        outcomes = self.run(driver, 20)
        assert [type(o) if o.__class__ is not int else o for o in outcomes] == [
            NoRoom if n % 3 == 1 else n for n in range(20)
        ]
        assert self.run(driver, 0) == []

    def test_a_bug_is_raised_when_nothing_runs_any_more(
        self, driver: VerbDriver, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        running, real = [], driver._do

        def do(step: AskNode, _: Any) -> int:
            if step.node == 0:
                raise ZeroDivisionError
            running.append(step.node)
            time.sleep(0.05)
            running.remove(step.node)
            return step.node

        monkeypatch.setattr(
            driver, "_do", lambda s, r: do(s, r) if isinstance(s, AskNode) else real(s, r)
        )
        with pytest.raises(ZeroDivisionError):
            self.run(driver, 4)
        assert running == []

    def test_a_call_does_not_wait_for_anothers_stuck_nodes(
        self, driver: VerbDriver, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        stuck, go, real = threading.Semaphore(0), threading.Event(), driver._do

        def do(step: AskNode, _: Any) -> int:
            if step.timeout_s > 1000:
                stuck.release()
                go.wait(30)
            return step.node

        monkeypatch.setattr(
            driver, "_do", lambda s, r: do(s, r) if isinstance(s, AskNode) else real(s, r)
        )

        def long() -> Any:
            steps = [AskNode(n, messages.Match(0, b""), 2000.0) for n in range(WORKERS + 1)]
            return (yield Together(steps))

        waiting = Background(lambda: driver.run(long()))
        for _ in range(WORKERS + 1):
            stuck.acquire()
        with within(0, "a call beside one that is stuck"):
            assert self.run(driver, 6) == list(range(6))
        go.set()
        assert waiting.result() == list(range(WORKERS + 1))

    def test_time_spent_waiting_for_a_turn_is_spent(
        self, driver: VerbDriver, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        left, real = [], driver._do

        def do(step: AskNode, _: Any) -> None:
            left.append(step.timeout_s)
            time.sleep(0.05)

        monkeypatch.setattr(
            driver, "_do", lambda s, r: do(s, r) if isinstance(s, AskNode) else real(s, r)
        )
        self.run(driver, 3 * (WORKERS + 1))
        assert min(left) <= 5.0 - 0.05
        assert max(left) <= 5.0

    def test_after_close_everything_is_closed(self, driver: VerbDriver) -> None:
        driver.close()
        with pytest.raises(ClientClosed):
            self.run(driver, 3)
        with pytest.raises(ClientClosed):
            driver.ask(1, messages.Match(0, b""), 1.0)


class TestAsking:
    def test_a_refusal_is_no_failure_of_the_node(self, cluster: Cluster) -> None:
        one = cluster.start("one")
        driver = cluster.open()._nodes.driver
        pull = messages.Pull(0, bytes(16), bytes(16), 0, 4711, 1.0)
        with pytest.raises(NodeUnavailable, match="not in the pool"):
            driver.ask(one.number, pull, 5.0)  # `one` reports that node 4711 is unavailable
        began = time.monotonic()
        assert driver.links.down(began) == set()
        one.hang_up()
        with pytest.raises(NodeUnavailable):
            driver.ask(one.number, messages.Match(0, b""), 5.0)
        assert driver.links.down(began) == {one.number}

    def test_orders_are_bounded_and_end(self, caplog: pytest.LogCaptureFixture) -> None:
        orders, go, done = Orders(), threading.Event(), []

        def order() -> None:
            go.wait(30)
            done.append(1)
            if len(done) == 3:
                raise NoRoom("this one failed")

        for _ in range(ORDERS_MAX + 5):
            orders.add(order)
        assert sum("not ordered" in r.message for r in caplog.records) == 5
        orders.finish(0.01)
        go.set()
        orders.finish(30)
        assert len(done) == ORDERS_MAX
        assert "this one failed" in caplog.text
        orders.close()


@pytest.mark.parametrize("nixl", [False, True])
def test_a_large_read_waits_for_its_turn_and_does_not_blame_the_node(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch, nixl: bool
) -> None:
    monkeypatch.setattr("tiffin.kvstore.client.pool.remote.remote_node._BUDGETED_BYTES_MIN", 1)
    cluster.start("one")
    client, prefix = cluster.open(nixl=nixl), fresh_prefix(3)
    assert client.put(prefix, payloads_of(prefix)).complete
    with SHARED.hold(SHARED.limit_bytes, Priority.DECODE, time.monotonic() + 5):
        with client.get(prefix, timeout_s=0.05) as none:
            assert (len(none), none.reason) == (0, "deadline")
        assert SHARED.waiting == 0
    assert client._nodes.driver.links.down(time.monotonic()) == set()
    with client.get(prefix) as blocks:
        assert blocks.complete
    assert SHARED.used_bytes == 0


@pytest.mark.parametrize("nixl", [False, True])
def test_a_node_that_hangs_holds_up_only_its_own_reads(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch, nixl: bool
) -> None:
    """Also if the client asks for NIXL and the node does not offer it."""
    monkeypatch.setattr("tiffin.kvstore.client.pool.remote.remote_node._BUDGETED_BYTES_MIN", 1)
    one, two = cluster.start("one"), cluster.start("two")
    client = cluster.open(nixl=nixl)
    prefixes = {node.number: fresh_prefix(3) for node in (one, two)}
    for number, prefix in prefixes.items():
        assert client.put(prefix, payloads_of(prefix), node=number).complete
    peer = client._nodes.driver.peer(one.number)
    with peer.budget.hold(peer.budget.limit_bytes, Priority.DECODE, time.monotonic() + 5):
        with client.get(prefixes[one.number], timeout_s=0.05) as none:
            assert (len(none), none.reason) == (0, "deadline")
        with client.get(prefixes[two.number]) as blocks:
            assert blocks.complete
    assert SHARED.used_bytes == 0


def test_a_summary_of_links_fits_a_record(cluster: Cluster) -> None:
    driver = cluster.open()._nodes.driver
    dice = random.Random(1)
    driver._records = {
        n: NodeRecord(f"node-{n}", "h:1", "", "", 1, 1, number=n) for n in range(200)
    }
    for n in range(200):
        driver.links.moved(n, 1 << 20, dice.random())
    summary = driver.link_summary()
    assert len(summary) == 64
    assert all(bandwidth > 0 and latency > 0 for bandwidth, latency in summary.values())


def test_waiting_for_threads_outlasts_an_interruption() -> None:
    """Ctrl-C comes while other threads still write into the caller's memory."""
    from concurrent.futures import Future

    from tiffin.kvstore.client.pool import verb_driver

    future: Future[None] = Future()
    future.set_running_or_notify_cancel()
    waits = []

    def interrupted(pending: Any) -> Any:
        waits.append(pending)
        if len(waits) == 1:
            raise KeyboardInterrupt
        future.set_result(None)
        return engine_wait(pending)

    engine_wait = verb_driver.wait
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(verb_driver, "wait", interrupted)
        with contextlib.suppress(KeyboardInterrupt):
            verb_driver._wait_for([future])
            raise AssertionError("the interruption was swallowed")
    assert future.done()
    assert len(waits) == 2
