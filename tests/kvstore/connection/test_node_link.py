"""A socket link whose kernel buffers do not take or give everything at once."""

import errno
import socket
import threading
from collections.abc import Iterator

import pytest
from kvsupport import Background, wait_until

from tiffin.kvstore.connection import frame_queues
from tiffin.kvstore.connection.frame_queues import Inbox, Outbox
from tiffin.kvstore.errors import DeadlineExceeded
from tiffin.messenger.testing import soon
from tiffin.messenger.wire.framing import encode_frame

Pair = tuple[socket.socket, socket.socket]


@pytest.fixture
def pair() -> Iterator[Pair]:
    """Two ends of a connection: the first is a link's, the second blocks."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.setblocking(False)
        yield ours, theirs


def test_a_frame_larger_than_the_sockets_buffers_arrives_whole(pair: Pair) -> None:
    ours, theirs = pair
    frame = bytes(range(256)) * (8 << 10)
    received = bytearray()

    def read() -> None:
        while len(received) < len(frame):
            received.extend(theirs.recv(1 << 16))

    reader = threading.Thread(target=read)
    reader.start()
    Outbox(ours).send(frame, soon(30.0))
    reader.join()
    assert received == frame


def test_a_peer_that_reads_nothing_costs_the_deadline_and_no_more(pair: Pair) -> None:
    ours, _ = pair
    with pytest.raises(TimeoutError):
        Outbox(ours).send(bytes(8 << 20), soon(0.05))


def inbox(sock: socket.socket) -> Inbox[bytes]:
    return Inbox(sock, bytes)


def taken(replies: Inbox[bytes]) -> list[bytes]:
    found: list[bytes] = []
    replies.hand_out(found.append)
    return found


def test_a_reply_that_is_not_taken_comes_again(pair: Pair) -> None:
    ours, theirs = pair
    theirs.sendall(encode_frame(b"one") + encode_frame(b"two"))
    replies = inbox(ours)
    replies.receive(soon(30.0))

    def interrupted(reply: bytes) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        replies.hand_out(interrupted)
    assert replies.waiting == (b"one", b"two")
    assert taken(replies) == [b"one", b"two"]


def test_a_reply_that_comes_after_the_looks_is_received(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours, theirs = pair
    wait = frame_queues.wait

    def send_then_wait(sock: socket.socket, event: int, deadline: float) -> None:
        theirs.sendall(encode_frame(b"late"))  # only after all polls found nothing
        wait(sock, event, deadline)

    monkeypatch.setattr(frame_queues, "wait", send_then_wait)
    replies = inbox(ours)
    replies.receive(soon(30.0))
    assert taken(replies) == [b"late"]
    assert taken(replies) == []


def test_replies_come_whole_however_they_are_cut(pair: Pair) -> None:
    ours, theirs = pair
    bodies = [b"", b"one", bytes(200_000), b"last"]
    stream = b"".join(map(encode_frame, bodies))
    replies, found = inbox(ours), []

    def send() -> None:
        for at in range(0, len(stream), 4099):
            theirs.sendall(stream[at : at + 4099])

    sender = Background(send)
    while len(found) < len(bodies):
        replies.receive(soon(30.0))
        found += taken(replies)
    sender.result()
    assert found == bodies


def test_no_reply_costs_the_deadline(pair: Pair) -> None:
    ours, _ = pair
    with pytest.raises(TimeoutError):
        inbox(ours).receive(soon(0.02))


def test_a_peer_that_is_gone_is_noticed_in_both_directions(pair: Pair) -> None:
    ours, theirs = pair
    theirs.close()
    for _ in range(2):
        with pytest.raises(ConnectionResetError):
            inbox(ours).receive(soon(30.0))
    with pytest.raises(BrokenPipeError):
        Outbox(ours).send(b"frame", soon(30.0))


def test_a_socket_that_another_thread_closed_is_an_error_of_the_system(pair: Pair) -> None:
    ours, _ = pair
    ours.close()
    with pytest.raises(OSError, match="closed") as caught:
        frame_queues.wait(ours, 1, soon(30.0))
    assert caught.value.errno == errno.EBADF


FRAME = bytes(range(40))


def waits(outbox: Outbox) -> bool:
    """Whether anything is still to be sent."""
    return bool(outbox._frames)


def fill(outbox: Outbox) -> int:
    """Post until the kernel takes no more, and two frames further; returns how many were posted."""
    posted = 0
    while not waits(outbox):
        outbox.post(FRAME)
        posted += 1
    outbox.post(FRAME)
    outbox.post(FRAME)
    return posted + 2


def read_all(sock: socket.socket) -> bytes:
    sock.settimeout(20)
    return b"".join(iter(lambda: sock.recv(1 << 16), b""))


def test_posts_to_a_peer_that_reads_nothing_do_not_wait_and_none_is_lost(pair: Pair) -> None:
    """Posts end leases: a lost one would leave its blocks held as long as this process lives."""
    ours, theirs = pair
    outbox = Outbox(ours)
    posted = Background(lambda: fill(outbox)).result(8)
    received = bytearray()
    while len(received) < posted * len(FRAME):
        received.extend(theirs.recv(1 << 16))
    wait_until(lambda: not waits(outbox), "all late ones are sent")
    outbox.post(b"at once")
    outbox.send(b", a call", soon(20.0))
    outbox.close(b", goodbye")
    assert received == posted * FRAME
    assert read_all(theirs) == b"at once, a call, goodbye"


def test_a_call_behind_late_posts_keeps_its_deadline_and_the_connection(pair: Pair) -> None:
    ours, theirs = pair
    outbox = Outbox(ours)
    posted = fill(outbox)
    with pytest.raises(DeadlineExceeded):
        outbox.send(b"a call", soon(0.02))
    reader = Background(lambda: read_all(theirs))
    wait_until(lambda: not waits(outbox), "all late ones are sent")
    outbox.close(b"goodbye")
    assert reader.result() == posted * FRAME + b"goodbye"


def test_a_post_does_not_wait_for_a_call_that_is_stuck(pair: Pair) -> None:
    ours, theirs = pair
    outbox = Outbox(ours)
    large = bytes(8 << 20)
    call = Background(lambda: outbox.send(large, soon(60.0)))
    wait_until(outbox._turn.locked, "the call sends")
    outbox.post(b"first")
    outbox.post(b"second")
    reader = Background(lambda: read_all(theirs))
    call.result()
    wait_until(lambda: not waits(outbox), "all late ones are sent")
    outbox.close()
    assert reader.result() == large + b"firstsecond"


def test_closing_ends_the_thread_of_late_posts(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(frame_queues, "GOODBYE_S", 0.01)
    ours, _ = pair
    outbox = Outbox(ours)
    fill(outbox)
    wait_until(outbox._turn.locked, "a thread sends what was late")
    Background(lambda: outbox.close(b"goodbye")).result(8)
    wait_until(lambda: not outbox._turn.locked(), "it has ended")
    outbox.post(FRAME)  # the connection has ended: nothing happens
    assert not waits(outbox)


def test_late_posts_are_bounded(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(frame_queues, "LATE_MAX", 5)
    ours, theirs = pair
    outbox = Outbox(ours)
    posted = fill(outbox)
    for _ in range(5):
        outbox.post(FRAME)
    wait_until(lambda: not waits(outbox), "the thread gives up")
    assert len(read_all(theirs)) < (posted + 5) * len(FRAME)
    outbox.close()
