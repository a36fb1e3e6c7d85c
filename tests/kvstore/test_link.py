"""What a socket link does when the kernel does not take or give everything at once."""

import contextlib
import errno
import socket
import threading
import time
from collections.abc import Iterator

import pytest
from kvsupport import Background, wait_until

from tiffin.kvstore import link
from tiffin.kvstore.errors import DeadlineExceeded

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


FRAME = bytes(range(40))


def fill(outbox: link.Outbox) -> int:
    """Post until the kernel takes no more, and two frames further; returns how many were posted."""
    posted = 0
    while outbox._late is None:
        outbox.post(FRAME)
        posted += 1
    outbox.post(FRAME)
    outbox.post(FRAME)
    return posted + 2


def read_all(sock: socket.socket) -> bytes:
    sock.settimeout(20)
    return b"".join(iter(lambda: sock.recv(1 << 16), b""))


def test_posts_to_a_peer_that_reads_nothing_do_not_wait_and_none_is_lost(pair: Pair) -> None:
    """They end leases: one that is lost leaves its blocks held as long as this process lives."""
    ours, theirs = pair
    outbox = link.Outbox(ours)
    posted = Background(lambda: fill(outbox)).result(8)
    received = bytearray()
    while len(received) < posted * len(FRAME):
        received.extend(theirs.recv(1 << 16))
    wait_until(lambda: outbox._late is None, "all late ones are sent")
    outbox.post(b"at once")
    outbox.send(b", a call", soon(20.0))
    outbox.close(b", goodbye")
    assert received == posted * FRAME
    assert read_all(theirs) == b"at once, a call, goodbye"


def test_a_call_behind_late_posts_keeps_its_deadline_and_the_connection(pair: Pair) -> None:
    ours, theirs = pair
    outbox = link.Outbox(ours)
    posted = fill(outbox)
    with pytest.raises(DeadlineExceeded):
        outbox.send(b"a call", soon(0.02))
    reader = Background(lambda: read_all(theirs))
    wait_until(lambda: outbox._late is None, "all late ones are sent")
    outbox.close(b"goodbye")
    assert reader.result() == posted * FRAME + b"goodbye"


def test_a_post_does_not_wait_for_a_call_that_is_stuck(pair: Pair) -> None:
    ours, theirs = pair
    outbox = link.Outbox(ours)
    large = bytes(8 << 20)
    call = Background(lambda: outbox.send(large, soon(60.0)))
    wait_until(outbox._turn.locked, "the call sends")
    outbox.post(b"first")
    outbox.post(b"second")
    reader = Background(lambda: read_all(theirs))
    call.result()
    wait_until(lambda: outbox._late is None, "all late ones are sent")
    outbox.close()
    assert reader.result() == large + b"firstsecond"


def test_closing_ends_the_thread_of_late_posts(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link, "GOODBYE_S", 0.01)
    ours, _ = pair
    outbox = link.Outbox(ours)
    fill(outbox)
    thread = outbox._thread
    assert thread is not None
    assert thread.is_alive()
    Background(lambda: outbox.close(b"goodbye")).result(8)
    assert not thread.is_alive()
    outbox.post(FRAME)  # the connection has ended: nothing happens
    assert outbox._late is None


def test_late_posts_are_bounded(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link, "LATE_MAX", 5)
    ours, theirs = pair
    outbox = link.Outbox(ours)
    posted = fill(outbox)
    for _ in range(5):
        outbox.post(FRAME)
    wait_until(lambda: outbox._late is None, "the thread gives up")
    assert len(read_all(theirs)) < (posted + 5) * len(FRAME)
    outbox.close()


def test_without_a_thread_the_connection_ends(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    ours, theirs = pair
    outbox = link.Outbox(ours)
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        with contextlib.suppress(BlockingIOError):
            while ours.send(FRAME):
                pass
        outbox.post(FRAME)
    assert outbox._late is None
    assert set(read_all(theirs)) == set(FRAME), "it ends"
    outbox.close()
