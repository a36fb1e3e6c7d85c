"""Which delays of a home node are waits, and which are silence: `Home` over links with scripted
answers. Tests of a stopped home are in `test_home.py`."""

from __future__ import annotations

import contextlib
import threading
import time
from typing import TYPE_CHECKING, Any

import msgspec
import pytest
from kvsupport import (
    SCHEMA,
    Background,
    assert_right,
    fresh_prefix,
    wait_until,
)
from poolsupport import state_of

from tiffin.kvstore.client.connection.connection import NodeAnswer
from tiffin.kvstore.client.pool.home import home_link
from tiffin.kvstore.client.pool.home.home import Home
from tiffin.kvstore.client.pool.home.home_link import SLICE_MAX_S
from tiffin.kvstore.client.pool.link_health import Links
from tiffin.kvstore.client.pool.peers import PoolOptions
from tiffin.kvstore.deadlines import GRACE_S
from tiffin.kvstore.directory.base import NodeRecord
from tiffin.kvstore.errors import DeadlineExceeded, NodeUnavailable, StaleLease
from tiffin.kvstore.node.core import messages
from tiffin.kvstore.node.core.records import Reason

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from poolsupport import Cluster

    from tiffin.kvstore import Client, Prefix

# A call that takes so long has waited for the silent home: a hang.
LONG_S = 30.0


class Scripted:
    """A `NodeLink` with a test's answers: each is a function of the request and its time."""

    def __init__(self, *answers: Callable[[Any, float], Any]) -> None:
        self._answers = list(answers)
        self.asked: list[tuple[Any, float]] = []
        self.posted: list[messages.Request] = []
        self.gate: Any = None
        self.mapping: Any = None

    def call(self, request: messages.Request, timeout_s: float) -> NodeAnswer:
        self.asked.append((request, timeout_s))
        answer = self._answers.pop(0) if len(self._answers) > 1 else self._answers[0]
        return NodeAnswer(answer(request, timeout_s), None)

    def post(self, request: messages.Request) -> None:
        self.posted.append(request)

    def close(self) -> None:
        pass


class Pool:
    """The part of an `Engine` that a home needs; `nodes` are those of the directory."""

    def __init__(self, *nodes: int, hedge_s: float = 0.1) -> None:
        self.options = PoolOptions(hedge_s=hedge_s)
        self.links = Links()
        self._nodes = {number: record(number) for number in nodes}

    def nodes(self, *, fresh: bool = False) -> dict[int, NodeRecord]:
        return self._nodes

    def change(self, number: int, **fields: Any) -> None:
        """Change a node's record in the directory."""
        self._nodes[number] = msgspec.structs.replace(self._nodes[number], **fields)


def record(number: int) -> NodeRecord:
    return NodeRecord(f"n{number}", f"h{number}:1", f"h{number}", "/s", 1 << 20, 1 << 20)


def silent(request: Any, timeout_s: float) -> Any:
    time.sleep(timeout_s + GRACE_S)
    raise DeadlineExceeded("no answer")


def refusing(request: Any, timeout_s: float) -> Any:
    raise NodeUnavailable("nobody listens")


def flags(request: Any, timeout_s: float) -> Any:
    return messages.Flags(0, b"")


def leased(reason: Reason, lease: int = 0) -> Callable[[Any, float], Any]:
    def answer(request: Any, timeout_s: float) -> Any:
        time.sleep(timeout_s if reason is not Reason.NONE else 0.0)
        return messages.Leased(0, int(reason), lease, [0] * bool(lease), [1] * bool(lease))

    return answer


def no_room(request: Any, timeout_s: float) -> Any:
    time.sleep(timeout_s)
    return messages.Reserved(0, b"", int(Reason.NO_ROOM), 0, [], [])


@contextlib.contextmanager
def home_of(link: Scripted, pool: Pool | None = None) -> Iterator[Home]:
    """Home is number 1; there is a number 2, unless the test has another pool."""
    home = Home(link, lambda: 1, pool or Pool(1, 2))  # type: ignore[arg-type]
    try:
        yield home
    finally:
        home.close()


@pytest.fixture
def never_late(monkeypatch: pytest.MonkeyPatch) -> None:
    """A home that answers does not count as silent, however late its answer is."""
    monkeypatch.setattr(home_link, "GRACE_S", 20.0)


@pytest.mark.usefixtures("nothing_left")
class TestPatience:
    """Which delays are waits at home, and which are silence."""

    LEASE = messages.Lease(0, b"k" * 16, 0.0)
    RESERVE = messages.Reserve(0, b"k" * 16, b"p" * 16, 0, 4096, 0.0)

    def test_who_waits_for_nvme_waits_in_slices(self) -> None:
        link = Scripted(leased(Reason.DEADLINE), leased(Reason.DEADLINE, 7), leased(Reason.NONE, 8))
        with home_of(link) as home:
            assert home.call(self.LEASE, 20.0).reply.lease == 8
            assert not home.away
        slices = [request.timeout_s for request, _ in link.asked]
        assert slices == [0.05, 0.1, 0.2]
        # Each slice releases what it got before the next one.
        assert link.posted == [messages.Release(0, 7)]

    @pytest.mark.slow
    def test_no_slice_is_long(self) -> None:
        link = Scripted(*[no_room] * 4, leased(Reason.NONE))
        with home_of(link, Pool(1, 2, hedge_s=60.0)) as home:
            home.call(self.RESERVE, 1.0)
        assert max(timeout_s for _, timeout_s in link.asked) == SLICE_MAX_S

    def test_a_wait_for_room_ends_in_time(self) -> None:
        link = Scripted(no_room)
        with home_of(link) as home:
            assert home.call(self.RESERVE, 0.2).reply.reason == Reason.NO_ROOM
        assert sum(request.timeout_s for request, _ in link.asked) <= 0.2

    def test_what_time_cannot_help_is_not_asked_again(self) -> None:
        def full(request: Any, timeout_s: float) -> Any:
            return messages.Reserved(0, b"", int(Reason.NO_ROOM), 0, [], [])

        link = Scripted(full)
        with home_of(link, Pool(1, 2, hedge_s=60.0)) as home:
            home.call(self.RESERVE, 20.0)
        assert len(link.asked) == 1

    @pytest.mark.slow
    def test_silence_is_noticed_within_the_first_slice(self) -> None:
        link = Scripted(silent)
        with home_of(link) as home:
            with pytest.raises(DeadlineExceeded):
                home.call(self.LEASE, 20.0)
            assert home.away
            assert link.asked[0][1] == 0.05
            with pytest.raises(NodeUnavailable, match="left alone"):
                home.call(self.LEASE, 20.0)

    def test_a_commit_is_not_asked_for_twice(self) -> None:
        link = Scripted(silent, flags)
        with home_of(link) as home, pytest.raises(DeadlineExceeded):
            home.call(messages.Commit(0, 1), 5.0)
        assert sum(isinstance(request, messages.Commit) for request, _ in link.asked) == 1

    def test_a_home_alone_in_its_pool_has_all_the_time(self) -> None:
        link = Scripted(silent, leased(Reason.NONE, 5))
        with home_of(link, Pool(1)) as home:
            assert home.call(self.LEASE, 20.0).reply.lease == 5
        link = Scripted(flags)
        with home_of(link, Pool(1)) as home:
            home.call(messages.Commit(0, 1), 60.0)
        assert 30.0 < link.asked[0][1] <= 60.0

    def test_what_is_refused_at_once_is_asked_again_at_once(self) -> None:
        link = Scripted(refusing, flags)
        with home_of(link) as home:
            with pytest.raises(NodeUnavailable):
                home.call(self.LEASE, 20.0)
            assert (home.lost, home.away) == (True, False)
            home.call(messages.Match(0, b""), 20.0)
            assert not home.lost

    @pytest.mark.slow
    def test_a_connection_that_is_never_welcomed_is_silence(self) -> None:
        def hung(request: Any, timeout_s: float) -> Any:
            time.sleep(timeout_s + GRACE_S)
            raise NodeUnavailable("timed out")

        with home_of(Scripted(hung)) as home:
            with pytest.raises(NodeUnavailable):
                home.call(self.LEASE, 20.0)
            assert home.away

    def test_a_refusal_is_an_answer(self) -> None:
        def stale(request: Any, timeout_s: float) -> Any:
            raise StaleLease("of another")

        with home_of(Scripted(stale)) as home:
            with pytest.raises(StaleLease):
                home.call(messages.Commit(0, 1), 5.0)
            assert not home.lost

    def test_others_are_answered_while_one_waits_for_room(self, never_late: None) -> None:
        """If one thread waits for room, another thread does not give up."""
        slices = [no_room] * 3

        def answer(request: Any, timeout_s: float) -> Any:
            if isinstance(request, messages.Match):
                return flags(request, timeout_s)
            return (slices.pop() if slices else leased(Reason.NONE, 3))(request, timeout_s)

        link = Scripted(answer)
        with home_of(link) as home:
            writer = Background(lambda: home.call(self.RESERVE, 20.0))
            wait_until(lambda: link.asked, "it waits")
            home.call(messages.Match(0, b""), 20.0)
            writer.result()
            assert not home.away

    def test_without_a_thread_to_listen_each_call_asks(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def start(thread: threading.Thread) -> None:
            raise RuntimeError("can't start new thread")

        with home_of(Scripted(silent, flags)) as home:
            with monkeypatch.context() as patch:
                patch.setattr(threading.Thread, "start", start)
                with pytest.raises(DeadlineExceeded):
                    home.call(self.LEASE, 20.0)
            assert (home.away, home._listener) == (False, None)
            home.call(messages.Match(0, b""), 20.0)
            assert not home.lost

    @pytest.mark.parametrize("why", ["draining", "dead", "home once more"])
    def test_who_can_take_nothing_is_no_other(self, why: str) -> None:
        """Nodes that can't take blocks don't count as others: a commit at home has all its time."""
        pool, link = Pool(1, 2), Scripted(flags)
        if why == "draining":
            pool.change(2, draining=True)
        elif why == "dead":
            pool.links.failed(2, time.monotonic() + 60.0)
        else:
            home = pool.nodes()[1]
            pool.change(2, host=home.host, socket=home.socket)
        with home_of(link, pool) as home:
            home.call(messages.Commit(0, 1), 60.0)
        assert link.asked[0][1] > 30.0

    @pytest.mark.slow
    def test_a_draining_node_still_reads_for_home(self) -> None:
        pool = Pool(1, 2)
        pool.change(2, draining=True)
        with home_of(Scripted(silent), pool) as home:
            with pytest.raises(DeadlineExceeded):
                home.call(self.LEASE, 20.0)
            with pytest.raises(NodeUnavailable, match="left alone"):
                home.call(self.LEASE, 20.0)

    def test_it_is_asked_at_once_and_then_ever_less_often(self) -> None:
        def never(request: Any, timeout_s: float) -> Any:
            raise DeadlineExceeded("no answer")

        rests: list[float] = []
        link = Scripted(*[never] * 8, flags)
        home = Home(link, lambda: 1, Pool(1, 2))  # type: ignore[arg-type]
        wait = home._closing.wait

        def noting(timeout: float | None = None) -> bool:
            assert timeout is not None
            rests.append(timeout)
            return wait(0.0)

        home._closing.wait = noting  # type: ignore[method-assign]
        with pytest.raises(DeadlineExceeded):
            home.call(self.LEASE, 20.0)
        wait_until(lambda: home._listener is None, "it has answered")
        home.close()
        assert [round(rest, 3) for rest in rests] == [
            0.5,
            1.0,
            2.0,
            4.0,
            8.0,
            10.0,
            10.0,
        ]


class TestOnlyHolder:
    """Blocks that only a silent home has."""

    @pytest.fixture
    def silent_home(self, cluster: Cluster) -> tuple[Client, Prefix, Scripted]:
        home = cluster.start("home", 64, schema=SCHEMA)
        cluster.start("far", 64, schema=SCHEMA)
        prefix = home.put(fresh_prefix(2))
        cluster.settle()
        client = cluster.open(home)
        link = Scripted(silent)
        link.close = state_of(client)._link.close  # type: ignore[method-assign]
        state_of(client)._link = link
        return client, prefix, link

    @pytest.mark.slow
    @pytest.mark.parametrize("into", [False, True], ids=["view", "into"])
    def test_who_finds_it_silent_waits_at_its_port(
        self, silent_home: tuple[Client, Prefix, Scripted], into: bool
    ) -> None:
        client, prefix, _ = silent_home
        target = bytearray(2 * SCHEMA.block_bytes) if into else None
        with client.get(prefix, into=target, timeout_s=LONG_S) as blocks:
            assert blocks.complete, blocks.reason
            assert_right(blocks, prefix)

    def test_later_ones_are_told_at_once(
        self, silent_home: tuple[Client, Prefix, Scripted]
    ) -> None:
        client, prefix, _ = silent_home
        assert client.match(prefix).blocks == 0, "nobody else has it"
        assert state_of(client).away
        with client.get(prefix, timeout_s=LONG_S) as blocks:
            assert len(blocks) == 0
            assert blocks.reason == "lost"

    def test_pins_of_it_are_not_counted_as_none(
        self, silent_home: tuple[Client, Prefix, Scripted]
    ) -> None:
        client, prefix, _ = silent_home
        assert client.pin(prefix, ttl_s=0.1) == 2  # by its port, which answers here

    @pytest.mark.slow
    def test_blocks_before_and_behind_are_read_once(
        self, cluster: Cluster, silent_home: tuple[Client, Prefix, Scripted]
    ) -> None:
        client, prefix, _ = silent_home
        far = cluster.members["far"]
        far.put(prefix[:1])
        cluster.settle()
        with client.get(prefix, timeout_s=LONG_S) as blocks:
            assert blocks.complete, blocks.reason
            assert_right(blocks, prefix)
        assert far.counters()["dram_hits"] == 1


@pytest.mark.slow
def test_slots_that_are_asked_of_home_by_number_are_there_or_nowhere(cluster: Cluster) -> None:
    home = cluster.start("home", 64, schema=SCHEMA)
    cluster.start("far", 64, schema=SCHEMA)
    client = cluster.open(home)
    link = Scripted(silent)
    link.close = state_of(client)._link.close  # type: ignore[method-assign]
    state_of(client)._link = link
    with pytest.raises((DeadlineExceeded, NodeUnavailable)):
        client.reserve(fresh_prefix(1), node=home.number, timeout_s=0.3)
