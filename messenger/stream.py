"""One connection: frames, and bulk bytes that never touch a buffer of ours.

Bytes go from the caller's arrays to the kernel with `sendmsg` (up to 1,024 pieces a call) and from
the kernel into the caller's arrays with `recvmsg_into` and MSG_WAITALL, so a transfer is a few
system calls, and Python's lock is free during each. What is buffered is what comes before the
bytes: headers and messages, read a few KiB at a time.

The socket blocks: Python's own timeouts make a socket non-blocking, and that knows no MSG_WAITALL.
`poll` waits for the first byte, exactly, and SO_RCVTIMEO and SO_SNDTIMEO let the kernel keep the
time for the others. A TLS connection can't use either and goes through Python's timeouts, a record
of 16 KiB at a time.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import threading
import time
from typing import TYPE_CHECKING

import numpy as np

from . import frames
from .cursor import PIECES_MAX, Cursor
from .errors import (
    FrameError,
    GrantError,
    MessengerError,
    PeerLost,
    RangeError,
    Stalled,
    TransferError,
    TransferTimeout,
)
from .frames import HEAD_BYTES, HEADER, Header, Kind
from .waiting import WAIT_S_MAX, WAIT_S_MIN, Gathering, Patience, Readiness
from .wire import FRAME_BYTES_MAX

if TYPE_CHECKING:
    import ssl
    from collections.abc import Sequence

    from .local import ByteArray
    from .transport import Arrived, Range, Served

# Bytes of one system call. Receiving: how late an arrival may be reported, and found in the cache
# by whoever hashes it; anything from 1 to 16 MiB was equally fast. Sending: how often progress is
# noticed; below 4 MiB it was a tenth slower.
_RECEIVE_BYTES_MAX = 2 << 20
_SEND_BYTES_MAX = 8 << 20
# So many nearly always fit into the socket's buffer: sent without asking whether it has room. A
# read of 64 KiB took 3 us less so; large ones were 3 % slower where they were tried first.
_SMALL_BYTES = 256 << 10
# What is read ahead while a header or message is expected. Bulk bytes that come along are copied
# once more, so it is small; a READ of 1,000 ranges (16 KiB) comes in two system calls.
_AHEAD_BYTES = 4 << 10
# The most that one TLS record holds (RFC 8446, 5.1).
_RECORD_BYTES = 16 << 10
# Before a thread sleeps on the next frame it looks for it so often, about 1 us each, yielding the
# core between. Waking a thread that sleeps takes 40 us and more in a virtual machine: a read of
# 64 KiB took 80 us where both ends were still looking, 120 us and more where one slept. A client
# that reads again and again comes back after 50 to 60 us, which 50 looks are too few for. On busy
# cores it made no difference; without yielding it did harm there.
_LOOKS = 100
# Numbers: the flags are enumerations in Python, and joining two takes a microsecond.
_PEEK = int(socket.MSG_PEEK) | int(socket.MSG_DONTWAIT)
_DONTWAIT, _WAITALL = int(socket.MSG_DONTWAIT), int(socket.MSG_WAITALL)
_HEADER_BYTES = HEADER.size


class Stream:
    """One blocking connection to a peer; one thread at a time uses it, and any may `cut` it.

    Frames are queued by `message`, `ask_read` and `ask_write`, sent by `flush`, and their answers
    received in the same order. Each error but GrantError and RangeError leaves the stream unusable
    (`idle` stays False): close it. A deadline is a `time.monotonic()`.
    """

    def __init__(self, sock: socket.socket) -> None:
        """Takes over a connected socket. Use PlainStream, or TlsStream after its handshake."""
        self._socket = sock
        self._out: list[memoryview] = []
        self._buffer = memoryview(bytearray(_AHEAD_BYTES))
        # [_start, _end) of the buffer was received and not yet used.
        self._start = self._end = 0
        self._reads_due = 0
        self._writes_due = 0
        self._midway = False  # inside a frame, or an error left us there
        self._closing = threading.Lock()
        self._cut = False
        self.message_bytes_max = FRAME_BYTES_MAX
        self.received_bytes = 0
        self.sent_bytes = 0

    # -- asking -----------------------------------------------------------------------------------

    def message(self, body: bytes) -> None:
        """Queue a message. Which ones are answered is between the applications."""
        self._out += (memoryview(frames.message_header(len(body))), memoryview(body))

    def ask_read(self, grant: int, ranges: Sequence[Range]) -> None:
        """Queue a READ of up to 65,536 ranges; its answer is taken by `receive_data`."""
        self._out.append(memoryview(frames.request(Kind.READ, grant, ranges)))
        self._reads_due += 1

    def ask_write(self, grant: int, ranges: Sequence[Range], sources: Sequence[ByteArray]) -> None:
        """Queue a WRITE and its bytes, which must stay as they are until `flush` has returned.

        Raises RangeError for sources that do not fit, and MessengerError while the answer to an
        `ask_read` is due: both ends would send, and neither receive.
        """
        self.ask_write_views(grant, ranges, views_of(ranges, sources, writable=False))

    def ask_write_views(
        self, grant: int, ranges: Sequence[Range], views: Sequence[memoryview]
    ) -> None:
        """`ask_write` of what `views_of` made."""
        if self._reads_due:
            raise MessengerError("receive the data that was asked for before writing")
        self._out += (memoryview(frames.request(Kind.WRITE, grant, ranges)), *views)
        self._writes_due += 1

    def flush(self, deadline: float, stall_s: float | None = None) -> None:
        """Send all that is queued. Raises PeerLost, TransferTimeout, Stalled."""
        if self._out:
            self._midway = True
            out, self._out = self._out, []
            self._send(out, deadline, stall_s)
            self._midway = False

    # -- receiving --------------------------------------------------------------------------------

    def receive_message(self, deadline: float) -> bytes:
        """The next message. Raises PeerLost, TransferTimeout, FrameError."""
        self._midway = True
        header = self._receive_header(deadline, Kind.MESSAGE)
        body = self._receive_body(header.body_bytes, deadline, None)
        self._midway = False
        return bytes(body)

    def receive_data(
        self,
        ranges: Sequence[Range],
        targets: Sequence[ByteArray],
        deadline: float,
        arrived: Arrived | None = None,
        stall_s: float | None = None,
    ) -> Served:
        """The answer to one `ask_read` of the same ranges, into targets of their lengths.

        Raises RangeError for targets that do not fit, GrantError (the stream lives on), PeerLost,
        TransferTimeout, FrameError, and Stalled after `stall_s` without a byte (or up to twice as
        long: the kernel does not say when in a call the last byte came).
        """
        views = views_of(ranges, targets, writable=True)
        return self.receive_data_views(views, deadline, arrived, stall_s)

    def receive_data_views(
        self,
        views: list[memoryview],
        deadline: float,
        arrived: Arrived | None = None,
        stall_s: float | None = None,
    ) -> Served:
        """`receive_data` into what `views_of` made."""
        self._midway = True
        served = self._receive_answer(Kind.DATA, deadline, stall_s)
        self._reads_due -= 1
        cursor = Cursor(views if served.ranges == len(views) else views[: served.ranges])
        if served.ranges > len(views) or served.nbytes != cursor.left:
            raise FrameError(f"data of {served} for {len(views)} ranges")
        self._receive(cursor, deadline, stall_s, arrived)
        self._midway = False
        return served

    def receive_written(self, deadline: float, stall_s: float | None = None) -> Served:
        """The answer to one `ask_write`. Raises GrantError (the stream lives on), PeerLost,
        TransferTimeout, FrameError, and Stalled after `stall_s` without a byte."""
        self._midway = True
        served = self._receive_answer(Kind.WRITTEN, deadline, stall_s)
        self._writes_due -= 1
        self._midway = False
        return served

    def receive_frame(
        self, deadline: float, stall_s: float | None
    ) -> tuple[Kind, bytes | memoryview]:
        """The next frame of any kind: the serving side's way. Waits for its first byte until the
        deadline, and for later ones no longer than `stall_s`."""
        if self._start == self._end:
            self._receive_ahead(deadline, None, _AHEAD_BYTES)
        header = self._receive_header(deadline, None, stall_s)
        return header.kind, self._receive_body(header.body_bytes, deadline, stall_s)

    def receive_bytes(
        self, views: list[memoryview], deadline: float, stall_s: float | None
    ) -> None:
        """Fill `views` with the raw bytes that come next: the serving side's way."""
        self._receive(Cursor(views), deadline, stall_s)

    def send_frame(self, head: bytes, views: Sequence[memoryview] = ()) -> None:
        """Queue a frame of the serving side, and the raw bytes after it."""
        self._out += (memoryview(head), *views)

    @property
    def ahead_bytes(self) -> int:
        """Bytes of the next frame that were received already."""
        return self._end - self._start

    @property
    def idle(self) -> bool:
        """Whether somebody else can use the stream: nothing is queued, due, or half received. That
        all messages that have answers got them is for the user to know."""
        pending = self._out or self._reads_due or self._writes_due or self.ahead_bytes
        return not (self._midway or pending or self._cut)

    # -- ending -----------------------------------------------------------------------------------

    def cut(self) -> None:
        """End the connection, from any thread: whoever waits on it gets PeerLost now."""
        with self._closing:
            self._cut = True
            # A lock: the descriptor may be closed, and then be another's.
            if self._socket.fileno() >= 0:
                with contextlib.suppress(OSError):  # the peer was first
                    socket.socket.shutdown(self._socket, socket.SHUT_RDWR)

    def close(self) -> None:
        """Close the socket. Not while another thread uses the stream: `cut` first."""
        with self._closing:
            self._cut = True
            self._socket.close()

    def forget(self) -> None:
        """In a forked child: close the child's descriptor; the connection stays the parent's."""
        self._closing = threading.Lock()  # another thread may have held it
        self.close()

    def alive(self) -> bool:
        """Whether an idle stream still leads to a peer that has nothing to say. Never waits."""
        raise NotImplementedError

    def hung_up(self) -> bool:
        """Whether the peer has closed its end, though bytes of it may still be to be read. For the
        thread that uses the stream, while it waits for something else. Never waits."""
        descriptor = self._socket.fileno()
        if descriptor < 0:  # closed, or no socket of the kernel's
            return self._cut
        poller = select.poll()
        poller.register(descriptor, select.POLLRDHUP)
        return bool(poller.poll(0))

    # -- the wire ---------------------------------------------------------------------------------

    def _receive_answer(self, kind: Kind, deadline: float, stall_s: float | None) -> Served:
        if not self.ahead_bytes:
            self._receive_ahead(deadline, stall_s, HEAD_BYTES)
        if self.ahead_bytes >= HEAD_BYTES:  # nearly always: all of it, and a good answer
            whole = frames.parse_whole_answer(self._buffer, self._start, kind)
            if whole is not None:
                self._start += HEAD_BYTES
                return whole
        header = self._receive_header(deadline, kind, stall_s, HEAD_BYTES)
        served, refused = frames.parse_answer(
            self._receive_body(header.body_bytes, deadline, stall_s)
        )
        if refused is None:
            return served
        if kind is Kind.DATA:
            self._reads_due -= 1
        else:
            self._writes_due -= 1
        self._midway = False
        raise GrantError(refused)

    def _receive_header(
        self,
        deadline: float,
        wanted: Kind | None,
        stall_s: float | None = None,
        most: int = _AHEAD_BYTES,
    ) -> Header:
        """Five bytes. `most` limits what else comes into the buffer: no raw bytes, if they are
        all that can follow."""
        while self._end - self._start < _HEADER_BYTES:
            self._receive_ahead(deadline, stall_s, most)
        header = frames.parse_header(self._buffer, self.message_bytes_max, self._start)
        if wanted is not None and header.kind is not wanted:
            raise FrameError(f"a {header.kind.name} frame instead of {wanted.name}")
        self._start += _HEADER_BYTES
        return header

    def _receive_ahead(self, deadline: float, stall_s: float | None, most: int) -> None:
        """Some bytes into the buffer, which holds less than a header."""
        if self._start == self._end:
            self._start = self._end = 0
        elif self._start:
            rest = bytes(self._buffer[self._start : self._end])
            self._buffer[: len(rest)] = rest
            self._start, self._end = 0, len(rest)
        room = self._buffer[self._end : most]
        self._end += self._look(room) or self._patiently([room], deadline, stall_s)

    def _receive_body(
        self, nbytes: int, deadline: float, stall_s: float | None
    ) -> bytes | memoryview:
        start = self._start
        if nbytes <= self._end - start:
            self._start = start + nbytes
            return bytes(self._buffer[start : start + nbytes])
        # Not zeroed: memory is taken as bytes arrive, not as they are announced.
        body = np.empty(nbytes, np.uint8).data
        self._receive(Cursor([body]), deadline, stall_s)
        return body

    def _receive(
        self,
        cursor: Cursor,
        deadline: float,
        stall_s: float | None,
        arrived: Arrived | None = None,
    ) -> None:
        """Fill what is left of the cursor: from the buffer, then from the socket."""
        done = 0
        if self._start < self._end:
            self._start += cursor.fill(self._buffer[self._start : self._end])
        large = cursor.left > _RECEIVE_BYTES_MAX
        while True:
            if arrived is not None:
                for index in range(done, cursor.index):
                    arrived(index)
                done = cursor.index
            if not cursor.left:
                return
            try:
                most = self._portion(cursor.left) if large else _RECEIVE_BYTES_MAX
                views = cursor.batch(most)
                nbytes = 0 if large else self._take(views)
                cursor.advance(nbytes or self._patiently(views, deadline, stall_s, whole=True))
            except TransferError as error:
                error.served = cursor.served()
                raise

    def _patiently(
        self,
        views: list[memoryview],
        deadline: float,
        stall_s: float | None,
        *,
        whole: bool = False,
    ) -> int:
        """Receive at least one byte, and if `whole`, not much less than all of `views`."""
        now = time.monotonic()
        limit = deadline if stall_s is None else min(deadline, now + stall_s)
        while now < limit:
            if self._cut:  # what the kernel still has would only come in vain
                raise self._lost("")
            nbytes = self._receive_some(views, limit - now, whole=whole)
            if nbytes:
                self.received_bytes += nbytes
                return nbytes
            now = time.monotonic()
        raise _late("received", stalled=limit < deadline)

    def _send(self, views: list[memoryview], deadline: float, stall_s: float | None) -> None:
        cursor = None
        if len(views) <= PIECES_MAX:
            # Most are sent by one call: messages, requests, answers of some KiB.
            total = sum(map(len, views))
            if total <= _SEND_BYTES_MAX:
                nbytes = self._send_patiently(views, deadline, stall_s)
                if nbytes == total:
                    return
                cursor = Cursor(views)
                cursor.advance(nbytes)
        cursor = cursor or Cursor(views)
        while cursor.left:
            batch = cursor.batch(_SEND_BYTES_MAX)
            cursor.advance(self._send_patiently(batch, deadline, stall_s))

    def _send_patiently(
        self, views: list[memoryview], deadline: float, stall_s: float | None
    ) -> int:
        """Send at least one byte, and not much less than all of `views`."""
        now = time.monotonic()
        limit = deadline if stall_s is None else min(deadline, now + stall_s)
        while now < limit:
            nbytes = self._send_some(views, limit - now)
            if nbytes:
                self.sent_bytes += nbytes
                return nbytes
            now = time.monotonic()
        raise _late("sent", stalled=limit < deadline)

    def _lost(self, why: object) -> PeerLost:
        return PeerLost("the connection was cut" if self._cut else f"the connection broke: {why}")

    def _look(self, view: memoryview) -> int:
        """What is here already, or comes in the next few microseconds; else 0. Raises PeerLost."""
        return 0

    def _take(self, views: list[memoryview]) -> int:
        """What is here already; else 0. Raises PeerLost."""
        return 0

    def _portion(self, left_bytes: int) -> int:
        """So many raw bytes are to come. How many of them the next call should receive, which may
        then be woken for many at once. Raises PeerLost."""
        return _RECEIVE_BYTES_MAX

    def _receive_some(self, views: list[memoryview], wait_s: float, *, whole: bool) -> int:
        """Bytes received, 0 if none came in `wait_s` or a little earlier. Raises PeerLost."""
        raise NotImplementedError

    def _send_some(self, views: list[memoryview], wait_s: float) -> int:
        """Bytes sent, 0 if none went in `wait_s` or a little earlier. Raises PeerLost."""
        raise NotImplementedError


class PlainStream(Stream):
    """TCP without encryption."""

    def __init__(self, sock: socket.socket) -> None:
        """Takes over a connected socket."""
        super().__init__(sock)
        sock.settimeout(None)
        self._receive_wait = Patience(sock, socket.SO_RCVTIMEO)
        self._send_wait = Patience(sock, socket.SO_SNDTIMEO)
        self._gathering = Gathering(sock)
        self._readable = Readiness(sock, select.POLLIN)
        self._writable = Readiness(sock, select.POLLOUT)

    def alive(self) -> bool:
        """See `Stream.alive`."""
        try:
            self._socket.recv(1, _PEEK)
        except BlockingIOError:
            return True
        except OSError:
            return False
        return False  # it has closed, or says something that nobody asked for

    def _look(self, view: memoryview) -> int:
        receive = self._socket.recv_into
        try:
            for _ in range(_LOOKS):
                try:
                    nbytes = receive(view, 0, _DONTWAIT)
                except BlockingIOError:
                    os.sched_yield()
                else:
                    break
            else:
                return 0
        except OSError as error:
            raise self._lost(error) from error
        if not nbytes:
            raise self._lost("the peer closed it")
        self.received_bytes += nbytes
        return nbytes

    def _portion(self, left_bytes: int) -> int:
        try:
            return self._gathering.portion(left_bytes, _RECEIVE_BYTES_MAX)
        except OSError as error:
            raise self._lost(error) from error

    def _take(self, views: list[memoryview]) -> int:
        nbytes = self._receive_call(views, _DONTWAIT)
        self.received_bytes += nbytes
        return nbytes

    def _receive_some(self, views: list[memoryview], wait_s: float, *, whole: bool) -> int:
        left_s = self._readable.within(wait_s)
        if not left_s:  # what is there may be less than Gathering waits for
            return self._receive_call(views, _DONTWAIT)
        return self._receive_call(views, _WAITALL if whole else 0, left_s)

    def _receive_call(self, views: list[memoryview], flags: int, wait_s: float = 0.0) -> int:
        try:
            if wait_s:
                self._receive_wait.allow(wait_s)
            if len(views) == 1:
                nbytes = self._socket.recv_into(views[0], 0, flags)
            else:
                nbytes = self._socket.recvmsg_into(views, 0, flags)[0]
        except BlockingIOError:
            return 0
        except OSError as error:
            raise self._lost(error) from error
        if not nbytes:
            raise self._lost("the peer closed it")
        return nbytes

    def _send_some(self, views: list[memoryview], wait_s: float) -> int:
        if sum(map(len, views)) <= _SMALL_BYTES:
            nbytes = self._send_call(views, _DONTWAIT)
            if nbytes:
                return nbytes
        left_s = self._writable.within(wait_s)
        if not left_s:  # room for some bytes does not count as room before it is a third of all
            return self._send_call(views, _DONTWAIT)
        return self._send_call(views, 0, left_s)

    def _send_call(self, views: list[memoryview], flags: int, wait_s: float = 0.0) -> int:
        try:
            if wait_s:
                self._send_wait.allow(wait_s)
            return self._socket.sendmsg(views, (), flags)
        except BlockingIOError:
            return 0
        except OSError as error:
            raise self._lost(error) from error


class TlsStream(Stream):
    """TCP inside TLS, after the handshake. Encryption costs more than anything saved here."""

    _socket: ssl.SSLSocket

    def __init__(self, sock: ssl.SSLSocket) -> None:
        """Takes over a socket that is connected and has shaken hands."""
        super().__init__(sock)
        self._record = memoryview(bytearray(_RECORD_BYTES))

    def alive(self) -> bool:
        """See `Stream.alive`. Unread bytes may be TLS's own, such as session tickets."""
        try:
            self._socket.settimeout(0.0)
            return bool(socket.socket.recv(self._socket, 1, socket.MSG_PEEK))
        except BlockingIOError:
            return True
        except OSError:
            return False

    def _receive_some(self, views: list[memoryview], wait_s: float, *, whole: bool) -> int:
        if len(views) > 1 and len(views[0]) < _RECORD_BYTES:
            # Many small ones: a record at once, and copied, instead of a call for each.
            room = self._record[: min(_RECORD_BYTES, sum(map(len, views)))]
            nbytes = self._receive_record(room, wait_s)
            Cursor(views).fill(room[:nbytes])
            return nbytes
        return self._receive_record(views[0], wait_s)

    def _receive_record(self, view: memoryview, wait_s: float) -> int:
        try:
            self._socket.settimeout(min(max(wait_s, WAIT_S_MIN), WAIT_S_MAX))
            nbytes = self._socket.recv_into(view)
        except TimeoutError:
            return 0
        except OSError as error:
            raise self._lost(error) from error
        if not nbytes:
            raise self._lost("the peer closed it")
        return nbytes

    def _send_some(self, views: list[memoryview], wait_s: float) -> int:
        # Small ones together: each call makes a record.
        data = views[0]
        if len(views) > 1 and len(data) < _RECORD_BYTES:
            data = _joined(views)
        try:
            self._socket.settimeout(min(max(wait_s, WAIT_S_MIN), WAIT_S_MAX))
            return self._socket.send(data)
        except TimeoutError:
            return 0
        except OSError as error:
            raise self._lost(error) from error


def _late(what: str, *, stalled: bool) -> TransferTimeout:
    if stalled:
        return Stalled(f"no byte was {what} for the stall time: the peer hangs, or is cut off")
    return TransferTimeout(f"not all bytes were {what} by the deadline: allow more time, or less")


def _joined(views: list[memoryview]) -> memoryview:
    """The leading bytes of `views`, one TLS record of them, copied together."""
    joined = bytearray()
    for view in views:
        joined += view[: _RECORD_BYTES - len(joined)]
        if len(joined) == _RECORD_BYTES:
            break
    return memoryview(joined)


def views_of(
    ranges: Sequence[Range], arrays: Sequence[ByteArray], *, writable: bool
) -> list[memoryview]:
    """The arrays' bytes. Raises RangeError where they are not what the ranges need."""
    if len(ranges) != len(arrays):
        raise RangeError(f"{len(ranges)} ranges for {len(arrays)} arrays")
    views = [array.data for array in arrays]
    for (offset, length), view in zip(ranges, views, strict=True):
        if offset < 0 or offset >> 64:
            raise RangeError(f"an offset of {offset}; offsets are numbers below 2**64")
        if view.nbytes != length or view.format != "B" or view.ndim != 1 or not view.c_contiguous:
            raise RangeError(
                f"a range of {length} bytes needs a contiguous uint8 array of as many, "
                f"not one of shape {view.shape} and format {view.format!r}"
            )
        if writable and view.readonly:
            raise RangeError("a target that is read-only; pass memory that can be written")
    return views
