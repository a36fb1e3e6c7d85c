"""What a socket link does when the kernel does not take or give everything at once."""

import errno
import socket
import threading
import time
from collections.abc import Iterator

import pytest

from tiffin.kvstore import link

Pair = tuple[socket.socket, socket.socket]


@pytest.fixture
def pair() -> Iterator[Pair]:
    """Two ends of a connection: the first is a link's, the second blocks."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.setblocking(False)
        yield ours, theirs


def soon(timeout_s: float) -> float:
    return time.monotonic() + timeout_s


def test_a_frame_larger_than_the_sockets_buffers_arrives_whole(pair: Pair) -> None:
    ours, theirs = pair
    frame = bytes(range(256)) * (8 << 10)
    received = bytearray()

    def read() -> None:
        while len(received) < len(frame):
            received.extend(theirs.recv(1 << 16))

    reader = threading.Thread(target=read)
    reader.start()
    link._send_all(ours, frame, soon(30.0))
    reader.join()
    assert received == frame


def test_a_peer_that_reads_nothing_costs_the_deadline_and_no_more(pair: Pair) -> None:
    ours, _ = pair
    with pytest.raises(TimeoutError):
        link._send_all(ours, bytes(8 << 20), soon(0.05))


def test_a_reply_that_comes_after_the_looks_is_received(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours, theirs = pair
    buffer = memoryview(bytearray(100))
    wait = link._wait

    def send_then_wait(sock: socket.socket, event: int, deadline: float) -> None:
        theirs.sendall(b"late")  # only now: every look was in vain
        wait(sock, event, deadline)

    monkeypatch.setattr(link, "_wait", send_then_wait)
    assert link._receive(ours, buffer, soon(30.0)) == 4
    assert bytes(buffer[:4]) == b"late"


def test_no_reply_costs_the_deadline(pair: Pair) -> None:
    ours, _ = pair
    with pytest.raises(TimeoutError):
        link._receive(ours, memoryview(bytearray(100)), soon(0.02))


def test_a_peer_that_is_gone_is_noticed_in_both_directions(pair: Pair) -> None:
    ours, theirs = pair
    theirs.close()
    assert link._receive(ours, memoryview(bytearray(100)), soon(30.0)) == 0
    with pytest.raises(BrokenPipeError):
        link._send_all(ours, b"frame", soon(30.0))


def test_a_socket_that_another_thread_closed_is_an_error_of_the_system(pair: Pair) -> None:
    ours, _ = pair
    ours.close()
    with pytest.raises(OSError, match="closed") as caught:
        link._wait(ours, 1, soon(30.0))
    assert caught.value.errno == errno.EBADF
