"""Layers published by a writer without a node on its host: what is sent when, which readers may
read it, and what remains when the node, the reservation or the writer is lost."""

from __future__ import annotations

import asyncio
import contextlib
import subprocess
import sys
import threading
import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import kvsupport
import pytest
from kvsupport import (
    Background,
    assert_right,
    is_quiet,
    payloads_of,
    skip_time,
    wait_until,
)
from poolsupport import LARGE, Cluster, holders
from streamsupport import (
    LAYER_BYTES,
    LAYERS,
    SMALL_BYTES,
    SPLIT,
    Counted,
    check,
    prompt,
    publish,
)
from streamworker import STREAMED, fill, is_right, prefix_of

from tiffin.kvstore import AsyncClient, Client
from tiffin.kvstore.client.pool import staged_write
from tiffin.kvstore.client.pool.remote.block_write import RemoteReservation
from tiffin.kvstore.errors import (
    DeadlineExceeded,
    InvalidInput,
    NodeUnavailable,
    NoRoom,
    SchemaError,
    StaleLease,
)

if TYPE_CHECKING:
    from poolsupport import Member

    from tiffin.kvstore import Prefix

# -- writers without a node on their host ----------------------------------------------------------


class TestPublishing:
    @pytest.mark.parametrize("named", [True, False])
    def test_a_reader_elsewhere_has_a_layer_before_the_next_is_written(
        self, cluster: Cluster, named: bool
    ) -> None:
        one, two = cluster.start("one"), cluster.start("two")
        writer, reader, prefix = cluster.open(), cluster.open(home=two), prompt(3)
        slots = writer.reserve(prefix, node=one.number if named else None)
        publish(slots, 0)
        assert slots.node == one.number if named else slots.node in (one.number, two.number)
        written = 1
        with reader.stream(prefix, node=slots.node, timeout_s=30) as stream:
            assert stream.complete
            for layer in stream:
                assert layer.index == written - 1, "it came before the next was written"
                assert is_right(layer, prefix)
                assert cluster.open().match(prefix).blocks == 0, "nothing is visible yet"
                if written < LAYERS:
                    publish(slots, written)
                    written += 1
                else:
                    slots.commit()
        assert slots.stored == (0, 1, 2)
        assert sum(map(len, holders(cluster, prefix))) == 3, "one copy, where it was published"
        check(cluster, prefix)

    def test_asyncio_writes_and_reads_alike(self, cluster: Cluster) -> None:
        one = cluster.start("one")
        prefix = prompt(2)

        async def run() -> None:
            async with AsyncClient(cluster.open()) as writer:
                reader = AsyncClient(cluster.open())
                async with reader, writer.reserve(prefix) as slots:
                    fill(slots, 0)
                    await slots.publish(0)
                    assert slots.node == one.number
                    read = 0
                    async with reader.stream(prefix, node=slots.node, timeout_s=30) as stream:
                        async for layer in stream:
                            assert (layer.index, is_right(layer, prefix)) == (read, True)
                            read += 1
                            if read < LAYERS:
                                fill(slots, read)
                                await slots.publish(read)
                            else:
                                await slots.commit()
                    assert read == LAYERS
                    assert slots.stored == (0, 1)

        asyncio.run(run())

    @pytest.mark.parametrize("published", [0, 1, LAYERS])
    def test_a_commit_sends_what_is_missing(self, cluster: Cluster, published: int) -> None:
        one = cluster.start("one", relayed=True)
        sent = Counted(one)
        writer, prefix = cluster.open(), prompt(2)
        slots = writer.reserve(prefix, node=one.number)
        publish(slots, *range(published))
        for layer in range(published, LAYERS):
            fill(slots, layer)
        before = sent("to")
        assert (before > 2 * published * LAYER_BYTES) or not published
        slots.commit()
        missing = 2 * (LAYERS - published) * LAYER_BYTES + 2 * LARGE.header_bytes
        assert missing <= sent("to") - before < missing + SMALL_BYTES
        assert slots.stored == (0, 1)
        check(cluster, prefix)

    def test_what_is_changed_after_it_was_published_is_not_sent(self, cluster: Cluster) -> None:
        """Earlier and later readers of a block get the bytes that were published."""
        one = cluster.start("one")
        writer, prefix = cluster.open(), prompt(1)
        slots = writer.reserve(prefix)
        publish(slots, *range(LAYERS))
        with cluster.open().stream(prefix, node=one.number, timeout_s=30) as stream:
            course = iter(stream)
            assert all(is_right(next(course), prefix) for _ in range(LAYERS))
            slots[0].view[:] = 7
            slots.commit()
            assert next(course, None) is None
        check(cluster, prefix)

    def test_skipped_slots_are_neither_published_nor_stored(self, cluster: Cluster) -> None:
        one = cluster.start("one")
        prefix = prompt(3)
        with cluster.open().reserve(prefix) as slots:
            slots[2].skip()
            publish(slots, *range(LAYERS))
            with cluster.open().stream(prefix[:2], node=one.number) as stream:
                assert is_right(next(iter(stream)), prefix)
            slots[1].skip()  # its reader keeps the layer that it has; the block is not stored
        assert slots.stored == (0,)
        assert one.has(prefix) == [True, False, False]

    def test_blocks_that_another_node_has_are_not_reserved(self, cluster: Cluster) -> None:
        one, two = cluster.start("one"), cluster.start("two")
        prefix = prompt(4)
        two.put(prefix[1:2])
        cluster.settle()
        slots = cluster.open().reserve(prefix)
        assert ([slot.index for slot in slots], slots.resident) == ([0, 2, 3], (1,))
        publish(slots, *range(LAYERS))
        slots.commit()
        assert slots.stored == (0, 2, 3)
        assert sum(map(len, holders(cluster, prefix))) == 4
        assert "two" in holders(cluster, prefix)[1]
        assert one.has(prefix)[1] is False

    def test_a_named_node_gets_what_it_lacks_wherever_else_it_is(self, cluster: Cluster) -> None:
        """As with a put there, a stream of that node has the whole prompt."""
        one, two = cluster.start("one"), cluster.start("two")
        prefix = prompt(4)
        two.put(prefix[:2])
        one.put(prefix[3:])
        cluster.settle()
        slots = cluster.open().reserve(prefix, node=one.number)
        assert ([slot.index for slot in slots], slots.resident) == ([0, 1, 2], (3,))
        publish(slots, 0)
        reserved = one.node.statistics()["tiers"]["dram"]["reserved_bytes"]
        assert reserved == 3 * LARGE.extent_bytes
        with cluster.open().stream(prefix, node=slots.node, timeout_s=30) as stream:
            assert stream.complete
            course = iter(stream)
            assert is_right(next(course), prefix)
            publish(slots, *range(1, LAYERS))
            slots.commit()
            assert [layer.index for layer in course] == [1, 2, 3]
        assert slots.stored == (0, 1, 2)
        assert one.has(prefix) == [True] * 4

    def test_ranks_agree_on_what_is_missing_whatever_each_knows(self, cluster: Cluster) -> None:
        """One rank has a home with the first block, which the other's directory does not list."""
        home, one = cluster.start("home", schema=SPLIT), cluster.start("one", schema=SPLIT)
        prefix = home.put(prompt(2, SPLIT))
        cluster.settle()
        members = cluster.flaky()
        away = cluster.open(members=members)
        assert away.nodes()
        members.away = True
        clients = cluster.open(home=home), away
        ranks = [c.reserve(prefix, shard=(r, 2), node=one.number) for r, c in enumerate(clients)]
        for slots in ranks:
            publish(slots, *range(LAYERS))
            slots.commit()
        assert (ranks[0].pending, ranks[1].stored) == ((0, 1), (0, 1))
        assert one.has(prefix) == [True, True]

    def test_a_named_node_that_is_lost_is_told_when_slots_are_reserved(
        self, cluster: Cluster
    ) -> None:
        one, two = cluster.start("one"), cluster.start("two")
        client = cluster.open()
        one.hang_up()
        with pytest.raises(NodeUnavailable):
            client.reserve(prompt(1), node=one.number)
        slots = client.reserve(prompt(1), node=two.number)
        publish(slots, 0)
        slots.abort()

    def test_what_follows_a_resident_block_is_published_beside_it(self, cluster: Cluster) -> None:
        """So that one stream has the whole prompt."""
        members = [cluster.start(name, blocks) for name, blocks in (("a", 64), ("b", 6), ("c", 64))]
        prefix = prompt(3)
        members[1].put(prefix[:1])
        cluster.settle()
        slots = cluster.open().reserve(prefix)
        publish(slots, *range(LAYERS))
        assert slots.node == members[1].number
        with cluster.open().stream(prefix, node=slots.node, timeout_s=30) as stream:
            assert stream.complete
            course = iter(stream)
            assert all(is_right(next(course), prefix) for _ in range(LAYERS))
            slots.commit()
            assert next(course, None) is None

    def test_what_somebody_else_wrote_meanwhile_is_left_to_them(self, cluster: Cluster) -> None:
        one = cluster.start("one")
        prefix = prompt(3)
        slots = cluster.open().reserve(prefix)
        one.put(prefix[:1])
        with Client.attach(one.node) as near:
            others = near.reserve(prefix[:2])
            publish(slots, *range(LAYERS))
            assert (slots.resident, slots.busy) == ((0,), (1,))
            slots.commit()
            assert slots.stored == (2,)
            others.abort()
        assert one.has(prefix) == [True, False, True]

    @pytest.mark.parametrize("how", ["resident", "busy"])
    def test_a_node_is_asked_once_who_has_what(self, cluster: Cluster, how: str) -> None:
        """Of blocks granted later, the earlier layers would never have been sent."""
        one = cluster.start("one")
        prefix = prompt(2)
        slots = cluster.open().reserve(prefix)
        with Client.attach(one.node) as near:
            if how == "resident":
                one.put(prefix)
                publish(slots, 0)
                near.remove(prefix)
            else:
                others = near.reserve(prefix)
                publish(slots, 0)
                others.abort()
        publish(slots, 1)
        assert getattr(slots, how) == (0, 1)
        assert is_quiet(one.node.statistics()), "nothing is reserved that lacks a layer"
        publish(slots, 2, 3)
        slots.commit()
        assert (slots.stored, slots.node) == ((), one.number)
        assert one.has(prefix) == [False, False]

    def test_ranks_publish_their_heads_from_different_places(self, cluster: Cluster) -> None:
        one = cluster.start("one", schema=SPLIT)
        prefix = prompt(2, SPLIT)
        ranks = [cluster.open().reserve(prefix, shard=(r, 2), node=one.number) for r in range(2)]
        publish(ranks[0], 0)
        reader = cluster.open()
        with reader.stream(prefix, node=one.number, timeout_s=30) as stream:
            course = iter(stream)
            for layer in range(LAYERS):
                found = Background(lambda: next(course))
                assert found._outcome is None, "half a layer was handed out"
                publish(ranks[1], layer)
                assert is_right(found.result(), prefix)
                if layer + 1 < LAYERS:
                    publish(ranks[0], layer + 1)
            ranks[0].commit()
            assert (ranks[0].stored, ranks[0].pending) == ((), (0, 1))
            ranks[1].commit()
            assert ranks[1].stored == (0, 1)
            assert next(course, None) is None

    def test_layers_that_cannot_be_published(self, cluster: Cluster) -> None:
        cluster.start("one")
        slots = cluster.open().reserve(prompt(1))
        with pytest.raises(SchemaError):
            slots.publish(LAYERS)
        publish(slots, 0)
        with pytest.raises(InvalidInput, match="published before"):
            slots.publish(0)
        publish(slots, 1)  # the reservation still stands
        slots.abort()
        with pytest.raises(StaleLease, match="committed or aborted"):
            slots.publish(2)

    def test_without_room_nothing_is_published_and_the_commit_may_still_find_some(
        self, cluster: Cluster, patient: None
    ) -> None:
        one = cluster.start("one", 2)
        with Client.attach(one.node) as near:
            held = near.reserve(prompt(2))
            prefix = prompt(1)
            slots = cluster.open().reserve(prefix)
            fill(slots, 0)
            with pytest.raises(NoRoom):
                slots.publish(0, timeout_s=0.1)
            held.abort()
        publish(slots, *range(LAYERS))
        slots.commit()
        assert one.has(prefix) == [True]


class TestLosingTheReservation:
    def test_an_abort_ends_the_streams_of_others(self, cluster: Cluster) -> None:
        one = cluster.start("one")
        writer, prefix = cluster.open(), prompt(2)
        slots = writer.reserve(prefix)
        publish(slots, 0, 1)
        with cluster.open().stream(prefix, node=one.number, timeout_s=30) as stream:
            course = iter(stream)
            assert all(is_right(next(course), prefix) for _ in range(2))
            waiting = Background(lambda: next(course))
            slots.abort()
            with pytest.raises(StaleLease, match="given up"):
                waiting.result()
        assert one.has(prefix) == [False, False]

    def test_a_client_that_closes_takes_its_reservation_with_it(self, cluster: Cluster) -> None:
        one = cluster.start("one")
        writer, prefix = cluster.open(), prompt(2)
        slots = writer.reserve(prefix)
        publish(slots, 0)
        with cluster.open().stream(prefix, node=one.number, timeout_s=30) as stream:
            course = iter(stream)
            assert is_right(next(course), prefix)
            writer.close()
            assert not slots.stored
            with pytest.raises(StaleLease, match="given up"):
                next(course)

    def test_a_reservation_that_expired_is_put_anew(
        self, cluster: Cluster, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        one = cluster.start("one")
        prefix = prompt(2)
        slots = cluster.open().reserve(prefix)
        publish(slots, 0)
        skip_time(monkeypatch, 3600.0)
        wait_until(lambda: one.counters()["expired"], "it expires")
        with pytest.raises(StaleLease):
            publish(slots, 1)
        with pytest.raises(StaleLease, match="was lost"):
            publish(slots, 2)
        for layer in range(LAYERS):
            fill(slots, layer)
        slots.commit()
        assert slots.stored == (0, 1)
        check(cluster, prefix)

    @pytest.mark.parametrize("when", ["publication", "commit"])
    def test_a_node_that_is_lost_in_the_middle_leaves_nothing_half_visible(
        self, cluster: Cluster, when: str
    ) -> None:
        """Half a layer arrives: no reader can read it, and other writers can take the blocks."""
        one, two = cluster.start("one", relayed=True), cluster.start("two")
        prefix = prompt(2)
        reader, writer = cluster.open(home=one), cluster.open()
        with two.node.held():  # it is drained when asked, so that the first choice is `one`
            two.node.draining = True
        wait_until(lambda: writer.nodes()[two.number].draining, "the directory is told")
        slots = writer.reserve(prefix)
        publish(slots, 0)
        assert slots.node == one.number
        two.node.draining = False
        with reader.stream(prefix, timeout_s=30) as stream:
            course = iter(stream)
            assert is_right(next(course), prefix)
            assert one.network is not None
            one.network.stall_after(LAYER_BYTES // 2, "to")
            for layer in range(1, LAYERS):
                fill(slots, layer)
            if when == "publication":
                broken = Background(lambda: slots.publish(1, timeout_s=20))
            else:
                wait_until(lambda: not writer.nodes()[two.number].draining, "it is told again")
                broken = Background(slots.commit)
            wait_until(lambda: not one.network._flowing.is_set(), "half of it has arrived")  # type: ignore[union-attr]
            waiting = Background(lambda: next(course))
            one.network.cut()
            one.network.resume()
            one.hang_up()
            if when == "publication":
                with pytest.raises(StaleLease, match="not published"):
                    broken.result()
            with pytest.raises(StaleLease, match="given up"):
                waiting.result()
        if when == "publication":
            wait_until(lambda: not writer.nodes()[two.number].draining, "it is told again")
            slots.commit()
        else:
            broken.result()
        assert slots.stored == (0, 1)
        assert holders(cluster, prefix) == [["two"]] * 2
        with writer.get(prefix) as blocks:
            assert blocks.complete
            assert_right(blocks, prefix)

    def test_a_rank_that_lost_its_reservation_does_not_begin_another(
        self, cluster: Cluster, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        one = cluster.start("one", schema=SPLIT)
        prefix = prompt(1, SPLIT)
        slots = cluster.open().reserve(prefix, shard=(0, 2), node=one.number)
        publish(slots, 0)
        skip_time(monkeypatch, 3600.0)
        wait_until(lambda: one.counters()["expired"], "it expires")
        with pytest.raises(StaleLease, match="of this rank"):
            slots.commit()
        assert one.node.statistics()["tiers"]["dram"]["reserved_bytes"] == 0

    def test_a_writer_that_is_killed_in_mid_publication(
        self, cluster: Cluster, commands_folder: Path
    ) -> None:
        one = cluster.start("one", schema=STREAMED, relayed=True)
        assert one.network is not None
        prefix = prefix_of("killed afar", 2)
        with writing(commands_folder, f"tiffin://{one.address}", "killed afar", 2) as (say, worker):
            assert say("layer 0") == "done"
            reader = cluster.open(home=one)
            with reader.stream(prefix, timeout_s=60) as stream:
                course = iter(stream)
                first = next(course)
                assert is_right(first, prefix)
                one.network.stall_after(STREAMED.spans[0].length, "to")
                worker.stdin.write("layer 1\n")
                worker.stdin.flush()
                wait_until(lambda: not one.network._flowing.is_set(), "half of it is there")  # type: ignore[union-attr]
                waiting = Background(lambda: next(course))
                worker.kill()
                worker.wait()
                one.network.cut()  # else the bytes in flight would still arrive
                one.network.resume()
                with pytest.raises(StaleLease, match="given up"):
                    waiting.result()
                assert is_right(first, prefix), "its extents were used again"
        wait_until(lambda: is_quiet(one.node.statistics()), "all is free")
        one.put(prefix)


class TestLimitsOfTime:
    """A node that hangs costs the time of one call, however many reservations it has."""

    @staticmethod
    def with_gaps(one: Member) -> Prefix:
        """A prompt of which every other block is resident, so that it is reserved in three runs."""
        prefix = prompt(5)
        with Client.attach(one.node) as near:
            slots = near.reserve(prefix)
            for slot in slots:
                if slot.index % 2:
                    slot.view[:] = payloads_of(prefix)[slot.index]
                else:
                    slot.skip()
            slots.commit()
            assert slots.stored == (1, 3)
        return prefix

    def test_a_commit_asks_a_lost_node_once_and_puts_in_what_time_is_left(
        self, cluster: Cluster, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        one = cluster.start("one")
        prefix = self.with_gaps(one)
        cluster.settle()
        writer = cluster.open()
        slots = writer.reserve(prefix, timeout_s=20.0)
        publish(slots, *range(LAYERS))
        asked: list[RemoteReservation] = []
        given: list[float] = []
        put = writer._nodes.put

        def commit(reservation: RemoteReservation, *_: Any) -> bytes:
            asked.append(reservation)
            time.sleep(0.05)
            reservation.abort()
            raise DeadlineExceeded("no answer")

        def noting(*arguments: Any, **options: Any) -> Any:
            given.append(arguments[3])
            return put(*arguments, **options)

        for reservation in slots._reservations:  # type: ignore[attr-defined]
            monkeypatch.setattr(reservation, "commit", partial(commit, reservation))
        monkeypatch.setattr(writer._nodes, "put", noting)
        slots.commit()
        assert len(asked) == 1
        assert slots.stored == (0, 2, 4)
        assert len(given) == 3
        assert given == sorted(given, reverse=True)
        assert given[0] <= 20.0 - 0.05
        wait_until(lambda: is_quiet(one.node.statistics()), "nothing is reserved")
        check(cluster, prefix)

    def test_no_more_nodes_are_asked_when_time_is_up(
        self, cluster: Cluster, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        for name in ("one", "two", "three"):
            cluster.start(name)
        slots = cluster.open().reserve(prompt(1))
        fill(slots, 0)
        asked = []

        def silent(peer: Any, *rest: Any) -> Any:
            asked.append(peer)
            time.sleep(max(0.0, rest[-1] - time.monotonic()))
            raise DeadlineExceeded("no answer")

        monkeypatch.setattr(staged_write, "reserve", silent)
        with pytest.raises(DeadlineExceeded):
            slots.publish(0, timeout_s=0.05)
        assert len(asked) == 1
        slots.abort()

    def test_a_node_that_is_slow_to_hear_of_an_abort_hears_the_rest_in_the_background(
        self, cluster: Cluster, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        one = cluster.start("one")
        prefix = self.with_gaps(one)
        cluster.settle()
        slots = cluster.open().reserve(prefix)
        publish(slots, 0)
        threads: list[str] = []
        abort = RemoteReservation.abort

        def noting(reservation: RemoteReservation) -> None:
            threads.append(threading.current_thread().name)
            abort(reservation)

        monkeypatch.setattr(RemoteReservation, "abort", noting)
        monkeypatch.setattr(staged_write, "POST_TIMEOUT_S", 0.0)
        slots.abort()
        wait_until(lambda: is_quiet(one.node.statistics()), "nothing is reserved")
        assert len(threads) == 3
        assert [name.startswith("tiffin-pool") for name in threads] == [False, True, True]


@contextlib.contextmanager
def writing(folder: Path, *arguments: object) -> Any:
    """`streamworker.py write` as a process, which carries out words."""
    worker = Path(kvsupport.__file__).with_name("streamworker.py")
    with subprocess.Popen(
        [sys.executable, str(worker), "write", *map(str, arguments)],
        env=kvsupport.command_environment(folder),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:

        def say(line: str) -> str:
            assert process.stdin is not None
            assert process.stdout is not None
            process.stdin.write(f"{line}\n")
            process.stdin.flush()
            return process.stdout.readline().strip()

        try:
            assert process.stdout is not None
            assert process.stdout.readline().strip() == "ready"
            yield say, process
        finally:
            process.kill()
