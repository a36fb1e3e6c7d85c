"""A home node that hangs: its clients go on with other nodes, and come back when it does.

The home of these tests is a real process, stopped by SIGSTOP; "far" is a node of this process. Only
"far" is in the directory, so whatever is found while home is stopped was found there.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from typing import TYPE_CHECKING, Any

import pytest
from kvsupport import (
    DRAM_BLOCKS,
    EXTENT,
    SCHEMA,
    Background,
    Daemon,
    assert_right,
    fresh_prefix,
    held_bytes,
    is_quiet,
    payloads_of,
    wait_until,
    within,
)

from tiffin.kvstore import Client, KVSchema
from tiffin.kvstore.credentials import Credentials
from tiffin.kvstore.directory import EmbeddedDirectory
from tiffin.kvstore.errors import DeadlineExceeded, NodeUnavailable, StaleLease
from tiffin.kvstore.link import GRACE_S, Answer, SocketLink
from tiffin.kvstore.node import messages
from tiffin.kvstore.node.records import Reason
from tiffin.kvstore.pool.aio import AsyncPoolClient
from tiffin.kvstore.pool.client import PoolClient
from tiffin.kvstore.pool.engine import Engine, PoolOptions
from tiffin.kvstore.pool.home import SLICE_MAX_S, Home

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from poolsupport import Cluster, Member

    from tiffin.kvstore import Prefix

# Of two ranks' blocks.
SHARDED = KVSchema.gqa(
    model="two", layers=2, kv_heads=2, head_dim=8, dtype="bfloat16", block_tokens=16, shards=2
)
# Nobody waits so long but who waits for home: it is a hang if a call does.
LONG_S = 30.0


@pytest.fixture(scope="module")
def daemon(commands_folder: Path) -> Iterator[Daemon]:
    daemon = Daemon(commands_folder, dram=4 * DRAM_BLOCKS * EXTENT, options=["--no-prefault"])
    yield daemon
    daemon.close()


@pytest.fixture
def far(cluster: Cluster) -> Member:
    return cluster.start("far", 64, schema=SCHEMA)


@pytest.fixture
def client(cluster: Cluster, daemon: Daemon) -> Iterator[PoolClient]:
    """Of a pool of the daemon, its home, and whatever nodes the cluster has."""
    members = EmbeddedDirectory.named(f"default:{cluster.name}")
    engine = Engine(members, Credentials(), "client", PoolOptions())
    with PoolClient(engine, "always", home=SocketLink(daemon.socket, "client")) as client:
        yield client
    wait_until(lambda: is_quiet(numbers(daemon)), "home comes to rest")


def numbers(daemon: Daemon) -> dict[str, Any]:
    """What `tiffin status` shows of home."""
    with Client.open(daemon.url) as client:
        return client.statistics()


def at_home(daemon: Daemon, prefix: Prefix) -> int:
    """How many leading blocks home has, as it says itself."""
    with Client.open(daemon.url) as client:
        return client.match(prefix).blocks


def on_both(cluster: Cluster, daemon: Daemon, far: Member, blocks: int = 3) -> Prefix:
    prefix = far.put(fresh_prefix(blocks))
    with Client.open(daemon.url) as client:
        assert client.put(prefix, payloads_of(prefix)).complete
    cluster.settle()
    return prefix


def state_of(client: PoolClient) -> Home:
    assert client._home is not None
    return client._home


def is_back(client: PoolClient) -> None:
    wait_until(lambda: not state_of(client).away, "home answers again", 20.0)


class TestStopped:
    @pytest.mark.parametrize("into", [False, True], ids=["view", "into"])
    def test_blocks_are_read_elsewhere(
        self, cluster: Cluster, daemon: Daemon, far: Member, client: PoolClient, into: bool
    ) -> None:
        prefix = on_both(cluster, daemon, far)
        with daemon.stopped(), within(2.0, "two gets"):
            for _ in range(2):
                target = bytearray(3 * SCHEMA.block_bytes) if into else None
                with client.get(prefix, into=target, timeout_s=LONG_S) as blocks:
                    assert blocks.complete, blocks.reason
                    assert_right(blocks, prefix)
        assert far.counters()["dram_hits"] == 6
        is_back(client)
        with client.get(prefix) as blocks:
            assert_right(blocks, prefix)
        assert far.counters()["dram_hits"] == 6, "home is home again"

    def test_it_is_not_asked_again_before_it_has_answered(
        self,
        cluster: Cluster,
        daemon: Daemon,
        far: Member,
        client: PoolClient,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        prefix = on_both(cluster, daemon, far)
        asked: list[messages.Request] = []
        call = state_of(client)._link.call

        def noting(request: messages.Request, timeout_s: float) -> Answer:
            asked.append(request)
            return call(request, timeout_s)

        monkeypatch.setattr(state_of(client)._link, "call", noting)
        with daemon.stopped():
            for _ in range(20):
                client.get(prefix, timeout_s=LONG_S).release()
                client.match(prefix, timeout_s=LONG_S)
            leases = [r for r in asked if isinstance(r, messages.Lease)]
            assert len(leases) == 1
            questions = [r for r in asked if isinstance(r, messages.Match)]
            assert all(question.keys == b"" for question in questions), "only by who listens"
        is_back(client)

    def test_the_directory_tells_what_others_have(
        self, cluster: Cluster, daemon: Daemon, far: Member, client: PoolClient
    ) -> None:
        prefix = on_both(cluster, daemon, far)
        with daemon.stopped(), within(2.0, "looking"):
            assert client.match(prefix, timeout_s=LONG_S).blocks == 3
            assert client.exists(prefix, timeout_s=LONG_S) == [True] * 3
            assert client.pin(prefix, ttl_s=0.1, timeout_s=LONG_S) == 3
        is_back(client)

    def test_puts_are_placed_elsewhere(
        self, cluster: Cluster, daemon: Daemon, far: Member, client: PoolClient
    ) -> None:
        first, second, third = (fresh_prefix(2) for _ in range(3))
        with daemon.stopped(), within(2.0, "two puts"):
            for prefix in (first, second):
                assert client.put(prefix, payloads_of(prefix), timeout_s=LONG_S).complete
                assert far.has(prefix) == [True, True]
        is_back(client)
        assert client.put(third, payloads_of(third)).complete
        assert far.has(third) == [False, False]
        assert at_home(daemon, third) == 2

    def test_slots_are_of_this_process(
        self, cluster: Cluster, daemon: Daemon, far: Member, client: PoolClient
    ) -> None:
        prefix = fresh_prefix(2)
        with daemon.stopped(), within(2.0, "writing in place"):
            with client.reserve(prefix, timeout_s=LONG_S) as slots:
                for slot, payload in zip(slots, payloads_of(prefix), strict=True):
                    slot.view[:] = payload
            assert slots.stored == (0, 1)
            assert far.has(prefix) == [True, True]
        is_back(client)

    def test_a_stream_follows_another_node(
        self, cluster: Cluster, daemon: Daemon, far: Member, client: PoolClient
    ) -> None:
        prefix = on_both(cluster, daemon, far)
        stream = client.stream(prefix, timeout_s=LONG_S)
        with daemon.stopped(), within(2.0, "a stream"), stream:
            assert stream.complete
            assert sum(1 for _ in stream) == len(SCHEMA.layers)
        is_back(client)

    def test_the_asyncio_client_goes_on_as_well(
        self, cluster: Cluster, daemon: Daemon, far: Member, client: PoolClient
    ) -> None:
        prefix, new = on_both(cluster, daemon, far), fresh_prefix(1)

        async def main() -> None:
            many = AsyncPoolClient(client)
            with daemon.stopped(), within(2.0, "gets side by side"):

                async def get() -> None:
                    async with many.get(prefix, timeout_s=LONG_S) as blocks:
                        assert blocks.complete, blocks.reason
                        assert_right(blocks, prefix)

                await asyncio.gather(*(get() for _ in range(8)))
                assert (await many.put(new, payloads_of(new), timeout_s=LONG_S)).complete
            await asyncio.to_thread(is_back, client)
            await many.close()

        asyncio.run(main())
        assert far.has(new) == [True]

    def test_what_it_grants_too_late_is_given_back(
        self, cluster: Cluster, daemon: Daemon, far: Member, client: PoolClient
    ) -> None:
        """Though nobody uses the client any more: who listens takes the answers."""
        prefix, new = on_both(cluster, daemon, far), fresh_prefix(2)
        held = client.get(prefix[:1])
        with daemon.stopped():
            threads = [
                Background(lambda: client.get(prefix, timeout_s=LONG_S).release()),
                Background(lambda: client.put(new, payloads_of(new), timeout_s=LONG_S)),
                Background(lambda: client.reserve(new[:1], timeout_s=LONG_S).abort()),
            ]
            for thread in threads:
                thread.result()
        wait_until(lambda: held_bytes(numbers(daemon)) == EXTENT, "only the view is held", 20.0)
        assert_right(held, prefix[:1])
        held.release()
        wait_until(lambda: is_quiet(numbers(daemon)), "nothing is held")
        is_back(client)

    def test_a_client_can_be_closed_meanwhile(
        self, cluster: Cluster, daemon: Daemon, far: Member, client: PoolClient
    ) -> None:
        prefix = on_both(cluster, daemon, far)
        with daemon.stopped():
            client.get(prefix, timeout_s=LONG_S).release()
            assert state_of(client).away
            with within(2.0, "closing"):
                client.close()
        wait_until(lambda: is_quiet(numbers(daemon)), "home has said goodbye, too")

    def test_without_others_it_is_waited_for(self, daemon: Daemon, client: PoolClient) -> None:
        """As it was before: nobody else could help, and a home that was late is no miss."""
        prefix = fresh_prefix(2)
        assert client.put(prefix, payloads_of(prefix)).complete
        with daemon.stopped():
            get = Background(lambda: client.get(prefix, timeout_s=LONG_S))
            wait_until(lambda: state_of(client).away, "it is silent")
        with get.result() as blocks:
            assert blocks.complete, blocks.reason
            assert_right(blocks, prefix)

    def test_without_others_a_get_ends_in_time_and_says_why(
        self, daemon: Daemon, client: PoolClient
    ) -> None:
        prefix = fresh_prefix(1)
        with daemon.stopped(), within(0.5, "a get"):
            blocks = client.get(prefix, timeout_s=0.5)
            assert len(blocks) == 0
            assert blocks.reason is not None
        is_back(client)

    def test_slots_at_home_are_committed_when_it_wakes(
        self, cluster: Cluster, daemon: Daemon, far: Member, client: PoolClient
    ) -> None:
        prefix = fresh_prefix(2)
        slots = client.reserve(prefix)
        for slot, payload in zip(slots, payloads_of(prefix), strict=True):
            slot.view[:] = payload
        with daemon.stopped():
            commit = Background(slots.commit)
            # Another thread sees that a commit is overdue, and takes its blocks elsewhere.
            with within(2.0, "a put beside it"):
                other = fresh_prefix(1)
                assert client.put(other, payloads_of(other), timeout_s=LONG_S).complete
                assert far.has(other) == [True]
        commit.result()
        assert slots.stored == (0, 1)
        assert at_home(daemon, prefix) == 2
        is_back(client)


class Scripted:
    """A `Link` whose answers a test writes down: each a function of the request and its time."""

    def __init__(self, *answers: Callable[[Any, float], Any]) -> None:
        self._answers = list(answers)
        self.asked: list[tuple[Any, float]] = []
        self.posted: list[messages.Request] = []
        self.gate: Any = None
        self.memory: Any = None

    def call(self, request: messages.Request, timeout_s: float) -> Answer:
        self.asked.append((request, timeout_s))
        answer = self._answers.pop(0) if len(self._answers) > 1 else self._answers[0]
        return Answer(answer(request, timeout_s), self.memory)

    def post(self, request: messages.Request) -> None:
        self.posted.append(request)

    def close(self) -> None:
        pass


class Pool:
    """As much of an `Engine` as a home needs; `nodes` are those of the directory."""

    def __init__(self, *nodes: int, hedge_s: float = 0.1) -> None:
        self.options = PoolOptions(hedge_s=hedge_s)
        self._nodes = dict.fromkeys(nodes)

    def nodes(self) -> dict[int, Any]:
        return self._nodes


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


@pytest.mark.usefixtures("nothing_left")
class TestPatience:
    """What is a wait at home, and what is silence."""

    LEASE = messages.Lease(0, b"k" * 16, 0.0)
    RESERVE = messages.Reserve(0, b"k" * 16, b"p" * 16, 0, 4096, 0.0)

    def test_who_waits_for_nvme_waits_in_slices(self) -> None:
        link = Scripted(leased(Reason.DEADLINE), leased(Reason.DEADLINE, 7), leased(Reason.NONE, 8))
        with home_of(link) as home:
            assert home.call(self.LEASE, 20.0).reply.lease == 8
            assert not home.away
        slices = [request.timeout_s for request, _ in link.asked]
        assert slices == [0.05, 0.1, 0.2]
        # What a slice got is given back before the next.
        assert link.posted == [messages.Release(0, 7)]

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
        with home_of(link) as home:
            home.call(self.RESERVE, 20.0)
        assert len(link.asked) == 1

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
            home.call(messages.Commit(0, 1), 5.0)
        assert link.asked[0][1] == pytest.approx(5.0, abs=0.5)

    def test_what_is_refused_at_once_is_asked_again_at_once(self) -> None:
        link = Scripted(refusing, flags)
        with home_of(link) as home:
            with pytest.raises(NodeUnavailable):
                home.call(self.LEASE, 20.0)
            assert (home.lost, home.away) == (True, False)
            home.call(messages.Match(0, b""), 20.0)
            assert not home.lost

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

    def test_a_turn_is_waited_for_while_home_is_well(self) -> None:
        """One thread waits for room; that is no reason for another to give up."""
        link = Scripted(no_room, no_room, no_room, leased(Reason.NONE, 3), flags)
        with home_of(link) as home:
            writer = Background(lambda: home.call(self.RESERVE, 20.0))
            wait_until(lambda: link.asked, "it waits")
            home.call(messages.Match(0, b""), 20.0)
            writer.result()
            assert not home.away

    def test_a_turn_is_not_waited_for_behind_a_silent_one(self) -> None:
        go = threading.Event()

        def held(request: Any, timeout_s: float) -> Any:
            assert go.wait(30)
            return messages.Flags(0, b"\1")

        with home_of(Scripted(held, flags)) as home:
            commit = Background(lambda: home.patient.call(messages.Commit(0, 1), 20.0))
            wait_until(home._turn.locked, "it waits for its commit")
            with pytest.raises(NodeUnavailable, match="left alone"):
                home.call(self.LEASE, 20.0)
            assert home.away
            go.set()
            commit.result()
            assert not home.away

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
        assert rests == [0.5, 1.0, 2.0, 4.0, 8.0, 10.0, 10.0, SLICE_MAX_S]

    def test_a_forked_child_holds_nothing_of_its_parent(self) -> None:
        home = Home(Scripted(silent), lambda: 1, Pool(1, 2))  # type: ignore[arg-type]
        home._turn.acquire()  # by a thread that the child has not
        home.forget()
        assert not home._turn.locked()
        assert not home.away
        home.close()


class TestOnlyHolder:
    """Blocks that nobody but a silent home has."""

    @pytest.fixture
    def silent_home(self, cluster: Cluster) -> tuple[PoolClient, Prefix, Scripted]:
        home = cluster.start("home", 64, schema=SCHEMA)
        cluster.start("far", 64, schema=SCHEMA)
        prefix = home.put(fresh_prefix(2))
        cluster.settle()
        client = cluster.open(home)
        link = Scripted(silent)
        link.close = state_of(client)._link.close  # type: ignore[method-assign]
        state_of(client)._link = link
        return client, prefix, link

    @pytest.mark.parametrize("into", [False, True], ids=["view", "into"])
    def test_who_finds_it_silent_waits_at_its_port(
        self, silent_home: tuple[PoolClient, Prefix, Scripted], into: bool
    ) -> None:
        client, prefix, _ = silent_home
        target = bytearray(2 * SCHEMA.block_bytes) if into else None
        with client.get(prefix, into=target, timeout_s=LONG_S) as blocks:
            assert blocks.complete, blocks.reason
            assert_right(blocks, prefix)

    def test_later_ones_are_told_at_once(
        self, silent_home: tuple[PoolClient, Prefix, Scripted]
    ) -> None:
        client, prefix, _ = silent_home
        assert client.match(prefix).blocks == 0, "nobody else has it"
        assert state_of(client).away
        with client.get(prefix, timeout_s=LONG_S) as blocks:
            assert len(blocks) == 0
            assert blocks.reason == "lost"

    def test_pins_of_it_are_not_counted_as_none(
        self, silent_home: tuple[PoolClient, Prefix, Scripted]
    ) -> None:
        client, prefix, _ = silent_home
        assert client.pin(prefix, ttl_s=0.1) == 2  # by its port, which answers here

    def test_blocks_before_and_behind_are_read_once(
        self, cluster: Cluster, silent_home: tuple[PoolClient, Prefix, Scripted]
    ) -> None:
        client, prefix, _ = silent_home
        far = cluster.members["far"]
        far.put(prefix[:1])
        cluster.settle()
        with client.get(prefix, timeout_s=LONG_S) as blocks:
            assert blocks.complete, blocks.reason
            assert_right(blocks, prefix)
        assert far.counters()["dram_hits"] == 1


def test_a_rank_writes_its_slice_at_home_or_nowhere(
    cluster: Cluster, daemon: Daemon, far: Member, client: PoolClient
) -> None:
    """Other ranks do not know where else: home is waited for."""
    prefix = fresh_prefix(1, SHARDED)
    with daemon.stopped(), pytest.raises((DeadlineExceeded, NodeUnavailable)):
        client.put(prefix, payloads_of(prefix), shard=(0, 2), timeout_s=0.5)
    assert far.has(prefix) == [False]
    is_back(client)
