"""What a network client may do with a node's blocks, and for how long; clients are isolated."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any
from unittest.mock import Mock

import numpy as np
import pytest
from kvsupport import Background, fresh_prefix, is_quiet, payloads_of, skip_time, wait_until
from poolsupport import LARGE, Network
from tcpsupport import write_ranges

from tiffin.kvstore import Client
from tiffin.kvstore.client.pool.remote.block_write import BlockSeals
from tiffin.kvstore.client.pool.remote.peer import Peer, as_ours
from tiffin.kvstore.errors import (
    DeadlineExceeded,
    NodeUnavailable,
    StaleLease,
)
from tiffin.kvstore.node.core import messages
from tiffin.kvstore.node.core.node_core import CoreOptions
from tiffin.kvstore.node.server.tcp_server import SESSION_CONNECTIONS_MAX
from tiffin.messenger.errors import GrantError, PeerLost
from tiffin.messenger.testing import soon
from tiffin.messenger.transport import Range
from tiffin.messenger.wire.frames import LAST_GRANT

if TYPE_CHECKING:
    from tiffin.kvstore import Prefix
    from tiffin.kvstore.node.node import Node

BLOCK = LARGE.extent_bytes


def reserve(peer: Peer, prefix: Prefix) -> messages.Reserved:
    request = messages.Reserve(0, prefix.key_bytes, prefix.parent, prefix.start, BLOCK, 20.0)
    reply: messages.Reserved = peer.call(request, 20.0)
    return reply


def lease(peer: Peer, prefix: Prefix) -> messages.Leased:
    reply: messages.Leased = peer.call(messages.Lease(0, prefix.key_bytes, 20.0), 20.0)
    return reply


def whole(reply: messages.Reserved, prefix: Prefix) -> list[np.ndarray]:
    """The extents of reserved blocks as a client writes them."""
    seals = BlockSeals(prefix, payloads_of(prefix))
    slots = zip(range(len(prefix)), reply.offsets, reply.generations, strict=True)
    return [
        np.concatenate([seals.header(i, offset, generation, seals.checksums(i)), seals.payloads[i]])
        for i, offset, generation in slots
    ]


def write(peer: Peer, reply: messages.Reserved, prefix: Prefix) -> None:
    extents = whole(reply, prefix)
    ranges = [Range(i * BLOCK, len(extent)) for i, extent in enumerate(extents)]
    write_ranges(peer.transport, reply.lease, ranges, extents, deadline=soon())


def held(node: Node) -> int:
    return sum(session["held_bytes"] for session in node.statistics()["sessions"])


def transfers(node: Node) -> int:
    """How many transfers are under way."""
    with node.held():
        sessions = node.core.sessions.values()
        return sum(lease.transfers for session in sessions for lease in session.leases.values())


class TestSessions:
    def test_leases_of_another_session_are_none_of_ours(self, serve: Any, connect: Any) -> None:
        node, address = serve()
        mine, other = connect(address), connect(address)
        prefix, more = fresh_prefix(2, LARGE), fresh_prefix(1, LARGE)
        with Client.attach(node) as local:
            local.put(prefix, payloads_of(prefix))
        read, written = lease(mine, prefix), reserve(mine, more)
        assert read.lease
        assert written.lease
        target = np.zeros(BLOCK, np.uint8)
        for grant in (read.lease, written.lease, 1, 1 << 62):
            with pytest.raises(GrantError):
                other.transport.read(grant, [Range(0, BLOCK)], [target], deadline=soon())
            with pytest.raises(GrantError):
                write_ranges(other.transport, grant, [Range(0, BLOCK)], [target], deadline=soon())
            for request in (messages.Release, messages.Commit, messages.Abort):
                with pytest.raises(StaleLease):
                    other.call(request(0, grant), 5.0)
        assert not target.any()
        assert held(node) == 3 * BLOCK
        mine.call(messages.Release(0, read.lease), 5.0)
        mine.call(messages.Abort(0, written.lease), 5.0)

    def test_a_lease_is_for_reading_and_a_reservation_for_writing(
        self, serve: Any, connect: Any
    ) -> None:
        node, address = serve()
        peer = connect(address)
        prefix, more = fresh_prefix(1, LARGE), fresh_prefix(1, LARGE)
        with Client.attach(node) as local:
            local.put(prefix, payloads_of(prefix))
        read, written = lease(peer, prefix), reserve(peer, more)
        target = np.zeros(BLOCK, np.uint8)
        with pytest.raises(GrantError):
            write_ranges(peer.transport, read.lease, [Range(0, BLOCK)], [target], deadline=soon())
        with pytest.raises(GrantError):
            peer.transport.read(written.lease, [Range(0, BLOCK)], [target], deadline=soon())
        with Client.attach(node) as local, local.get(prefix) as blocks:
            assert blocks.complete
        peer.call(messages.Release(0, read.lease), 5.0)
        peer.call(messages.Abort(0, written.lease), 5.0)

    def test_ranges_beyond_the_lease_are_not_served(self, serve: Any, connect: Any) -> None:
        node, address = serve()
        peer = connect(address)
        prefix = fresh_prefix(2, LARGE)
        with Client.attach(node) as local:
            local.put(prefix, payloads_of(prefix))
        read = lease(peer, prefix[:1])
        for where in (
            Range(BLOCK, 8),
            Range(BLOCK - 4, 8),
            Range(2**64 - 4, 8),
            Range(0, BLOCK + 1),
        ):
            target = np.zeros(where.length, np.uint8)
            served = peer.transport.read(read.lease, [where], [target], deadline=soon())
            assert served.ranges == 0
            assert not target.any()
        peer.call(messages.Release(0, read.lease), 5.0)

    def test_the_last_grant_is_of_one_connection(self, serve: Any, connect: Any) -> None:
        node, address = serve()
        peer = connect(address)
        prefix = fresh_prefix(1, LARGE)
        with Client.attach(node) as local:
            local.put(prefix, payloads_of(prefix))
        target = np.zeros(BLOCK, np.uint8)
        with peer.stream(soon()) as one, peer.stream(soon()) as two:
            request = messages.Lease(0, prefix.key_bytes, 20.0)
            peer.queue(one, request)
            one.flush(soon())
            assert peer.receive(one, request, soon()).lease  # type: ignore[union-attr]
            for stream, served in ((two, False), (one, True)):
                stream.ask_read(LAST_GRANT, [Range(0, BLOCK)])
                stream.flush(soon())
                if served:
                    assert stream.receive_data([Range(0, BLOCK)], [target], soon()).ranges == 1
                else:
                    with pytest.raises(GrantError, match="last message"):
                        stream.receive_data([Range(0, BLOCK)], [target], soon())
            # A release of "the last one" on the other connection releases nothing.
            two.message(messages.encoder.encode(messages.Release(0, 0)))
            question = messages.Match(0, b"")
            peer.queue(two, question)
            two.flush(soon())
            peer.receive(two, question, soon())
            assert held(node) == BLOCK
            # After a refused request it releases nothing, whatever was granted before.
            bad = messages.Lease(0, b"odd", 1.0)
            peer.queue(one, bad)
            one.message(messages.encoder.encode(messages.Release(0, 0)))
            one.flush(soon())
            assert isinstance(peer.receive(one, bad, soon()), messages.Refused)
            peer.queue(one, question)
            one.flush(soon())
            peer.receive(one, question, soon())
            assert held(node) == BLOCK

    def test_what_a_connection_was_granted_ends_with_it(self, serve: Any, connect: Any) -> None:
        """The reply may have been lost with it. The session lives on with its other connections."""
        node, address = serve()
        peer = connect(address)
        prefix = fresh_prefix(2, LARGE)
        with peer.stream(soon()) as kept:
            reservation = reserve(peer, prefix)
            with peer.stream(soon()) as other:
                assert other is not kept
                other.cut()
            wait_until(lambda: not held(node), "the reservation ends")
            with pytest.raises(StaleLease):
                peer.call(messages.Commit(0, reservation.lease), 5.0)
            again = reserve(peer, prefix)
            assert again.lease
            question = messages.Match(0, b"")
            peer.queue(kept, question)
            kept.flush(soon())
            peer.receive(kept, question, soon())
        peer.call(messages.Abort(0, again.lease), 5.0)

    def test_the_end_of_a_session_frees_everything(self, serve: Any, connect: Any) -> None:
        node, address = serve()
        peer = connect(address)
        prefix, more = fresh_prefix(2, LARGE), fresh_prefix(2, LARGE)
        with Client.attach(node) as local:
            local.put(prefix, payloads_of(prefix))
        lease(peer, prefix)
        lease(peer, prefix[:1])
        write(peer, reserve(peer, more), more)
        assert held(node) == 5 * BLOCK
        peer.close()
        wait_until(lambda: not node.core.sessions, "the session ends")
        assert is_quiet(node.statistics())
        assert node.exists(prefix.key_bytes + more.key_bytes) == b"\1\1\0\0"

    def test_a_session_has_so_many_connections(self, serve: Any, connect: Any) -> None:
        _, address = serve()
        peer = connect(address, streams_max=SESSION_CONNECTIONS_MAX + 1)
        with contextlib.ExitStack() as stack:
            for _ in range(SESSION_CONNECTIONS_MAX):
                stack.enter_context(peer.stream(soon()))
            with pytest.raises(NodeUnavailable, match="64 connections"):
                peer.call(messages.Match(0, b""), 5.0)
            connect(address).call(messages.Match(0, b""), 5.0)  # another client may
        assert peer.call(messages.Match(0, b""), 5.0).flags == b""


class TestExpiry:
    def test_a_silent_readers_lease_ends(self, serve: Any, connect: Any) -> None:
        node, address = serve(core=CoreOptions(remote_lease_s=0.15))
        peer = connect(address)
        prefix = fresh_prefix(1, LARGE)
        with Client.attach(node) as local:
            local.put(prefix, payloads_of(prefix))
        read = lease(peer, prefix)
        wait_until(lambda: not held(node), "the lease ends")
        target = np.zeros(BLOCK, np.uint8)
        with pytest.raises(NodeUnavailable, match="took a lease back"), as_ours("it"):
            peer.transport.read(read.lease, [Range(0, BLOCK)], [target], deadline=soon())
        with pytest.raises(GrantError):
            peer.transport.read(read.lease, [Range(0, BLOCK)], [target], deadline=soon())
        with pytest.raises(StaleLease):
            peer.call(messages.Release(0, read.lease), 5.0)

    def test_what_could_not_be_given_back_in_time_goes_with_the_next_request(
        self, serve: Any, connect: Any
    ) -> None:
        """Otherwise, after a short stop of the node, blocks would be held until the lease expires,
        because a client keeps its connections and with them unreleased leases."""
        node, address = serve()
        network = Network(address)
        with contextlib.closing(network):
            peer = connect(network.address)
            prefix = fresh_prefix(2, LARGE)
            with Client.attach(node) as local:
                local.put(prefix, payloads_of(prefix))
            read = lease(peer, prefix)
            network.pause()
            with peer.stream(soon()):  # all connections are in use, and another can't be made
                peer.post(messages.Release(0, read.lease))
                with pytest.raises(DeadlineExceeded):
                    peer.call(messages.Match(0, b""), 0.0)  # fails as well, and loses nothing
            assert held(node) == 2 * BLOCK
            network.resume()
            peer.call(messages.Match(0, b""), 20.0)
            assert held(node) == 0
            assert peer.transport._pool.counts() == (1, 0), "the connection is as good as before"

    def test_or_by_itself_if_no_request_follows(self, serve: Any, connect: Any) -> None:
        node, address = serve()
        peer, prefix = connect(address), fresh_prefix(2, LARGE)
        with Client.attach(node) as local:
            local.put(prefix, payloads_of(prefix))
        read = lease(peer, prefix)
        network = Network(address)
        with contextlib.closing(network):
            network.pause()
            with peer.stream(soon()):  # the only connection to the node
                peer.address = network.address
                peer.post(messages.Release(0, read.lease))
                assert held(node) == 2 * BLOCK
        wait_until(lambda: held(node) == 0, "the node was told")

    def test_a_transfer_that_has_begun_outlives_its_lease(
        self, serve: Any, connect: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Writers get other extents until the transfer has ended."""
        node, address = serve()
        network = Network(address)
        with contextlib.closing(network):
            peer = connect(network.address)
            prefix = fresh_prefix(12, LARGE)
            with Client.attach(node) as local:
                local.put(prefix, payloads_of(prefix))
            read = lease(peer, prefix)
            network.stall_after(BLOCK)
            # Each block six times, 18 MiB: more than the buffers of sockets take.
            target = np.zeros((72, BLOCK), np.uint8)
            ranges = [Range(i % 12 * BLOCK, BLOCK) for i in range(72)]
            reading = Background(
                lambda: peer.transport.read(read.lease, ranges, list(target), deadline=soon(30))
            )
            wait_until(lambda: transfers(node), "the bytes begin to leave")
            skip_time(monkeypatch, 3600.0)
            wait_until(lambda: node.statistics()["counters"]["expired"], "the lease expires")
            with Client.attach(node) as local:
                assert local.remove(prefix) == 12
                quarantined = node.statistics()["tiers"]["dram"]["quarantined_bytes"]
                assert quarantined == 12 * BLOCK, "still being read"
                others = [fresh_prefix(1, LARGE) for _ in range(16)]
                for other in others:
                    local.put(other, [np.full(LARGE.block_bytes, 255, np.uint8)], timeout_s=0)
            network.resume()
            assert reading.result().ranges == 72
            for extent, payload in zip(target, 6 * payloads_of(prefix), strict=True):
                begin = LARGE.header_bytes
                assert np.array_equal(extent[begin : begin + LARGE.block_bytes], payload)
            wait_until(lambda: is_quiet(node.statistics()), "its extents are free")

    def test_a_reservation_that_expired_takes_no_bytes(
        self, serve: Any, connect: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        node, address = serve()
        peer, prefix = connect(address), fresh_prefix(2, LARGE)
        reservation = reserve(peer, prefix)
        skip_time(monkeypatch, 3600.0)
        wait_until(lambda: not held(node), "it expires")
        with Client.attach(node) as local:
            local.put(prefix, payloads_of(prefix))
            junk = np.full(BLOCK, 9, np.uint8)
            with pytest.raises(GrantError):
                write_ranges(
                    peer.transport, reservation.lease, [Range(0, BLOCK)], [junk], deadline=soon()
                )
            for request in (messages.Commit, messages.Abort):
                with pytest.raises(StaleLease):
                    peer.call(request(0, reservation.lease), 5.0)
            with local.get(prefix) as blocks:
                assert blocks.complete


class TestWriting:
    def test_a_commit_while_another_connection_writes_is_refused(
        self, serve: Any, connect: Any
    ) -> None:
        """Committed blocks must not change any more. An abort is always possible."""
        node, address = serve()
        network = Network(address)
        with contextlib.closing(network):
            slow, quick = connect(network.address), connect(address)
            slow._session = quick._session
            prefix = fresh_prefix(3, LARGE)
            reservation = reserve(quick, prefix)
            slow.call(messages.Match(0, b""), 5.0)
            network.stall_after(BLOCK, "to")
            writing = Background(lambda: write(slow, reservation, prefix))
            wait_until(lambda: transfers(node), "the bytes begin to arrive")
            with pytest.raises(StaleLease, match="still being written"):
                quick.call(messages.Commit(0, reservation.lease), 5.0)
            assert node.match(prefix.key_bytes) == b""
            quick.call(messages.Abort(0, reservation.lease), 5.0)
            # Its extents wait for the transfer, its keys don't.
            dram = node.statistics()["tiers"]["dram"]
            assert dram["quarantined_bytes"] == 3 * BLOCK
            with Client.attach(node) as local:
                assert local.put(prefix, payloads_of(prefix)).stored == (0, 1, 2)
                network.resume()
                writing.result()
                with local.get(prefix) as blocks:
                    assert blocks.complete
            wait_until(lambda: is_quiet(node.statistics()), "the extents are free")

    def test_half_a_write_and_a_commit_is_no_block(self, serve: Any, connect: Any) -> None:
        node, address = serve()
        peer, prefix = connect(address), fresh_prefix(2, LARGE)
        reservation = reserve(peer, prefix)
        extents = whole(reservation, prefix)
        header = extents[0][: LARGE.header_bytes]
        header_only = [Range(0, len(header))], [header.copy()]
        write_ranges(peer.transport, reservation.lease, *header_only, deadline=soon())
        # The writer sent a valid header only: the node commits it, and a reader finds the damage.
        assert peer.call(messages.Commit(0, reservation.lease), 5.0).flags == b"\1\0"
        with Client.attach(node) as local, local.get(prefix) as blocks:
            assert (len(blocks), blocks.reason) == (0, "corrupt")

    def test_a_writer_that_is_cut_off_leaves_nothing(self, serve: Any, connect: Any) -> None:
        node, address = serve()
        network = Network(address)
        with contextlib.closing(network):
            peer, prefix = connect(network.address), fresh_prefix(3, LARGE)
            reservation = reserve(peer, prefix)
            network.stall_after(BLOCK, "to")

            def try_to_write() -> None:
                with contextlib.suppress(PeerLost):
                    write(peer, reservation, prefix)

            writing = Background(try_to_write)
            wait_until(lambda: transfers(node), "the bytes begin to arrive")
            peer.close()
            writing.result()
            network.resume()
            wait_until(lambda: is_quiet(node.statistics()), "nothing is left")
            assert node.match(prefix.key_bytes) == b""

    def test_a_transfer_that_cannot_begin_holds_nothing(
        self, serve: Any, connect: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        node, address = serve()
        peer, prefix = connect(address), fresh_prefix(1, LARGE)
        reservation = reserve(peer, prefix)
        with monkeypatch.context() as patch:
            patch.setattr(node.dram, "view", Mock(side_effect=MemoryError("no memory for a view")))
            (session,) = node.core.sessions.values()
            with pytest.raises(MemoryError), node.transfer(session, reservation.lease, writes=True):
                pass
        write(peer, reservation, prefix)
        assert peer.call(messages.Commit(0, reservation.lease), 5.0).flags == b"\1"

    def test_what_was_not_granted_is_not_released(
        self, serve: Any, connect: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """`Release(0)` ends the lease of the message before it, and none that came earlier."""
        node, address = serve()
        prefix = fresh_prefix(1, LARGE)
        with Client.attach(node) as local:
            local.put(prefix, payloads_of(prefix))
        peer = connect(address)
        monkeypatch.setattr("tiffin.kvstore.node.server.tcp_server._LATE_S", 0.1)
        held = lease(peer, prefix)
        submit = node.submit
        monkeypatch.setattr(node, "submit", lambda *_: None)  # it never decides
        with peer.stream(soon()) as stream:
            peer.queue(stream, messages.Lease(0, prefix.key_bytes, 0.0))
            stream.flush(soon())
            assert isinstance(
                messages.reply_decoder.decode(stream.receive_message(soon())), messages.Refused
            )
            monkeypatch.setattr(node, "submit", submit)
            stream.message(messages.encoder.encode(messages.Release(messages.UNAWAITED, 0)))
            stream.flush(soon())
        assert peer.call(messages.Match(0, prefix.key_bytes), 5.0).flags
        peer.call(messages.Release(0, held.lease), 5.0)  # it is still held
