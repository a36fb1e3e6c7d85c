"""The queues of outgoing and incoming frames on a client's connection to the node of its host.

An exception of a signal handler may interrupt this code between any two of its steps, and the next
call, or another thread, goes on from there. So each socket call and the record of the bytes that it
moved are one step (`noted.extend(map(call, (argument,)))`), and the decoded messages replace the
received bytes in one assignment: no frame is cut, and no byte is lost or seen twice.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import select
import socket
import struct
import threading
import time
from collections import deque
from typing import TYPE_CHECKING, Generic, TypeVar

from tiffin.messenger.errors import FrameError
from tiffin.messenger.signal_safe import later
from tiffin.messenger.wire.framing import FRAME_BYTES_MAX

from ..errors import DeadlineExceeded

if TYPE_CHECKING:
    from collections.abc import Callable

log = logging.getLogger(__name__)
T = TypeVar("T")

GOODBYE_S = 1.0
# A node answers most calls in 20 to 60 us, and on a virtual machine it takes as long again to wake
# a client that has gone to sleep: looking 50 times, about 2 us each, took a get of 16 blocks from
# 140 to 98 us and a match of 256 from 110 to 75, and cost nothing where both share one core.
LOOKS = 50
# On a busy core each look may take as long as other work occupies it: see
# `messenger/tcp/stream.py`.
LOOKING_S = 0.001
# The most frames, of some 20 bytes, that wait in the queue for a node that takes none (the socket's
# buffer has room for 278 before): a client may hold 4,096 leases (`node.LEASES_MAX`), and report as
# many blocks.
LATE_MAX = 8192
# The timeout of the thread that sends late frames: as good as none, since the end of the connection
# ends its wait.
_LATE_S = 86_400.0
# Replies have some hundred bytes; a page of an inventory has 1 MiB.
_RECEIVE_BYTES = 64 << 10
_LENGTH = struct.Struct("<I")


class Outbox:
    """The send queue of one non-blocking connection: calls in turn, and posts, which never wait for
    the node.

    Another thread sends the posts, and the rest of an offered frame, that the socket does not take
    at once, as soon as it does. To break the connection instead would lose the posts: the node
    would hold the leases that they end until this process is dead.
    """

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._turn = threading.Lock()  # held by the thread that sends
        # Each with the bytes that every `send` call took; the first one may be partly sent.
        self._frames: deque[tuple[memoryview, list[int]]] = deque()
        self._late = threading.Lock()  # held by the thread that sends late frames
        self._is_cut = False

    def send(self, frame: bytes, deadline: float) -> None:
        """Send a frame after those in the queue. Raises DeadlineExceeded if none of it was sent by
        the deadline, TimeoutError if a part of it may be, and the socket's errors."""
        mine: tuple[memoryview, list[int]] = memoryview(frame), []
        self._frames.append(mine)
        if not self._flush(deadline, mine):
            raise DeadlineExceeded("the node took no request within the deadline")

    def offer(self, frame: bytes) -> bool:
        """Send a frame if that does not block; else send nothing of it. Whether it was sent. Raises
        the socket's errors."""
        taken: list[bool] = []
        try:
            taken.extend(map(self._turn.acquire, (False,)))
            if not taken[0] or self._frames:
                return False
            mine: tuple[memoryview, list[int]] = memoryview(frame), []
            self._frames.append(mine)
            try:
                while self._send_first():
                    pass
            except BlockingIOError:
                if not mine[1]:
                    self._frames.remove(mine)
                    return False
                later(self._send_late)  # the rest
            return True
        finally:
            if taken and taken[0]:
                self._turn.release()

    def post(self, frame: bytes) -> None:
        """Send a frame, now or later. With LATE_MAX frames in the queue the connection is cut; on a
        broken connection nothing happens."""
        if len(self._frames) >= LATE_MAX:
            log.warning("the node took none of %d frames; hanging up", LATE_MAX)
            self._cut()
        if self._is_cut:
            return
        self._frames.append((memoryview(frame), []))
        if not self._late.locked() and not self._flush_at_once():
            later(self._send_late)

    def _flush_at_once(self) -> bool:
        """Send as much as the socket takes without blocking; whether the queue is empty."""
        taken: list[bool] = []
        try:
            taken.extend(map(self._turn.acquire, (False,)))
            while taken[0] and self._send_first():
                pass
        except BlockingIOError:
            pass
        except OSError as error:
            log.debug("a post was lost with its connection: %s", error)
            self._cut()
        finally:
            if taken and taken[0]:
                self._turn.release()
        return not self._frames

    def _flush(self, deadline: float, mine: tuple[memoryview, list[int]] | None = None) -> bool:
        """Send all frames; whether `mine`, or all, are sent by the deadline. If not, `mine` leaves
        the queue unsent. Raises TimeoutError, OSError."""
        taken: list[bool] = []
        try:
            taken.extend(map(self._turn.acquire, (True,), (remaining_s(deadline),)))
            while taken[0]:
                try:
                    if not self._send_first():
                        return True
                except BlockingIOError:
                    try:
                        wait(self._sock, select.POLLOUT, deadline)
                    except TimeoutError:
                        if mine is None or mine[1]:
                            raise
                        break
            if mine is not None and not mine[1]:
                with contextlib.suppress(ValueError):  # another thread has sent it
                    self._frames.remove(mine)
            return mine is not None and bool(mine[1])
        finally:
            if taken and taken[0]:
                self._turn.release()

    def _send_first(self) -> bool:
        """Send what is left of the first frame, or a part of it; whether there was a frame. The
        caller holds `_turn`. Raises BlockingIOError, OSError."""
        if not self._frames:
            return False
        frame, sent = self._frames[0]
        rest = frame[sum(sent) :] if sent else frame
        if rest:
            sent.extend(map(self._sock.send, (rest,)))
            rest = rest[sent[-1] :]
        if not rest:
            self._frames.popleft()
        return True

    def _send_late(self) -> None:
        # Checks again at the end: a post may have relied on this thread.
        while self._frames and not self._is_cut and self._late.acquire(blocking=False):
            try:
                self._flush(time.monotonic() + _LATE_S)
            except OSError as error:
                log.debug("posts were lost with their connection: %s", error)
                self._cut()
            finally:
                self._late.release()

    def close(self, goodbye: bytes = b"") -> None:
        """Close the socket, after a `goodbye` if it can be sent within GOODBYE_S. Not in the main
        thread."""
        try:
            if goodbye:
                self.send(goodbye, time.monotonic() + GOODBYE_S)
        except (OSError, DeadlineExceeded) as error:
            log.debug("no goodbye: %s", error)
        self._cut()
        # A thread that sends fails now. While it holds `_turn`, the descriptor stays open, so that
        # no other file gets its number.
        if self._turn.acquire(timeout=GOODBYE_S):
            self._sock.close()
            self._turn.release()

    def _cut(self) -> None:
        self._is_cut = True
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)
        self._frames.clear()


class Inbox(Generic[T]):
    """The receive queue of one non-blocking connection. One thread at a time uses it."""

    def __init__(self, sock: socket.socket, decode: Callable[[bytes], T]) -> None:
        """`decode` turns a frame's body into the message that `hand_out` passes on."""
        self._sock = sock
        self._decode = decode
        # The bytes that are received and not decoded, and the messages decoded and not taken.
        self._state: tuple[list[bytes], list[T]] = [], []

    @property
    def waiting(self) -> tuple[T, ...]:
        """The messages that are decoded and not taken, in the order in which they came."""
        return tuple(self._state[1])

    def hand_out(self, take: Callable[[T], None]) -> None:
        """Call `take` with each decoded message in order; a message whose `take` was interrupted
        comes again."""
        decoded = self._state[1]
        while decoded:
            take(decoded[0])
            decoded.pop(0)

    def receive(self, deadline: float) -> None:
        """Wait for some bytes and decode the complete frames. Looks LOOKS times before it sleeps,
        and yields the core (and Python's lock) between looks, so that it does not hold up a node on
        the same core. Raises TimeoutError, ConnectionError at the end of the connection, OSError,
        and the errors of `decode`."""
        give_up = time.monotonic() + LOOKING_S
        for _ in range(LOOKS):
            if self.look():
                return
            os.sched_yield()
            if time.monotonic() > give_up:
                break
        while not self.look():
            wait(self._sock, select.POLLIN, deadline)

    def look(self) -> bool:
        """Receive and decode the bytes that have arrived; whether there were any. Raises as
        `receive`."""
        received, decoded = self._state
        try:
            received.extend(map(self._sock.recv, (_RECEIVE_BYTES,)))
        except BlockingIOError:
            # An earlier call may have received a whole frame, and was interrupted then.
            if not received or sum(map(len, received)) < _needed_bytes(received):
                return False
        raise_if_ended(received)
        nbytes = sum(map(len, received))
        if nbytes < _needed_bytes(received):
            return True
        data = received[0] if len(received) == 1 else b"".join(received)
        bodies, rest = _cut_frames(data)
        decoded = decoded + [self._decode(body) for body in bodies]
        self._state = [rest] if rest else [], decoded
        return True


def raise_if_ended(received: list[bytes]) -> None:
    """Raises ConnectionResetError if the peer has closed the connection (an empty read)."""
    if received and not received[-1]:
        raise ConnectionResetError("it closed the connection")


def _needed_bytes(received: list[bytes]) -> int:
    """How many bytes the first frame needs to be complete, or its length field if that is not."""
    if len(received[0]) < _LENGTH.size:
        return _LENGTH.size
    return _LENGTH.size + int(_LENGTH.unpack_from(received[0])[0])


def _cut_frames(data: bytes) -> tuple[list[bytes], bytes]:
    """The bodies of the complete frames, and the bytes after the last one. Raises FrameError."""
    bodies: list[bytes] = []
    start, end = 0, len(data)
    while end - start >= _LENGTH.size:
        (length,) = _LENGTH.unpack_from(data, start)
        if length > FRAME_BYTES_MAX:
            raise FrameError(f"a frame of {length} bytes; the limit is {FRAME_BYTES_MAX}")
        stop = start + _LENGTH.size + length
        if stop > end:
            break
        bodies.append(data[start + _LENGTH.size : stop])
        start = stop
    return bodies, data[start:]


def wait(sock: socket.socket, event: int, deadline: float) -> None:
    """Sleep until the socket is ready for `event`, or broken; raises TimeoutError, OSError."""
    poller = select.poll()
    try:
        poller.register(sock, event)
    except ValueError as error:  # its descriptor is -1
        raise OSError(errno.EBADF, "this connection was closed") from error
    if not poller.poll(1000 * remaining_s(deadline)):
        raise TimeoutError("the socket was not ready within the deadline")


def remaining_s(deadline: float) -> float:
    """The time until the deadline; never zero."""
    # Zero would mean "do not block at all": an overdue call looks at least once.
    return max(0.001, deadline - time.monotonic())
