"""How long calls wait in the kernel, and for how many bytes: never for more than will come."""

from __future__ import annotations

import contextlib
import select
import signal
import socket
import struct
import threading
import time
from contextlib import closing
from typing import TYPE_CHECKING

import pytest

from tiffin.messenger.errors import Stalled, TransferTimeout
from tiffin.messenger.tcp.socket_timeouts import GATHER_BYTES, ROOM_BYTES, Gathering, Patience
from tiffin.messenger.tcp.stream import PlainStream
from tiffin.messenger.testing import eventually, random_bytes
from tiffin.messenger.transport import Range, Served
from tiffin.messenger.wire import frames
from tiffin.messenger.wire.frames import Kind

if TYPE_CHECKING:
    from collections.abc import Iterator

MIB = 1 << 20


class Pair:
    """A stream, and the peer's bare socket."""

    def __init__(self) -> None:
        with socket.create_server(("127.0.0.1", 0)) as server:  # loopback: always gathers
            self.ours = socket.create_connection(server.getsockname())
            self.peer, _ = server.accept()
        self.stream = PlainStream(self.ours)

    @property
    def low_water(self) -> int:
        return self.ours.getsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT)

    def close(self) -> None:
        self.stream.close()
        self.peer.close()


@pytest.fixture
def pair() -> Iterator[Pair]:
    with closing(Pair()) as made:
        yield made


def test_a_wait_is_told_in_powers_of_two(pair: Pair) -> None:
    patience = Patience(pair.ours, socket.SO_RCVTIMEO)
    seen = set()
    for wait_s in (1e-9, 0.1, 0.12, 0.2, 3.0, 1e9):
        patience.allow(wait_s)
        seconds, microseconds = struct.unpack(
            "@ll", pair.ours.getsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, 16)
        )
        told_s = seconds + microseconds / 1e6
        seen.add(told_s)
        if 2**-10 <= wait_s <= 2**10:
            assert wait_s / 2 <= told_s <= wait_s * 1.07  # the kernel rounds to its own ticks
    assert len(seen) == 5  # 0.1 and 0.12 are one


def test_many_bytes_are_gathered_and_the_last_are_not(pair: Pair) -> None:
    gathering = Gathering(pair.ours)
    most = 2 * GATHER_BYTES
    for left_bytes, portion, low_water in (
        (1, GATHER_BYTES, 1),  # more than comes may be asked for: it ends with what comes
        (2 * GATHER_BYTES - 1, GATHER_BYTES, 1),
        (2 * GATHER_BYTES, GATHER_BYTES, GATHER_BYTES),
        (3 * GATHER_BYTES, most, GATHER_BYTES),
        (1 << 40, most, GATHER_BYTES),
        (2 * GATHER_BYTES - 1, GATHER_BYTES, 1),
    ):
        assert gathering.portion(left_bytes, most) == portion
        assert pair.low_water == low_water


def test_far_bytes_are_gathered_where_there_is_room(pair: Pair) -> None:
    """In a small buffer, the low-water mark would limit the window of the whole transfer."""
    gathering = Gathering(pair.ours)
    gathering._near = False
    buffers = []
    for nbytes in (64 << 10, 4 * MIB):
        pair.ours.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, nbytes)
        buffers.append(pair.ours.getsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF))
        gathering.portion(1 << 40, MIB)
        assert pair.low_water == (GATHER_BYTES if buffers[-1] >= ROOM_BYTES else 1)
    if buffers[-1] < ROOM_BYTES:
        pytest.skip(f"net.core.rmem_max allows buffers of {buffers[-1]} bytes only")
    assert buffers[0] < ROOM_BYTES


@pytest.mark.parametrize(
    "nbytes", [1, MIB, 3 * MIB - 1, 3 * MIB, 3 * MIB + 1, 4 * MIB + 17, 9 * MIB - 1]
)
def test_all_arrives_though_nothing_follows(pair: Pair, nbytes: int) -> None:
    """A reader never waits for a MiB where less is to come: it would wait for ever."""
    content = random_bytes(nbytes, 1)
    sender = threading.Thread(
        target=lambda: pair.peer.sendall(
            frames.answer(Kind.DATA, Served(1, nbytes)) + content.tobytes()
        )
    )
    sender.start()
    target = random_bytes(nbytes, 2)
    deadline = time.monotonic() + 20
    pair.stream.ask_read(1, [Range(0, nbytes)])
    pair.stream.flush(deadline)
    served = pair.stream.receive_data([Range(0, nbytes)], [target], deadline)
    sender.join()
    assert served == Served(1, nbytes)
    assert (target == content).all()
    assert pair.low_water == 1
    pair.peer.sendall(frames.message_header(2) + b"ok")
    assert pair.stream.receive_message(deadline) == b"ok"


@pytest.mark.slow
def test_drops_are_not_a_stall(pair: Pair) -> None:
    """A peer that sends less than the gathered portion within the stall time is not silent."""
    nbytes, drop = 6 * MIB, 300 << 10
    content = random_bytes(nbytes, 1)
    waits_for: list[int] = []
    receive = pair.stream._receive_some

    def after_a_drop(views: list[memoryview], wait_s: float, *, whole: bool) -> int:
        at = len(waits_for) * drop
        pair.peer.sendall(content[at : at + drop].data)
        waits_for.append(pair.low_water)
        return receive(views, wait_s, whole=whole)

    pair.peer.sendall(frames.answer(Kind.DATA, Served(1, nbytes)))
    pair.stream._receive_some = after_a_drop
    target = random_bytes(nbytes, 2)
    deadline = time.monotonic() + 30
    pair.stream.ask_read(1, [Range(0, nbytes)])
    pair.stream.flush(deadline)
    pair.stream.receive_data([Range(0, nbytes)], [target], deadline, stall_s=0.05)
    assert (target == content).all()
    assert waits_for.count(GATHER_BYTES) > 10, "it waited for more than came"


class Watched:
    """A `Patience` that records until when it lets the kernel wait."""

    def __init__(self, patience: Patience) -> None:
        self._patience = patience
        self.until = [0.0]

    def allow(self, wait_s: float) -> None:
        self.until.append(time.monotonic() + wait_s)
        self._patience.allow(wait_s)


def fill(sock: socket.socket) -> None:
    """Send until the buffers of both sides are full."""
    for _ in range(3):
        with contextlib.suppress(BlockingIOError):
            while True:
                sock.send(bytes(MIB), socket.MSG_DONTWAIT)
        time.sleep(0.05)


class TestLateBytes:
    """The first byte is waited for separately; then the remaining bytes have less time."""

    @pytest.mark.slow
    def test_received(self, pair: Pair) -> None:
        watched = pair.stream._receive_wait = Watched(pair.stream._receive_wait)
        deadline = time.monotonic() + 1.5
        pair.peer.sendall(frames.message_header(MIB))
        late = threading.Timer(1.0, pair.peer.sendall, [b"1"])
        late.start()
        with pytest.raises(TransferTimeout):
            pair.stream.receive_message(deadline)
        late.join()
        assert max(watched.until) < deadline + 0.5

    @pytest.mark.slow
    def test_sent(self, pair: Pair) -> None:
        fill(pair.ours)
        watched = pair.stream._send_wait = Watched(pair.stream._send_wait)
        deadline = time.monotonic() + 1.5
        late = threading.Timer(1.0, pair.peer.recv, [4 * MIB, socket.MSG_WAITALL])
        late.start()
        for _ in range(4):
            pair.stream.message(bytes(15 * MIB))
        with pytest.raises(TransferTimeout):
            pair.stream.flush(deadline)
        late.join()
        assert max(watched.until) < deadline + 0.5

    def test_room_for_some_bytes_is_used(self, pair: Pair) -> None:
        """Also less room than `poll` waits for is used: a slow reader is not a silent one."""
        fill(pair.ours)
        piece = [memoryview(bytes(4 * MIB))]
        writable = select.poll()
        writable.register(pair.ours, select.POLLOUT)

        def some_went() -> bool:
            pair.peer.recv(128 << 10, socket.MSG_WAITALL)
            enough = writable.poll(50)
            return pair.stream._send_some(piece, 0.001) > 0 and not enough

        assert eventually(some_went)


@pytest.fixture
def ticks() -> Iterator[list[float]]:
    """When the main thread got a signal: every 20 ms, as from a profiler, 1,000 in all."""
    seen: list[float] = []
    over = threading.Event()
    before = signal.signal(signal.SIGUSR1, lambda *_: seen.append(time.monotonic()))

    def tick() -> None:
        main = threading.main_thread().ident
        assert main is not None
        while not over.wait(0.02) and len(seen) < 1000:
            signal.pthread_kill(main, signal.SIGUSR1)

    ticking = threading.Thread(target=tick)
    ticking.start()
    assert eventually(lambda: seen)
    yield seen
    over.set()
    ticking.join()
    signal.signal(signal.SIGUSR1, before)


class TestSignals:
    """Python repeats a call that a signal interrupted, and the kernel's timeout would restart."""

    def test_a_message_that_does_not_come(self, pair: Pair, ticks: list[float]) -> None:
        with pytest.raises(TransferTimeout):
            pair.stream.receive_message(time.monotonic() + 0.2)
        assert len(ticks) < 1000, "it waited until no signal came any more"

    @pytest.mark.slow
    @pytest.mark.parametrize("nbytes", [1, 64 << 10, 8 * MIB])
    def test_bytes_that_do_not_come(self, pair: Pair, ticks: list[float], nbytes: int) -> None:
        head = frames.answer(Kind.DATA, Served(1, nbytes))
        sender = threading.Thread(target=pair.peer.sendall, args=(head + bytes(nbytes // 2),))
        sender.start()
        pair.stream.ask_read(1, [Range(0, nbytes)])
        deadline = time.monotonic() + 60
        pair.stream.flush(deadline)
        target = random_bytes(nbytes, 1)
        with pytest.raises(Stalled):
            pair.stream.receive_data([Range(0, nbytes)], [target], deadline, stall_s=1.0)
        sender.join()
        assert not target[: nbytes // 2].any(), "what did come is there"
        assert len(ticks) < 1000, "it waited until no signal came any more"

    @pytest.mark.slow
    def test_bytes_that_do_not_go(self, pair: Pair, ticks: list[float]) -> None:
        for _ in range(4):  # the last ones find no room for a single byte
            pair.stream.message(bytes(16 * MIB))
            with pytest.raises(Stalled):
                pair.stream.flush(time.monotonic() + 60, stall_s=0.2)
        assert len(ticks) < 1000, "it waited until no signal came any more"


def test_silence_in_the_middle_is_a_stall(pair: Pair) -> None:
    nbytes, sent = 8 * MIB, 5 * MIB + 1000
    ranges = [Range(at, MIB) for at in range(0, nbytes, MIB)]
    content = random_bytes(sent, 1)
    sender = threading.Thread(
        target=lambda: pair.peer.sendall(
            frames.answer(Kind.DATA, Served(8, nbytes)) + content.tobytes()
        )
    )
    sender.start()
    receive = pair.stream._receive_some

    def patient(views: list[memoryview], wait_s: float, *, whole: bool) -> int:
        """However late the thread sends: the silence begins when all has come."""
        while True:
            all_sent = not sender.is_alive()
            count = receive(views, wait_s, whole=whole)
            if count or all_sent:
                return count

    pair.stream._receive_some = patient
    targets = [random_bytes(MIB, 2) for _ in ranges]
    deadline = time.monotonic() + 20
    pair.stream.ask_read(1, ranges)
    pair.stream.flush(deadline)
    with pytest.raises(Stalled) as caught:
        pair.stream.receive_data(ranges, targets, deadline, stall_s=0.2)
    sender.join()
    # Bytes that had come are not lost, although they were less than a gathered portion.
    assert caught.value.served == Served(5, 5 * MIB)
    for index in range(5):
        assert (targets[index] == content[index * MIB : (index + 1) * MIB]).all()


def test_a_socket_without_addresses_is_near() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        gathering = Gathering(ours)
        gathering.portion(1 << 40, MIB)
        assert ours.getsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT) == GATHER_BYTES
