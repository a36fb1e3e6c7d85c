"""A peer that is given up while a connection to it is being opened: no caller waits until the
deadline.

Each peer here leaves its clients waiting at another step: its kernel drops the first packet, it
does not answer in TLS, or it does not greet. Deadlines are so late that only a cut ends the wait.
"""

from __future__ import annotations

import errno
import os
import socket
import threading
import warnings
from contextlib import ExitStack, closing
from typing import TYPE_CHECKING

import pytest

from tiffin.messenger.errors import Abandoned, PeerLost, TransferError
from tiffin.messenger.tcp.pending_connect import Caller, PendingConnect
from tiffin.messenger.tcp.stream_pool import StreamPool
from tiffin.messenger.tcp.tcp_client import connect
from tiffin.messenger.tcp.tls_context import client_tls
from tiffin.messenger.testing import eventually, soon

if TYPE_CHECKING:
    import ssl
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from tiffin.messenger.tcp.stream import Stream

AN_HOUR_S = 3600.0
STEPS = ["connect", "handshake", "hello"]


@pytest.fixture
def deaf() -> Iterator[tuple[str, int]]:
    """An address without accept and with a full queue: the first packet gets no answer."""
    with ExitStack() as stack:
        sock = stack.enter_context(socket.create_server(("127.0.0.1", 0), backlog=0))
        for _ in range(8):
            one = stack.enter_context(socket.socket())
            one.setblocking(False)
            assert one.connect_ex(sock.getsockname()) in (0, errno.EINPROGRESS)
        yield sock.getsockname()


@pytest.fixture
def mute() -> Iterator[tuple[str, int]]:
    """An address where the kernel accepts, and no byte is ever sent."""
    with socket.create_server(("127.0.0.1", 0), backlog=100) as sock:
        yield sock.getsockname()


@pytest.fixture(params=STEPS)
def opener(
    request: pytest.FixtureRequest, deaf: tuple[str, int], mute: tuple[str, int], certificates: Path
) -> Callable[[float], Stream]:
    """A function that opens a connection and waits at one step, for an hour."""
    step = request.param
    tls: ssl.SSLContext | None = None
    if step == "handshake":
        tls = client_tls(certificates / "ca.pem")

    def open_stream(deadline: float) -> Stream:
        stream = connect(deaf if step == "connect" else mute, deadline, tls=tls)
        try:
            stream.receive_message(deadline)
        except BaseException:
            stream.close()
            raise
        return stream

    return open_stream


class Waiting:
    """A thread that asks a pool for a stream, and the errors that it got."""

    def __init__(self, pool: StreamPool, caller: Caller | None = None) -> None:
        self._pool = pool
        self._caller = caller or Caller()
        self.errors: list[TransferError] = []
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        try:
            with self._caller.in_this_thread(), self._pool.stream(soon(AN_HOUR_S)):
                pass
        except (PeerLost, Abandoned) as error:
            self.errors.append(error)

    def join(self) -> None:
        self._thread.join(20)
        assert not self._thread.is_alive(), "it still waits"

    def end(self) -> None:
        self.join()
        assert len(self.errors) == 1


def at_work(pool: StreamPool) -> bool:
    """Whether the pool has an opening socket, which can be cut."""
    return any(one._what is not None for one in pool._openings)


def test_a_cut_ends_what_is_being_opened(opener: Callable[[float], Stream]) -> None:
    with closing(StreamPool(opener, 8)) as pool:
        for _ in range(2):  # a pool that was cut opens again
            waiting = [Waiting(pool) for _ in range(3)]
            assert eventually(lambda: sum(o._what is not None for o in pool._openings) == 3)
            pool.cut()
            for one in waiting:
                one.end()
            assert pool.counts() == (0, 0)


def test_a_close_does_not_wait_for_the_peer(opener: Callable[[float], Stream]) -> None:
    pool = StreamPool(opener, 8)
    waiting = Waiting(pool)
    assert eventually(lambda: at_work(pool))
    closer = threading.Thread(target=pool.close)
    closer.start()
    closer.join(20)
    assert not closer.is_alive(), "it waits for the peer"
    waiting.end()


def test_a_cut_at_any_moment(opener: Callable[[float], Stream]) -> None:
    """A cut is never missed: before the first packet, or between two steps."""
    with closing(StreamPool(opener, 2)) as pool:
        for _ in range(30):
            waiting = Waiting(pool)
            while not pool._openings:
                os.sched_yield()
            pool.cut()
            waiting.end()


def test_the_error_says_that_it_was_cut(deaf: tuple[str, int]) -> None:
    with closing(StreamPool(lambda deadline: connect(deaf, deadline), 1)) as pool:
        waiting = Waiting(pool)
        assert eventually(lambda: at_work(pool))
        pool.cut()
        waiting.end()
    assert "was cut" in str(waiting.errors[0])


def test_what_was_cut_before_it_had_anything(mute: tuple[str, int]) -> None:
    opening = PendingConnect()
    opening.cut()
    with opening.in_this_thread(), pytest.raises(PeerLost, match="was cut"):
        connect(mute, soon())


class TestCallers:
    """A caller that gives up one call, and not the peer."""

    def test_only_what_it_opens_ends(self, opener: Callable[[float], Stream]) -> None:
        with closing(StreamPool(opener, 8)) as pool:
            caller = Caller()
            mine = [Waiting(pool, caller) for _ in range(2)]
            other = Waiting(pool)
            assert eventually(lambda: sum(o._what is not None for o in pool._openings) == 3)
            caller.cut()
            for one in mine:
                one.end()
                assert isinstance(one.errors[0], Abandoned)
            assert pool.counts() == (0, 1)
            assert not other.errors
            pool.cut()
            other.end()
            assert isinstance(other.errors[0], PeerLost)

    def test_at_any_moment(self, opener: Callable[[float], Stream]) -> None:
        with closing(StreamPool(opener, 2)) as pool:
            for turn in range(30):
                caller = Caller()
                waiting = Waiting(pool, caller)
                while turn % 2 and not pool._openings:
                    os.sched_yield()
                caller.cut()
                waiting.end()
                assert isinstance(waiting.errors[0], Abandoned)

    def test_it_waits_no_more_for_what_others_use(self, mute: tuple[str, int]) -> None:
        with closing(StreamPool(lambda deadline: connect(mute, deadline), 1)) as pool:
            caller = Caller()
            with pool.stream(soon()):
                mine, other = Waiting(pool, caller), Waiting(pool)
                waiting = pool._changed._waiters  # type: ignore[attr-defined]
                assert eventually(lambda: len(waiting) == 2)
                caller.cut()
                mine.end()
                assert isinstance(mine.errors[0], Abandoned)
                assert not other.errors
            other.join()
            assert not other.errors

    def test_what_is_there_it_may_still_use(self, mute: tuple[str, int]) -> None:
        """An abandoned caller may use idle streams, to give back what it got."""
        with closing(StreamPool(lambda deadline: connect(mute, deadline), 2)) as pool:
            caller = Caller()
            with caller.in_this_thread(), pool.stream(soon()) as stream:
                caller.cut()
                assert stream.alive()
                with pytest.raises(Abandoned), pool.stream(soon()):
                    pass
            with caller.in_this_thread(), pool.stream(soon()) as again:
                assert again is stream
            assert pool.counts() == (1, 0)


def test_a_forked_child_has_no_half_open_connection(deaf: tuple[str, int]) -> None:
    pool = StreamPool(lambda deadline: connect(deaf, deadline), 1)
    waiting = Waiting(pool)
    assert eventually(lambda: at_work(pool))
    (opening,) = pool._openings
    descriptor = opening._what.fileno()
    with warnings.catch_warnings(action="ignore"):  # the child touches no lock of other threads
        child = os.fork()
    if not child:
        try:
            os.fstat(descriptor)
        except OSError:
            os._exit(0 if pool.counts() == (0, 0) else 2)
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert at_work(pool), "it was the parent's"
    pool.close()
    waiting.end()
