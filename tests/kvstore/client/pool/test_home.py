"""A home node that hangs: its clients go on with other nodes, and use home again when it answers.

The home of these tests is a real process, stopped by SIGSTOP; "far" is a node of this process. Only
"far" is in the directory, so blocks that are found while home is stopped are those of "far".
"""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Any

import numpy as np
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
from poolsupport import state_of

from tiffin.kvstore import AsyncClient, Client, KVSchema
from tiffin.kvstore.client.connection.node_link import SocketLink
from tiffin.kvstore.client.pool.many_nodes import ManyNodes
from tiffin.kvstore.client.pool.peers import PoolOptions
from tiffin.kvstore.client.pool.verb_driver import VerbDriver
from tiffin.kvstore.credentials import Credentials
from tiffin.kvstore.directory import EmbeddedDirectory
from tiffin.kvstore.errors import DeadlineExceeded, InvalidInput, NodeUnavailable
from tiffin.kvstore.node.core import messages

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from poolsupport import Cluster, Member

    from tiffin.kvstore import Prefix
    from tiffin.kvstore.client.connection.connection import NodeAnswer

# The schema of blocks of two ranks.
SHARDED = KVSchema.gqa(
    model="two", layers=2, kv_heads=2, head_dim=8, dtype="bfloat16", block_tokens=16, shards=2
)
# A call that takes so long has waited for the stopped home: a hang.
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
def client(cluster: Cluster, daemon: Daemon) -> Iterator[Client]:
    """A client of a pool of the daemon, which is its home, and the cluster's nodes."""
    members = EmbeddedDirectory.named(f"default:{cluster.name}")
    driver = VerbDriver(members, Credentials(), "client", PoolOptions())
    nodes = ManyNodes(driver, home=SocketLink(daemon.socket, "client"))
    with Client(nodes, "always") as client:
        yield client
    wait_until(lambda: is_quiet(numbers(daemon)), "home comes to rest")


def numbers(daemon: Daemon) -> dict[str, Any]:
    """Home's statistics, as in `tiffin status`."""
    with Client.open(daemon.url) as client:
        return client.statistics()


def at_home(daemon: Daemon, prefix: Prefix) -> int:
    """How many leading blocks home has, by its own answer."""
    with Client.open(daemon.url) as client:
        return client.match(prefix).blocks


def on_both(cluster: Cluster, daemon: Daemon, far: Member, blocks: int = 3) -> Prefix:
    prefix = far.put(fresh_prefix(blocks))
    with Client.open(daemon.url) as client:
        assert client.put(prefix, payloads_of(prefix)).complete
    cluster.settle()
    return prefix


def is_back(client: Client) -> None:
    wait_until(lambda: not state_of(client).away, "home answers again", 20.0)


# On a busy machine home may be delayed at any time, without SIGSTOP, for longer than its clients
# wait if there is another node. Tests that need home to do something repeat it until home does.


def lies_at_home(client: Client, view: Any) -> bool:
    return any(np.shares_memory(view, memory) for memory in state_of(client).mapping.all)


def held_at_home(client: Client, prefix: Prefix) -> Any:
    """Views of the prefix's blocks in home's memory."""

    def held() -> Any:
        is_back(client)
        blocks = client.get(prefix)
        if blocks.complete and lies_at_home(client, blocks[0].bytes):
            return blocks
        blocks.release()
        return None

    return wait_until(held, "home serves it")


def reserved_at_home(client: Client, prefix: Prefix) -> Any:
    """Slots for the prefix's blocks in home's memory."""

    def reserved() -> Any:
        is_back(client)
        slots = client.reserve(prefix)
        if len(slots) == len(prefix) and lies_at_home(client, slots[0].view):
            return slots
        slots.abort()
        return None

    return wait_until(reserved, "home gives slots")


def put_is_stored(daemon: Daemon, client: Client, seconds: float) -> None:
    """A put is stored at a home that stays stopped for so long after the client found it silent:
    the client asks again."""
    prefix = fresh_prefix(2)
    with daemon.stopped():
        put = Background(lambda: client.put(prefix, payloads_of(prefix), timeout_s=LONG_S))
        wait_until(lambda: state_of(client).away, "it is silent")
        time.sleep(seconds)
    assert put.result().stored == (0, 1)
    assert at_home(daemon, prefix) == 2


class TestStopped:
    @pytest.mark.slow
    @pytest.mark.parametrize("into", [False, True], ids=["view", "into"])
    def test_blocks_are_read_elsewhere(
        self, cluster: Cluster, daemon: Daemon, far: Member, client: Client, into: bool
    ) -> None:
        prefix = on_both(cluster, daemon, far)
        with daemon.stopped(), within(2.0, "two gets"):
            for _ in range(2):
                target = bytearray(3 * SCHEMA.block_bytes) if into else None
                with client.get(prefix, into=target, timeout_s=LONG_S) as blocks:
                    assert blocks.complete, blocks.reason
                    assert_right(blocks, prefix)
        assert far.counters()["dram_hits"] == 6
        with held_at_home(client, prefix) as blocks:  # home is home again
            assert_right(blocks, prefix)

    def test_it_is_not_asked_again_before_it_has_answered(
        self,
        cluster: Cluster,
        daemon: Daemon,
        far: Member,
        client: Client,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        prefix = on_both(cluster, daemon, far)
        asked: list[messages.Request] = []
        call = state_of(client)._link.call

        def noting(request: messages.Request, timeout_s: float) -> NodeAnswer:
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
        self, cluster: Cluster, daemon: Daemon, far: Member, client: Client
    ) -> None:
        prefix = on_both(cluster, daemon, far)
        with daemon.stopped(), within(2.0, "looking"):
            assert client.match(prefix, timeout_s=LONG_S).blocks == 3
            assert client.exists(prefix, timeout_s=LONG_S) == [True] * 3
            assert client.pin(prefix, ttl_s=0.1, timeout_s=LONG_S) == 3
        is_back(client)

    def test_puts_are_placed_elsewhere(
        self, cluster: Cluster, daemon: Daemon, far: Member, client: Client
    ) -> None:
        first, second = (fresh_prefix(2) for _ in range(2))
        with daemon.stopped(), within(2.0, "two puts"):
            for prefix in (first, second):
                assert client.put(prefix, payloads_of(prefix), timeout_s=LONG_S).complete
                assert far.has(prefix) == [True, True]

        def put_at_home() -> bool:
            is_back(client)
            third = fresh_prefix(2)
            assert client.put(third, payloads_of(third)).complete
            return far.has(third) == [False, False] and at_home(daemon, third) == 2

        wait_until(put_at_home, "puts are placed at home again")

    def test_slots_are_of_this_process(
        self, cluster: Cluster, daemon: Daemon, far: Member, client: Client
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
        self, cluster: Cluster, daemon: Daemon, far: Member, client: Client
    ) -> None:
        prefix = on_both(cluster, daemon, far)
        stream = client.stream(prefix, timeout_s=LONG_S)
        with daemon.stopped(), within(2.0, "a stream"), stream:
            assert stream.complete
            assert sum(1 for _ in stream) == len(SCHEMA.layers)
        is_back(client)

    def test_the_asyncio_client_goes_on_as_well(
        self, cluster: Cluster, daemon: Daemon, far: Member, client: Client
    ) -> None:
        prefix, new = on_both(cluster, daemon, far), fresh_prefix(1)

        async def main() -> None:
            many = AsyncClient(client)
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
        self, cluster: Cluster, daemon: Daemon, far: Member, client: Client
    ) -> None:
        """Even if the client is not used any more: its listening thread takes the answers."""
        prefix, new = on_both(cluster, daemon, far), fresh_prefix(2)
        held = held_at_home(client, prefix[:1])
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

    @pytest.mark.slow
    def test_a_client_can_be_closed_meanwhile(
        self, cluster: Cluster, daemon: Daemon, far: Member, client: Client
    ) -> None:
        prefix = on_both(cluster, daemon, far)
        with daemon.stopped():
            client.get(prefix, timeout_s=LONG_S).release()
            assert state_of(client).away
            with within(2.0, "closing"):
                client.close()
        wait_until(lambda: is_quiet(numbers(daemon)), "home has said goodbye, too")

    def test_without_others_it_is_waited_for(self, daemon: Daemon, client: Client) -> None:
        """Without another node a get waits for home: a late home is not a miss."""
        prefix = fresh_prefix(2)
        assert client.put(prefix, payloads_of(prefix)).complete
        with daemon.stopped():
            get = Background(lambda: client.get(prefix, timeout_s=LONG_S))
            wait_until(lambda: state_of(client).away, "it is silent")
        with get.result() as blocks:
            assert blocks.complete, blocks.reason
            assert_right(blocks, prefix)

    @pytest.mark.slow
    def test_without_others_a_put_is_not_in_its_own_way(
        self, daemon: Daemon, client: Client
    ) -> None:
        """Room that was granted too late is given back, and asked for again."""
        put_is_stored(daemon, client, 1.0)

    @pytest.mark.slow
    def test_where_the_others_are_gone_a_put_is_not_in_its_own_way(
        self, daemon: Daemon, far: Member, client: Client
    ) -> None:
        """The client asks home again for the room that home first granted too late."""
        far.hang_up()
        put_is_stored(daemon, client, 0.6)

    @pytest.mark.slow
    def test_without_others_a_get_ends_in_time_and_says_why(
        self, daemon: Daemon, client: Client
    ) -> None:
        prefix = fresh_prefix(1)
        with daemon.stopped(), within(0.5, "a get"):
            blocks = client.get(prefix, timeout_s=0.5)
            assert len(blocks) == 0
            assert blocks.reason is not None
        is_back(client)

    @pytest.mark.slow
    def test_without_others_a_reservation_ends_in_time_and_says_why(
        self, daemon: Daemon, client: Client
    ) -> None:
        with daemon.stopped(), pytest.raises((DeadlineExceeded, NodeUnavailable)):
            client.reserve(fresh_prefix(1), timeout_s=0.5)
        is_back(client)

    def test_slots_at_home_are_committed_when_it_wakes(
        self, cluster: Cluster, daemon: Daemon, far: Member, client: Client
    ) -> None:
        prefix = fresh_prefix(2)
        slots = reserved_at_home(client, prefix)
        for slot, payload in zip(slots, payloads_of(prefix), strict=True):
            slot.view[:] = payload
        with daemon.stopped():
            commit = Background(slots.commit)
            # Another thread notices the overdue commit, and puts its blocks on another node.
            with within(2.0, "a put beside it"):
                other = fresh_prefix(1)
                assert client.put(other, payloads_of(other), timeout_s=LONG_S).complete
                assert far.has(other) == [True]
        commit.result()
        assert slots.stored == (0, 1)
        assert at_home(daemon, prefix) == 2
        is_back(client)


@pytest.mark.slow
def test_a_rank_writes_its_slice_at_home_or_nowhere(
    cluster: Cluster, daemon: Daemon, far: Member, client: Client
) -> None:
    """The other ranks would not find it on another node, so home is waited for."""
    prefix = fresh_prefix(1, SHARDED)
    with daemon.stopped(), pytest.raises((DeadlineExceeded, NodeUnavailable)):
        client.put(prefix, payloads_of(prefix), shard=(0, 2), timeout_s=0.5)
    assert far.has(prefix) == [False]
    is_back(client)


@pytest.mark.slow
def test_a_rank_reserves_at_home_or_nowhere(
    cluster: Cluster, daemon: Daemon, far: Member, client: Client
) -> None:
    prefix = fresh_prefix(1, SHARDED)
    with daemon.stopped(), pytest.raises((DeadlineExceeded, NodeUnavailable)):
        client.reserve(prefix, shard=(0, 2), timeout_s=0.5)
    is_back(client)
    client.reserve(prefix, shard=(0, 2)).abort()


# -- for other processes ---------------------------------------------------------------------------


def test_blocks_at_home_have_places_and_blocks_of_others_have_none(
    client: Client, daemon: Daemon, cluster: Cluster, far: Member
) -> None:
    both, elsewhere = on_both(cluster, daemon, far), far.put(fresh_prefix(3))
    cluster.settle()
    region = client.region
    assert region is not None

    def reads_in_place() -> bool:
        with client.get(both) as blocks:
            if not lies_at_home(client, blocks[0].memory):
                return False
            views = region.views(blocks.places())
            assert [bytes(one) for one in views] == [bytes(one) for one in payloads_of(both)]
            return True

    wait_until(reads_in_place, "home serves its blocks")
    with client.get(elsewhere) as copies, pytest.raises(InvalidInput, match="copies"):
        copies.places()


@pytest.mark.slow
def test_a_pool_without_a_home_has_no_region(cluster: Cluster) -> None:
    assert cluster.open().region is None
