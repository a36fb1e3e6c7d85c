"""The serving side: untrusted connections, floods, limits; every conversation is ended once."""

from __future__ import annotations

import contextlib
import logging
import os
import resource
import socket
import struct
import subprocess
import sys
import threading
import time
from collections import deque
from contextlib import ExitStack, closing
from typing import TYPE_CHECKING

import numpy as np
import pytest
from netsupport import HELLO, descriptors, serving

from tiffin.messenger.errors import PeerLost
from tiffin.messenger.tcp import listener
from tiffin.messenger.tcp.tcp_client import Listener, connect
from tiffin.messenger.testing import eventually, soon
from tiffin.messenger.transport import Range
from tiffin.messenger.wire import frames
from tiffin.messenger.wire.frames import Kind

if TYPE_CHECKING:
    from netsupport import Server

    from tiffin.messenger.tcp.stream import Stream

TEN = [Range(0, 10)]


def raw(server: Server) -> socket.socket:
    return socket.create_connection(server.address, timeout=20)


def ended(sock: socket.socket) -> bool:
    """Whether the server ends the connection, whatever it sends before."""
    with contextlib.suppress(ConnectionResetError):
        while sock.recv(65536):
            pass
    return True


def message(body: bytes) -> bytes:
    return frames.message_header(len(body)) + body


def works(server: Server) -> bool:
    """Whether a correct client is served."""
    with closing(server.opener()(soon())) as stream:
        stream.message(b"ping")
        stream.flush(soon())
        return stream.receive_message(soon()) == b"ping"


# -- strangers -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "sent",
    [
        frames.request(Kind.READ, 1, TEN),
        frames.request(Kind.WRITE, 1, TEN) + bytes(10),
        frames.answer(Kind.DATA, frames.Served(0, 0)),
        frames.HEADER.pack((64 << 10) + 2, Kind.MESSAGE),
        frames.HEADER.pack(0, Kind.MESSAGE),
        frames.HEADER.pack(9, 99),
        b"GET / HTTP/1.1\r\n\r\n",
        bytes(1000),
    ],
    ids=["read", "write", "data", "large", "empty", "kind", "http", "zeros"],
)
def test_strangers_may_only_introduce_themselves(server: Server, sent: bytes) -> None:
    grant = server.book.add([np.zeros(10, np.uint8)], writes=True)
    assert grant == 1
    with raw(server) as sock:
        sock.sendall(sent)
        assert ended(sock)
    assert server.messages == []
    assert works(server)


def test_a_stranger_may_say_several_things(server: Server) -> None:
    with closing(connect(server.address, soon())) as stream:
        assert stream.receive_message(soon()) == b"who are you?"
        for body in (b"x" * 65_536, b"quiet", HELLO, b"y" * 200_000):
            stream.message(body)
        stream.flush(soon())
        assert stream.receive_message(soon()) == b"x" * 65_536
        assert stream.receive_message(soon()) == b"welcome"
        assert stream.receive_message(soon()) == b"y" * 200_000


@pytest.mark.parametrize("sent", [b"", b"\x05", message(b"hm"), message(HELLO)[:-1]])
def test_time_for_a_hello_is_limited(sent: bytes) -> None:
    with serving(hello_timeout_s=0.2) as server, raw(server) as sock:
        sock.sendall(sent)
        assert ended(sock)
        server.listener.hello_timeout_s = 60.0
        assert works(server)


def test_a_friend_has_more_time_than_a_hello() -> None:
    with serving(hello_timeout_s=0.2) as server, closing(in_time(server)) as friend:
        threading.Event().wait(0.4)
        friend.message(b"I have time")
        friend.flush(soon())
        assert friend.receive_message(soon()) == b"I have time"


def in_time(server: Server) -> Stream:
    """A trusted stream; tries again if this machine delays the hello beyond its time limit."""
    patience = soon()
    while True:
        try:
            return server.opener()(soon())
        except PeerLost:
            assert time.monotonic() < patience


@pytest.mark.parametrize("count", [200, pytest.param(1000, marks=pytest.mark.slow)])
def test_half_open_connections_do_not_lock_others_out(count: int) -> None:
    with serving(untrusted_max=32, hello_timeout_s=60) as server, ExitStack() as stack:
        friend = stack.enter_context(closing(server.opener()(soon())))
        threads = threading.active_count()
        strangers = [stack.enter_context(raw(server)) for _ in range(count)]
        assert eventually(lambda: server.listener.statistics()["accepted"] == count + 1)
        assert server.listener.statistics()["untrusted"] <= 32
        assert eventually(lambda: threading.active_count() <= threads + 33)
        for _ in range(10):
            assert works(server)
        friend.message(b"hello")
        friend.flush(soon())
        assert friend.receive_message(soon()) == b"hello"
        numbers = server.listener.statistics()
        assert numbers["crowded_out"] >= count - 32
        assert numbers["refused"] == 0
        assert ended(strangers[0]), "the oldest went first"


def test_a_flood_that_goes_on_does_not_lock_others_out() -> None:
    with serving(untrusted_max=16, hello_timeout_s=60) as server, ExitStack() as stack:
        stop = threading.Event()
        # More than the listener keeps, and not so many that descriptors run out.
        latest: deque[socket.socket] = deque()
        stack.callback(lambda: [one.close() for one in latest])

        def flood() -> None:
            while not stop.is_set():
                latest.append(raw(server))
                if len(latest) > 100:
                    latest.popleft().close()
                stop.wait(0.002)

        thread = threading.Thread(target=flood)
        thread.start()
        try:
            for _ in range(20):
                assert eventually(lambda: _works_now(server))
        finally:
            stop.set()
            thread.join()


def _works_now(server: Server) -> bool:
    try:
        return works(server)
    except PeerLost:
        return False


# -- limits ----------------------------------------------------------------------------------------


def test_friends_fill_the_listener_and_strangers_never_take_their_place() -> None:
    with serving(connections_max=4) as server, ExitStack() as stack:
        friends = [stack.enter_context(closing(server.opener()(soon()))) for _ in range(4)]
        assert eventually(lambda: server.listener.statistics()["trusted"] == 4)
        with raw(server) as fifth:
            assert ended(fifth)
        assert server.listener.statistics()["refused"] == 1
        friends[0].close()
        assert eventually(lambda: server.listener.statistics()["trusted"] == 3)
        for stranger in range(3):
            stack.enter_context(raw(server))
            accepted = 6 + stranger
            assert eventually(lambda n=accepted: server.listener.statistics()["accepted"] == n)
        assert works(server)
        friends[1].message(b"hello")
        friends[1].flush(soon())
        assert friends[1].receive_message(soon()) == b"hello"


def test_out_of_descriptors_is_survived(
    server: Server, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The oldest untrusted connection makes room for the next; one log line, and no busy loop."""
    monkeypatch.setattr(listener, "_LOG_EVERY_S", 600.0)  # longer than the test takes
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.ExitStack() as stack, caplog.at_level(logging.WARNING):
        socks = [stack.enter_context(socket.socket()) for _ in range(6)]
        highest = max(map(int, os.listdir("/proc/self/fd")))
        holes = [os.open("/dev/null", os.O_RDONLY) for _ in range(highest - descriptors() + 2)]
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (max(holes) + 1, hard))
            os.close(holes.pop())  # without any, no connection could be accepted
            for sock in socks:
                sock.settimeout(20)
                sock.connect(server.address)
                assert sock.recv(5), "accepted, and greeted"
            assert ended(socks[0])
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
            for hole in holes:
                os.close(hole)
        assert server.listener.statistics()["crowded_out"] >= 2
        assert caplog.text.count("cannot accept") == 1
        assert works(server)


# -- endings ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("error", [PeerLost("enough"), KeyError("a bug"), OSError("a disk")])
def test_what_the_application_raises_ends_one_connection(
    error: Exception, server: Server, caplog: pytest.LogCaptureFixture
) -> None:
    server.error = error
    with closing(server.opener()(soon())) as one, closing(server.opener()(soon())) as other:
        one.message(b"break")
        one.flush(soon())
        with pytest.raises(PeerLost):
            one.receive_message(soon())
        assert eventually(lambda: server.talks[0].closed_count == 1)
        other.message(b"I live")
        other.flush(soon())
        assert other.receive_message(soon()) == b"I live"
    server.listener.close()
    assert ("a bug" in caplog.text) == isinstance(error, KeyError)


def test_a_conversation_that_cannot_begin(caplog: pytest.LogCaptureFixture) -> None:
    def converse(peer: str) -> object:
        raise LookupError(f"no idea who {peer} is")

    listener = Listener(("127.0.0.1", 0), converse)  # type: ignore[arg-type]
    with closing(listener), socket.create_connection(listener.address, timeout=20) as sock:
        assert ended(sock)
        assert eventually(lambda: "no idea who 127.0.0.1" in caplog.text)


def test_close_ends_everything(server: Server) -> None:
    with ExitStack() as stack:
        friends = [stack.enter_context(closing(server.opener()(soon()))) for _ in range(3)]
        strangers = [stack.enter_context(raw(server)) for _ in range(3)]
        assert eventually(lambda: len(server.talks) == 6)
        server.listener.close()
        assert [talk.closed_count for talk in server.talks] == [1] * 6
        for friend in friends:
            with pytest.raises(PeerLost):
                friend.receive_message(soon())
        assert all(ended(stranger) for stranger in strangers)
        with pytest.raises(PeerLost):
            connect(server.address, soon())
        server.listener.close()


def test_an_address_in_use_is_an_error_at_once(server: Server) -> None:
    with pytest.raises(OSError, match="in use"):
        Listener(server.address, lambda peer: server.talks[0])


def test_a_forked_child_does_not_keep_the_port() -> None:
    code = """
import os, sys, time
sys.path[:0] = sys.argv[1:]
from netsupport import serving
from tiffin.messenger.testing import soon
from tiffin.messenger.tcp.tcp_client import connect, Listener
with serving() as server:
    stream = server.opener()(soon())
    child = os.fork()
    if not child:
        time.sleep(30)
        os._exit(0)
    server.close()
    try:
        stream.receive_message(soon(10))      # the child's copy would keep it open
    except Exception as error:
        print(type(error).__name__)
    stream.close()
    Listener(server.address, None).close()    # and the port taken
    os.kill(child, 9)
    os.waitpid(child, 0)
"""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code, os.path.dirname(os.path.dirname(__file__))],
        timeout=60,
        check=True,
        capture_output=True,
        text=True,
    )
    assert done.stdout == "PeerLost\n"


# -- requests --------------------------------------------------------------------------------------


@pytest.mark.parametrize("grant", ["good", "unknown", "last"])
@pytest.mark.parametrize(
    ("announced", "held", "status"), [(3, 1, 0), (1, 1, 1), (2**32 - 1, 0, 0), (0, 1, 0)]
)
def test_a_request_that_does_not_hold_its_ranges_ends_the_connection(
    server: Server, grant: str, announced: int, held: int, status: int
) -> None:
    """Whatever grant it names: the bytes behind it might not be a frame."""
    good = server.book.add([np.zeros(10, np.uint8)])
    number = {"good": good, "unknown": 999, "last": frames.LAST_GRANT}[grant]
    head = struct.pack("<IBBHIIQQ", 28 + 16 * held, Kind.READ, status, 0, announced, 0, number, 0)
    with closing(server.opener()(soon())) as stream:
        stream._socket.sendall(head + bytes(16 * held))
        with pytest.raises(PeerLost):
            stream.receive_message(soon())
    assert works(server)


def test_plans_are_kept_of_small_reads_only(server: Server) -> None:
    """The key of a cached plan has a number for each array of the grant."""
    few, many = (
        server.book.add([np.full(10, index % 256, np.uint8) for index in range(count)])
        for count in (2, 5000)
    )
    ranges = [Range(10, 10)]
    before = listener._plan_of_few.cache_info()
    with closing(server.opener()(soon())) as stream:
        for grant in (few, many):
            for number in (grant, frames.LAST_GRANT):
                target = np.zeros(10, np.uint8)
                stream.message(b"grant %d" % grant)
                stream.ask_read(number, ranges)
                stream.flush(soon())
                assert stream.receive_message(soon()) == b"granted"
                assert stream.receive_data(ranges, [target], soon()) == frames.Served(1, 10)
                assert (target == 1).all()
    after = listener._plan_of_few.cache_info()
    assert after.hits + after.misses - before.hits - before.misses == 1
