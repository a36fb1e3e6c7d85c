"""Connections to a daemon: frames however the kernel cuts them, and calls that were given up."""

from __future__ import annotations

import contextlib
import errno
import select
import socket
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from kvsupport import (
    Background,
    Daemon,
    assert_right,
    fresh_prefix,
    is_quiet,
    payloads_of,
    wait_until,
)

from tiffin.kvstore import Client
from tiffin.kvstore.client.connection import connections
from tiffin.kvstore.client.connection.connection import Connection
from tiffin.kvstore.client.connection.connections import Connections
from tiffin.kvstore.errors import (
    ClientClosed,
    DeadlineExceeded,
    InvalidInput,
    NodeUnavailable,
    ProtocolError,
    TiffinError,
)
from tiffin.kvstore.node.core import messages
from tiffin.messenger.tcp.pending_connect import Caller
from tiffin.messenger.testing import soon
from tiffin.messenger.wire.framing import FRAME_BYTES_MAX, FrameDecoder, encode_frame

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tiffin.kvstore.client.connection.node_link import SocketLink

Pair = tuple[Connection, socket.socket]
LOOK = messages.Match(0, b"")


@pytest.fixture
def pair() -> Iterator[Pair]:
    """A connection and its peer."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        connection = Connection(Path("n.sock"), 1, ours, None)  # type: ignore[arg-type]
        yield connection, theirs


def frame(reply: messages.AnyReply) -> bytes:
    return encode_frame(messages.encoder.encode(reply))


class TestFrames:
    @pytest.mark.parametrize("piece_bytes", [1, 3, 4099, 1 << 20])
    def test_a_reply_comes_whole_however_it_is_cut(self, pair: Pair, piece_bytes: int) -> None:
        connection, theirs = pair
        nbytes = 100 if piece_bytes < 10 else 200_000
        sent = frame(messages.Numbers(1, {"text": "x" * nbytes}))

        def send() -> None:
            for at in range(0, len(sent), piece_bytes):
                theirs.sendall(sent[at : at + piece_bytes])

        sender = Background(send)
        reply = connection.call(LOOK, soon(30.0))
        sender.result()
        assert isinstance(reply, messages.Numbers)
        assert reply.numbers == {"text": "x" * nbytes}

    def test_a_reply_that_comes_after_the_looks_is_received(
        self, pair: Pair, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        connection, theirs = pair
        wait = Connection._wait

        def send_then_wait(*args: Any) -> None:
            theirs.sendall(frame(messages.Done(1)))  # only after all looks found nothing
            wait(*args)

        monkeypatch.setattr(Connection, "_wait", send_then_wait)
        assert connection.call(LOOK, soon(30.0)) == messages.Done(1)

    def test_a_request_larger_than_the_sockets_buffers_arrives_whole(self, pair: Pair) -> None:
        connection, theirs = pair
        request = messages.Match(0, bytes(range(256)) * 4096)
        decoder, bodies = FrameDecoder(), []

        def read() -> None:
            while not bodies:
                bodies.extend(decoder.feed(theirs.recv(1 << 16)))

        reader = Background(read)
        connection.post(request, soon(30.0))
        reader.result()
        assert messages.request_decoder.decode(bodies[0]) == request

    def test_a_peer_that_reads_nothing_costs_the_deadline_and_no_more(self, pair: Pair) -> None:
        connection, _ = pair
        with pytest.raises(DeadlineExceeded, match="took no request"):
            connection.post(messages.Match(0, bytes(1 << 20)), soon(0.05))

    def test_no_reply_costs_the_deadline(self, pair: Pair) -> None:
        connection, _ = pair
        with pytest.raises(DeadlineExceeded, match="did not answer"):
            connection.call(LOOK, soon(0.02))

    def test_a_peer_that_is_gone_is_noticed_in_both_directions(self, pair: Pair) -> None:
        connection, theirs = pair
        theirs.shutdown(socket.SHUT_WR)
        with pytest.raises(ConnectionResetError):
            connection.call(LOOK, soon(30.0))
        theirs.close()
        with pytest.raises(BrokenPipeError):
            connection.post(LOOK, soon(30.0))

    def test_a_connection_that_was_closed_is_an_error_of_the_system(self, pair: Pair) -> None:
        connection, _ = pair
        connection.close()
        with pytest.raises(OSError, match="closed") as caught:
            connection._wait(select.POLLIN, soon(30.0), "")
        assert caught.value.errno == errno.EBADF

    def test_a_cut_ends_a_call_that_waits(self, pair: Pair) -> None:
        connection, theirs = pair
        caller = Background(lambda: connection.call(LOOK, soon(60.0)))
        theirs.recv(1 << 16)
        connection.cut()
        with pytest.raises(ConnectionResetError):
            caller.result()

    @pytest.mark.parametrize(
        "sent",
        [
            (FRAME_BYTES_MAX + 1).to_bytes(4, "little"),
            encode_frame(b"\xc1"),
            frame(messages.Done(7)),
            frame(messages.Done(1)) + b"more",
        ],
        ids=["too long", "no message", "another's", "surplus"],
    )
    def test_garbage_is_a_typed_error(self, pair: Pair, sent: bytes) -> None:
        connection, theirs = pair
        theirs.sendall(sent)
        with pytest.raises(ProtocolError, match="garbage"):
            connection.call(LOOK, soon(30.0))


class Interrupted(BaseException):
    """As a signal handler raises it."""


@pytest.fixture
def daemon(own_daemon: Callable[..., Daemon]) -> Daemon:
    return own_daemon()


@pytest.fixture
def client(daemon: Daemon) -> Iterator[Client]:
    with Client.open(daemon.url, name="interrupted") as client:
        yield client


@pytest.fixture
def watcher(daemon: Daemon) -> Iterator[Client]:
    with Client.open(daemon.url, name="watcher") as client:
        yield client


def connections_of(client: Client) -> Connections:
    link: SocketLink = client.near_link  # type: ignore[assignment]
    return link._connections


# Where an exception of a handler may come: before or after each step of a call.
STEPS = [
    (Connections, "_idle_for"),
    (Connections, "_take"),
    (Connection, "_send"),
    (Connection, "_receive"),
    (Connection, "call"),
    (Connections, "_put_back"),
    (Connections, "call"),
]


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
@pytest.mark.parametrize(("owner", "step"), STEPS, ids=[step for _, step in STEPS])
class TestInterrupts:
    def _interrupt(self, patch: pytest.MonkeyPatch, owner: Any, step: str, after: bool) -> None:
        original = getattr(owner, step)

        def interrupted(*args: Any, **options: Any) -> None:
            patch.undo()
            if after:
                original(*args, **options)
            raise Interrupted

        patch.setattr(owner, step, interrupted)

    def test_what_was_granted_meanwhile_goes_back_with_the_next_call(
        self, client: Client, watcher: Client, owner: Any, step: str, after: bool
    ) -> None:
        """And nothing else does: leases and slots of other calls are as before."""
        prefix, other = fresh_prefix(2), fresh_prefix(2)
        client.put(prefix, payloads_of(prefix))
        kept, slots = client.get(prefix), client.reserve(other)
        for call in (client.get, client.reserve, client.match):
            wanted = fresh_prefix(1) if call == client.reserve else prefix
            with pytest.MonkeyPatch.context() as patch:
                self._interrupt(patch, owner, step, after)
                with pytest.raises(Interrupted):
                    call(wanted)
            assert client.match(prefix).blocks == 2
            wait_until(lambda: leases(watcher) == 2, "the lease goes back")
        assert_right(kept, prefix)
        for slot, payload in zip(slots, payloads_of(other), strict=True):
            slot.view[:] = payload
        slots.commit()
        kept.release()
        wait_until(lambda: is_quiet(watcher.statistics()), "nothing is held")
        with client.get(other) as blocks:
            assert_right(blocks, other)

    def test_a_release_is_not_lost(
        self, client: Client, watcher: Client, owner: Any, step: str, after: bool
    ) -> None:
        prefix = fresh_prefix(1)
        client.put(prefix, payloads_of(prefix))
        blocks = client.get(prefix)
        with pytest.MonkeyPatch.context() as patch:
            self._interrupt(patch, owner, step, after)
            try:
                blocks.release()
            except Interrupted:
                client.match(prefix)
        wait_until(lambda: is_quiet(watcher.statistics()), "nothing is held")


def leases(watcher: Client) -> int:
    numbers = watcher.statistics()
    return sum(one["read_leases"] + one["write_leases"] for one in numbers["sessions"])


def test_a_node_that_was_killed_is_found_again_and_old_leases_are_not_mixed_up(
    daemon: Daemon, client: Client
) -> None:
    prefix = fresh_prefix(1)
    client.put(prefix, payloads_of(prefix))
    before = client.get(prefix)
    old = before[0].bytes
    daemon.restart()
    with pytest.raises(NodeUnavailable):
        client.match(prefix)
    assert client.match(prefix).blocks == 0
    client.put(prefix, payloads_of(prefix))
    with client.get(prefix) as blocks:
        assert_right(blocks, prefix)
        assert not np_shares(old, blocks[0].bytes)
    before.release()


def np_shares(one: Any, other: Any) -> bool:
    return bool(one.__array_interface__["data"][0] == other.__array_interface__["data"][0])


def test_calls_of_several_threads_do_not_wait_for_each_other(
    daemon: Daemon, client: Client, watcher: Client
) -> None:
    prefix = fresh_prefix(1)
    waiting = [
        Background(lambda: client.match(prefix, at_least=1, timeout_s=60.0)) for _ in range(4)
    ]
    wait_until(lambda: watcher.statistics()["waiting_requests"] == 4, "all of them wait")
    client.put(prefix, payloads_of(prefix))
    assert [one.result().blocks for one in waiting] == [1] * 4


def test_connections_that_are_not_needed_any_more_are_closed(
    daemon: Daemon, client: Client, watcher: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    prefix, block = fresh_prefix(1), fresh_prefix(1)
    waiting = [
        Background(lambda: client.match(prefix, at_least=1, timeout_s=60.0)) for _ in range(4)
    ]
    wait_until(lambda: watcher.statistics()["waiting_requests"] == 4, "all of them wait")
    client.put(prefix, payloads_of(prefix))
    for one in waiting:
        one.result()
    client.put(block, payloads_of(block))
    held = client.get(block)
    for one in connections_of(client)._idle:  # as if a release had gone over each
        one.unread = True
    monkeypatch.setattr(connections, "IDLE_S", 0.0)
    for _ in range(20):
        client.match(prefix)
    (left,) = connections_of(client)._all.values()
    assert not left.closed
    assert_right(held, block)  # its lease may have come over another
    held.release()
    wait_until(lambda: is_quiet(watcher.statistics()), "it is released")


def test_a_close_ends_the_calls_of_other_threads(daemon: Daemon, watcher: Client) -> None:
    client = Client.open(daemon.url)
    waiting = Background(lambda: client.match(fresh_prefix(1), at_least=1, timeout_s=60.0))
    wait_until(lambda: watcher.statistics()["waiting_requests"], "it waits")
    client.close()
    with pytest.raises(ClientClosed):
        waiting.result()


def test_a_lease_is_released_once(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not a second time when its memory goes."""
    prefix, sent, post = fresh_prefix(1), list[messages.Request](), Connection.post

    def noting(connection: Connection, request: messages.Request, deadline: float) -> bool:
        sent.append(request)
        return post(connection, request, deadline)

    monkeypatch.setattr(Connection, "post", noting)
    client.put(prefix, payloads_of(prefix))
    for _ in range(50):
        client.get(prefix).release()
    wait_until(lambda: not connections_of(client).lending.lent, "all memory is gone")
    assert [type(one) for one in sent] == [messages.Release] * 50


def test_a_session_of_another_process_is_refused(daemon: Daemon, client: Client) -> None:
    """Who has guessed a session's name has none of its leases."""
    hello = messages.Hello(
        0, messages.PROTOCOL_VERSION, "thief", 0, connections_of(client)._session, connection=9
    )
    code = (
        "import socket, sys; s = socket.socket(socket.AF_UNIX); s.connect(sys.argv[1]);"
        "s.sendall(bytes.fromhex(sys.argv[2])); print(s.recv(9999))"
    )
    sent = encode_frame(messages.encoder.encode(hello)).hex()
    done = subprocess.run(
        [sys.executable, "-c", code, str(daemon.socket), sent],
        capture_output=True,
        text=True,
        check=True,
    )
    assert InvalidInput.__name__ in done.stdout
    assert client.match(fresh_prefix(1)).blocks == 0


def test_more_threads_than_connections_wait_for_one(
    daemon: Daemon, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(messages, "CONNECTIONS_MAX", 2)
    prefix = fresh_prefix(1)
    client.put(prefix, payloads_of(prefix))
    threads = [Background(lambda: client.match(prefix, timeout_s=30.0)) for _ in range(8)]
    assert [one.result().blocks for one in threads] == [1] * 8
    assert len(connections_of(client)._all) <= 2


def test_a_call_that_is_given_up_leaves_the_session_whole(
    daemon: Daemon, client: Client, watcher: Client
) -> None:
    """As by a cancelled task of an `AsyncClient`, also if it has the session's only connection."""
    held, written = fresh_prefix(1), fresh_prefix(1)
    client.put(held, payloads_of(held))
    blocks, slots = client.get(held), client.reserve(written)
    slots[0].view[:] = np.frombuffer(payloads_of(written)[0], np.uint8)
    assert len(connections_of(client)._all) == 1
    caller = Caller()

    def wait() -> None:
        with caller.in_this_thread():
            client.match(fresh_prefix(1), at_least=1, timeout_s=60.0)

    waiting = Background(wait)
    wait_until(lambda: watcher.statistics()["waiting_requests"], "it waits")
    caller.cut()
    with pytest.raises(ClientClosed, match="given up"):
        waiting.result()
    wait_until(lambda: not watcher.statistics()["waiting_requests"], "nobody waits any more")
    assert_right(blocks, held)
    slots.commit()
    assert slots.stored == (0,)
    blocks.release()
    wait_until(lambda: is_quiet(watcher.statistics()), "it is released")


def test_connections_that_are_all_lost_are_replaced(
    daemon: Daemon, client: Client, watcher: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(messages, "CONNECTIONS_MAX", 2)
    held = fresh_prefix(1)
    client.put(held, payloads_of(held))
    blocks = client.get(held)
    with daemon.stopped():
        late = [
            Background(lambda: client.match(held, timeout_s=0.05)),
            Background(lambda: client.match(held, timeout_s=0.05)),
        ]
        for one in late:
            with pytest.raises(TiffinError):
                one.result()
    assert client.match(held, timeout_s=30.0).blocks == 1
    assert_right(blocks, held)
    daemon.kill()
    daemon.start()
    with contextlib.suppress(NodeUnavailable):  # who notices
        client.match(held)
    assert client.match(held).blocks == 0
    blocks.release()
