"""Peers that die, hang, are slow or go silent in the middle of a transfer, on either side."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING

import netpeer
import numpy as np
import pytest
from netsupport import HELLO, serving
from pathsupport import ScriptedPath
from tcpsupport import Relay, write_ranges

from tiffin.messenger.errors import PeerLost, Stalled, TransferTimeout
from tiffin.messenger.messenger import Messenger
from tiffin.messenger.tcp import tcp_client
from tiffin.messenger.tcp.tcp_client import TcpTransport
from tiffin.messenger.testing import GrantBook, eventually, random_bytes, soon
from tiffin.messenger.transport import Range, Served
from tiffin.messenger.wire import frames
from tiffin.messenger.wire.frames import Kind

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from netsupport import Server

    from tiffin.messenger.tcp.stream import Stream

MIB = 1 << 20
RANGES = [Range(at, MIB) for at in range(0, netpeer.NBYTES, MIB)]
CONTENT = np.arange(netpeer.NBYTES // 4, dtype=np.uint32).view(np.uint8)
# Silence after which a peer counts as stopped: long enough that delays of this machine do not
# count as one.
STALL_S = 1.0
# For a write that may arrive in part, after its deadline: it does not change the peer's bytes.
SAME = [CONTENT[at : at + MIB] for at in range(0, netpeer.NBYTES, MIB)]


class Process:
    """`netpeer.py` as a process that can be stopped and killed."""

    def __init__(self) -> None:
        command = [sys.executable, str(Path(netpeer.__file__))]
        self._popen = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert self._popen.stdout is not None
        self.address = ("127.0.0.1", int(self._popen.stdout.readline()))
        self._together = threading.Barrier(1)

    def expect(self, streams: int) -> None:
        """So many streams are opened at once: no transfer begins before all are connected."""
        self._together = threading.Barrier(streams, self._all_stand)

    def _all_stand(self) -> None:
        self._together = threading.Barrier(1)

    def kill(self) -> None:
        self._popen.kill()

    def stop(self) -> None:
        """SIGSTOP: the kernel goes on to acknowledge what it receives; the process does nothing."""
        os.kill(self._popen.pid, signal.SIGSTOP)

    def go_on(self) -> None:
        os.kill(self._popen.pid, signal.SIGCONT)

    def close(self) -> None:
        self.kill()
        self._popen.wait(20)
        assert self._popen.stdout is not None
        self._popen.stdout.close()

    def opener(self, deadline: float) -> Stream:
        """As an application's opener: gives up a peer that is stopped before it has answered."""
        deadline = min(deadline, soon(2))
        stream = tcp_client.connect(self.address, deadline)
        try:
            stream.receive_message(deadline)
            stream.message(HELLO)
            stream.flush(deadline)
            stream.receive_message(deadline)
            self._together.wait(60)
        except BaseException:
            stream.close()
            raise
        return stream


@pytest.fixture
def process() -> Iterator[Process]:
    with closing(Process()) as process:
        yield process


def targets() -> tuple[np.ndarray, list[np.ndarray]]:
    whole = np.zeros(netpeer.NBYTES, np.uint8)
    return whole, [whole[at : at + MIB] for at, _ in RANGES]


# -- the client's side -----------------------------------------------------------------------------


@pytest.mark.parametrize("parallel_max", [1, 3])
def test_a_peer_that_is_killed_in_the_middle(process: Process, parallel_max: int) -> None:
    """The bytes that had arrived are whole, right, and counted in the error."""
    whole, arrays = targets()
    told: list[int] = []

    def arrived(index: int) -> None:
        told.append(index)
        if index == 3:
            process.kill()

    with closing(TcpTransport(process.opener, parallel_max=parallel_max)) as transport:
        with pytest.raises(PeerLost) as lost:
            transport.read(1, RANGES, arrays, deadline=soon(), arrived=arrived)
        served = lost.value.served
        assert 4 <= served.ranges < len(RANGES)
        assert told == list(range(served.ranges))
        assert np.array_equal(whole[: served.nbytes], CONTENT[: served.nbytes])
        with pytest.raises(PeerLost):
            transport.read(1, RANGES, arrays, deadline=soon())


@pytest.mark.slow
@pytest.mark.parametrize("parallel_max", [1, 3])
def test_a_peer_that_hangs_is_noticed(process: Process, parallel_max: int) -> None:
    """Long before the deadline; and after SIGCONT, reads work again."""
    whole, arrays = targets()

    def arrived(index: int) -> None:
        if index == 0:  # on a busy machine all may have arrived after some more
            process.stop()

    process.expect(parallel_max)  # an open that meets a stopped peer would be late, not stalled
    transport = TcpTransport(process.opener, parallel_max=parallel_max)
    with closing(transport):
        with pytest.raises(Stalled) as stalled:
            transport.read(1, RANGES, arrays, deadline=soon(600), arrived=arrived, stall_s=STALL_S)
        assert 1 <= stalled.value.served.ranges < len(RANGES)
        with pytest.raises(TransferTimeout):
            write_ranges(transport, 1, RANGES, SAME, deadline=soon(0.3))
        process.go_on()
        served = transport.read(1, RANGES, arrays, deadline=soon())
        assert served == Served(len(RANGES), netpeer.NBYTES)
        assert np.array_equal(whole, CONTENT)


@pytest.mark.slow
def test_a_write_to_a_peer_that_hangs(process: Process) -> None:
    """The socket buffers some MiB, and then no more."""
    _, arrays = targets()
    with closing(TcpTransport(process.opener)) as transport:
        with transport.stream(soon()):
            pass  # connected, and trusted
        process.stop()
        with pytest.raises(Stalled, match="sent"):
            write_ranges(transport, 1, RANGES, arrays, deadline=soon(600), stall_s=0.3)


def test_the_next_path_takes_over_from_a_killed_peer(process: Process) -> None:
    """The next path is asked only for what had not arrived."""
    book = GrantBook()
    assert book.add([CONTENT]) == 1
    whole, arrays = targets()
    told: list[int] = []

    def arrived(index: int) -> None:
        told.append(index)
        if index == 10:
            process.kill()

    second = ScriptedPath(book, "nixl")
    with closing(TcpTransport(process.opener)) as first:
        messenger = Messenger([first, second])
        messenger.links[1].failed(time.monotonic() + 1000)  # tcp first
        served = messenger.read(1, RANGES, arrays, deadline=soon(), arrived=arrived)
    assert served == Served(len(RANGES), netpeer.NBYTES)
    assert told == list(range(len(RANGES)))
    assert np.array_equal(whole, CONTENT)
    assert messenger.links[0].statistics.errors == 1
    assert 10 < len(second.asked) < len(RANGES)


def test_bytes_that_stop_between_the_ends(server: Server) -> None:
    content = random_bytes(8 * MIB, 1)
    grant = server.book.add([content])
    target = np.zeros(8 * MIB, np.uint8)
    with closing(Relay(server.address)) as relay:
        transport = TcpTransport(server.opener(relay.address))
        with closing(transport):
            everything, into = [Range(0, 8 * MIB)], [target]
            transport.read(grant, everything, into, deadline=soon())
            relay.pause()
            with pytest.raises(Stalled):
                transport.read(grant, everything, into, deadline=soon(600), stall_s=0.2)
            relay.resume()
            transport.read(grant, everything, into, deadline=soon())
            relay.cut()
            [(idle, _)] = transport._pool._idle
            deadline = soon()
            while idle.alive():  # the end of the connection takes a moment to arrive
                assert time.monotonic() < deadline
                time.sleep(0.001)
            transport.read(grant, everything, into, deadline=soon())
            relay.cut_after(3 * MIB)
            with pytest.raises(PeerLost):
                transport.read(grant, everything, into, deadline=soon())
            relay.mend()
            target[:] = 0
            transport.read(grant, everything, into, deadline=soon())
            assert np.array_equal(target, content)


@pytest.mark.parametrize("nbytes", [0, 3, 5, 31, 32, 33, 1000, 65_568, 65_600])
def test_a_connection_cut_after_any_byte(server: Server, nbytes: int) -> None:
    """Counted from the first byte of the answers after the hello."""
    grant = server.book.add([random_bytes(65_536, 1)])
    with (
        closing(Relay(server.address)) as relay,
        closing(server.opener(relay.address)(soon())) as stream,
    ):
        relay.cut_after(nbytes)
        target = np.zeros(65_536, np.uint8)
        stream.ask_read(grant, [Range(0, 65_536)])
        stream.message(b"and this")
        stream.flush(soon())
        with contextlib.ExitStack() as lost:
            if nbytes < 65_568 + 13:
                lost.enter_context(pytest.raises(PeerLost))
            stream.receive_data([Range(0, 65_536)], [target], soon())
            stream.receive_message(soon())


# -- the server's side -----------------------------------------------------------------------------


def friend(server: Server) -> socket.socket:
    """A trusted connection of a client that does what it likes."""
    sock = socket.create_connection(server.address, timeout=20)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    sock.sendall(frames.message_header(len(HELLO)) + HELLO)
    answer = b""
    while not answer.endswith(b"welcome"):
        answer += sock.recv(100)
    return sock


def test_a_reader_that_does_not_read_is_cut() -> None:
    """It holds a thread and a grant for the stall time at most."""
    with serving(stall_s=0.2) as server:
        grant = server.book.add([np.zeros(64 * MIB, np.uint8)])
        with friend(server) as sock:
            sock.sendall(frames.request(Kind.READ, grant, [Range(0, 64 * MIB)]))
            head = sock.recv(frames.HEAD_BYTES, socket.MSG_WAITALL)
            assert head == frames.answer(Kind.DATA, Served(1, 64 * MIB)), "the grant was opened"
            assert eventually(lambda: server.book.opened == 0)
            assert eventually(lambda: server.talks[0].closed_count == 1)


def test_a_reader_that_dawdles_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    """A few bytes now and then are not a stall, but too slow."""
    monkeypatch.setattr("tiffin.messenger.tcp.listener._BYTES_S_MIN", 1 << 30)
    with serving(stall_s=0.4) as server:
        grant = server.book.add([np.zeros(64 * MIB, np.uint8)])
        with friend(server) as sock:
            sock.sendall(frames.request(Kind.READ, grant, [Range(0, 64 * MIB)]))
            while not server.talks[0].closed_count:
                sock.recv(20_000)
                time.sleep(0.02)


@pytest.mark.parametrize("sent", [1, 20, 47, 48, 100_000])
def test_a_writer_that_does_not_finish_is_cut(sent: int) -> None:
    """Within the frame or the bytes; what it wrote is in its own grant, uncommitted."""
    with serving(stall_s=0.2) as server:
        memory = np.zeros(MIB, np.uint8)
        grant = server.book.add([memory], writes=True)
        frame = frames.request(Kind.WRITE, grant, [Range(0, MIB)]) + b"\1" * MIB
        with friend(server) as sock:
            sock.sendall(frame[:sent])
            with contextlib.suppress(ConnectionResetError):
                assert sock.recv(1000) == b""
        assert eventually(lambda: server.talks[0].closed_count == 1)
        assert server.book.opened == 0
        assert memory.sum() == max(0, sent - 48)


def test_a_friend_that_is_silent_is_not_cut() -> None:
    with serving(stall_s=0.1) as server, closing(server.opener()(soon())) as stream:
        time.sleep(0.4)
        stream.message(b"I was thinking")
        stream.flush(soon())
        assert stream.receive_message(soon()) == b"I was thinking"


def test_close_during_transfers(server: Server) -> None:
    """The grants of running transfers are given back before `close` returns."""
    grant = server.book.add([np.zeros(64 * MIB, np.uint8)], writes=True)
    errors: list[Exception] = []

    def use(verb: Callable[..., Served]) -> None:
        array = np.zeros(64 * MIB, np.uint8)
        with closing(TcpTransport(server.opener())) as transport:
            try:
                while True:
                    verb(transport, grant, [Range(0, 64 * MIB)], [array], deadline=soon())
            except PeerLost as error:
                errors.append(error)

    threads = [
        threading.Thread(target=use, args=(verb,)) for verb in (write_ranges, TcpTransport.read)
    ]
    for thread in threads:
        thread.start()
    assert eventually(lambda: server.book.opened == 2)
    server.listener.close()
    assert server.book.opened == 0
    for thread in threads:
        thread.join()
    assert len(errors) == 2
