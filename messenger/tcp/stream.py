"""One connection: frames, and zero-copy transfer of bulk bytes.

Bytes go from the caller's arrays to the kernel with `sendmsg` (up to 1,024 pieces a call) and from
the kernel into the caller's arrays with `recvmsg_into` and MSG_WAITALL, so a transfer is a few
system calls, and the thread releases the GIL during each. Only headers and messages, which precede
the bulk bytes, are buffered, a few KiB at a time.

The socket is blocking: Python's own timeouts make a socket non-blocking, and then the kernel
ignores MSG_WAITALL. `poll` waits for the first byte with an exact timeout, and the kernel's
SO_RCVTIMEO and SO_SNDTIMEO limit the wait for the other bytes. A TLS connection can use neither
(`tls_stream.py`).
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

from ..errors import (
    FrameError,
    GrantError,
    MessengerError,
    PeerLost,
    TransferError,
    late,
)
from ..transport import NOTHING
from ..wire import frames
from ..wire.cursor import PIECES_MAX, Cursor
from ..wire.frame_tags import TAG_BYTES
from ..wire.frames import HEAD_BYTES, HEADER, FrameHeader, Kind
from ..wire.framing import FRAME_BYTES_MAX
from ..wire.ranges import views_of
from .socket_timeouts import Gathering, Patience, Readiness

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ..shm.host_copy import ByteArray
    from ..transport import Arrived, Range, Served
    from ..wire.frame_tags import BytesTag, FrameSeals

# Bytes of one system call. Receiving: the limit decides how late an arrival is reported, and so
# whether a thread that hashes the bytes finds them in the CPU cache; anything from 1 to 16 MiB was
# equally fast. Sending: the limit decides how often progress is noticed; below 4 MiB it was a tenth
# slower.
_RECEIVE_BYTES_MAX = 2 << 20
_SEND_BYTES_MAX = 8 << 20
# So many bytes nearly always fit into the socket's buffer, so `_send_some` sends them without
# polling for room first. That made a read of 64 KiB 3 us faster; large reads were 3 % slower with
# an attempt before the poll.
_SMALL_BYTES = 256 << 10
# Size of the read-ahead buffer for headers and messages. Bulk bytes that land in it are copied once
# more, so it is small; receiving a READ of 1,000 ranges (16 KiB) takes two system calls.
_AHEAD_BYTES = 4 << 10
# Busy polling: before a thread sleeps until the next frame, it polls the socket so many times,
# about 1 us each, and yields the core in between. Waking a sleeping thread takes 40 us and more in
# a virtual machine: a read of 64 KiB took 80 us where both ends were still polling, 120 us and more
# where one slept. A client that reads repeatedly sends its next request after 50 to 60 us, for
# which 50 polls are too few. On busy cores polling made no difference; without yielding it did harm
# there.
_LOOKS = 100
# Limit of the busy polling. Where other threads want the core, each poll may take as long as one of
# them keeps it, and all polls together longer than the call's deadline allows: after this time the
# thread sleeps instead.
_LOOKING_S = 0.001
# As integers: the flags are enumerations in Python, and joining two takes a microsecond.
_PEEK = int(socket.MSG_PEEK) | int(socket.MSG_DONTWAIT)
_DONTWAIT, _WAITALL = int(socket.MSG_DONTWAIT), int(socket.MSG_WAITALL)
_HEADER_BYTES = HEADER.size


class Stream:
    """One blocking connection to a peer. Not thread-safe, but any thread may `cut` it.

    `message`, `ask_read` and `ask_write` queue frames, `flush` sends them, and the answers are
    received in the same order. Each error but GrantError and RangeError leaves the stream unusable
    (`idle` stays False): close it. A deadline is a `time.monotonic()`.
    """

    def __init__(self, sock: socket.socket) -> None:
        """Takes over a connected socket. Use PlainStream, or TlsStream after its handshake."""
        self._socket = sock
        self._out: list[memoryview] = []
        self._buffer = memoryview(bytearray(_AHEAD_BYTES))
        # [_start, _end) of the buffer was received and is not consumed yet.
        self._start = self._end = 0
        self._reads_due = 0
        self._writes_due = 0
        self._midway = False  # inside a frame, or left there by an error
        self._seals: FrameSeals | None = None
        self._head_bytes = HEAD_BYTES  # size of an answer's head, with its tag
        self._closing = threading.Lock()
        self._cut = False
        self.message_bytes_max = FRAME_BYTES_MAX

    def protect(self, seals: FrameSeals) -> None:
        """Give each later frame a tag, in both directions; frames queued before have none."""
        self._seals = seals
        self._head_bytes = HEAD_BYTES + TAG_BYTES

    # -- asking -----------------------------------------------------------------------------------

    def message(self, body: bytes) -> None:
        """Queue a message. The applications define which messages have an answer."""
        header = frames.message_header(len(body))
        self._out += (memoryview(header), memoryview(body))
        if self._seals is not None:
            self._out.append(memoryview(self._seals.sending.tag(header, body)))

    def ask_read(self, grant: int, ranges: Sequence[Range]) -> None:
        """Queue a READ of up to 65,536 ranges; `receive_data` receives its answer."""
        self.send_frame(frames.request(Kind.READ, grant, ranges))
        self._reads_due += 1

    def ask_write(self, grant: int, ranges: Sequence[Range], sources: Sequence[ByteArray]) -> None:
        """Queue a WRITE and its bytes, which the caller must not change until `flush` has returned.

        Raises RangeError for sources that do not fit, and MessengerError while the answer to an
        `ask_read` is due: both ends would send and neither receive, a deadlock.
        """
        views = views_of(ranges, sources, writable=False)
        if self._reads_due:
            raise MessengerError("receive the data that was asked for before writing")
        self.send_frame(frames.request(Kind.WRITE, grant, ranges), views)
        self._writes_due += 1

    def flush(self, deadline: float, stall_s: float | None = None) -> None:
        """Send all queued frames. Raises PeerLost, TransferTimeout, Stalled."""
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
        body = self._receive_body(header, deadline, None)
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

        Raises RangeError for targets that do not fit, GrantError (the stream stays usable),
        PeerLost, TransferTimeout, FrameError, and Stalled after `stall_s` without a byte (or up to
        twice as long: the kernel does not report when in a call the last byte arrived).
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
        """`receive_data` into the views that `views_of` made."""
        self._midway = True
        served = self._receive_answer(Kind.DATA, deadline, stall_s)
        self._reads_due -= 1
        cursor = Cursor(views if served.ranges == len(views) else views[: served.ranges])
        if served.ranges > len(views) or served.nbytes != cursor.left:
            raise FrameError(f"data of {served} for {len(views)} ranges")
        shown = self.begin_bytes()
        if shown is None:
            self._receive(cursor, deadline, stall_s, arrived)
        else:
            self._receive_shown(shown, views[: served.ranges], deadline, stall_s, arrived)
        self._midway = False
        return served

    def receive_written(self, deadline: float, stall_s: float | None = None) -> Served:
        """The answer to one `ask_write`. Raises GrantError (the stream stays usable), PeerLost,
        TransferTimeout, FrameError, and Stalled after `stall_s` without a byte."""
        self._midway = True
        served = self._receive_answer(Kind.WRITTEN, deadline, stall_s)
        self._writes_due -= 1
        self._midway = False
        return served

    def receive_frame(
        self, deadline: float, stall_s: float | None
    ) -> tuple[Kind, bytes | memoryview]:
        """The next frame of any kind, for the serving side. Waits for its first byte until the
        deadline, and for later bytes no longer than `stall_s`."""
        if self._start == self._end:
            self._receive_ahead(deadline, None, _AHEAD_BYTES)
        header = self._receive_header(deadline, None, stall_s)
        return header.kind, self._receive_body(header, deadline, stall_s)

    def receive_bytes(
        self, views: list[memoryview], deadline: float, stall_s: float | None
    ) -> None:
        """Fill `views` with the raw bytes that come next, for the serving side."""
        self._receive(Cursor(views), deadline, stall_s)

    def begin_bytes(self) -> BytesTag | None:
        """The tag to update with all raw bytes that follow a frame; None if they have no tag."""
        seals = self._seals
        return seals.receiving.of_bytes() if seals is not None and seals.of_bytes else None

    def end_bytes(self, shown: BytesTag, deadline: float, stall_s: float | None) -> None:
        """Receive the tag that follows raw bytes. Raises SealError if it does not match them."""
        tag = memoryview(bytearray(TAG_BYTES))
        self._receive(Cursor([tag]), deadline, stall_s)
        shown.check(tag)

    def send_frame(self, head: bytes, views: Sequence[memoryview] | None = None) -> None:
        """Queue a frame, and the raw bytes after it, if its kind has some (`views`)."""
        seals = self._seals
        if seals is None:
            self._out += (memoryview(head), *(views or ()))
            return
        self._out.append(memoryview(head + seals.sending.tag(head)))
        if views is not None:
            self._out += views
            if seals.of_bytes:
                shown = seals.sending.of_bytes()
                shown.update(views)
                self._out.append(memoryview(shown.tag()))

    @property
    def ahead_bytes(self) -> int:
        """Bytes of the next frame that were received already."""
        return self._end - self._start

    @property
    def idle(self) -> bool:
        """Whether another caller can use the stream: nothing is queued, due, or half received. The
        stream does not track messages: the caller must have received all answers to them."""
        pending = self._out or self._reads_due or self._writes_due or self.ahead_bytes
        return not (self._midway or pending or self._cut)

    # -- ending -----------------------------------------------------------------------------------

    def cut(self) -> None:
        """End the connection, from any thread: a thread that waits on it gets PeerLost at once."""
        with self._closing:
            self._cut = True
            # Under the lock, because the kernel may reuse the descriptor once it is closed.
            if self._socket.fileno() >= 0:
                with contextlib.suppress(OSError):  # the peer has closed it first
                    socket.socket.shutdown(self._socket, socket.SHUT_RDWR)

    def close(self) -> None:
        """Close the socket. Not allowed while another thread uses the stream: `cut` it first."""
        with self._closing:
            self._cut = True
            self._socket.close()

    def forget(self) -> None:
        """In a forked child: close the child's descriptor; the connection stays the parent's."""
        self._closing = threading.Lock()  # another thread may have held it
        self.close()

    def alive(self) -> bool:
        """Whether an idle stream is still connected and has no unread bytes. Never waits."""
        raise NotImplementedError

    @property
    def peer_address(self) -> tuple[str, int]:
        """The peer's numeric address and port. Raises PeerLost."""
        try:
            host, port = self._socket.getpeername()[:2]
        except OSError as error:
            raise self._lost(error) from error
        return host, port

    @property
    def peer_certificate(self) -> bytes:
        """The peer's certificate, in DER; `b""` without TLS."""
        return b""

    def hung_up(self) -> bool:
        """Whether the peer has closed its end, even if unread bytes remain. For the thread that
        uses the stream, while it waits for something else. Never waits."""
        descriptor = self._socket.fileno()
        if descriptor < 0:  # closed, or not a kernel socket
            return self._cut
        poller = select.poll()
        poller.register(descriptor, select.POLLRDHUP)
        return bool(poller.poll(0))

    # -- the wire ---------------------------------------------------------------------------------

    def _receive_answer(self, kind: Kind, deadline: float, stall_s: float | None) -> Served:
        if not self.ahead_bytes:
            self._receive_ahead(deadline, stall_s, self._head_bytes)
        if self.ahead_bytes >= self._head_bytes:  # nearly always: a whole, successful answer
            whole = frames.parse_whole_answer(self._buffer, self._start, kind)
            if whole is not None:
                end = self._start + HEAD_BYTES
                if self._seals is not None:
                    tag = self._buffer[end : end + TAG_BYTES]
                    self._seals.receiving.check(tag, self._buffer[self._start : end])
                self._start += self._head_bytes
                return whole
        header = self._receive_header(deadline, kind, stall_s, self._head_bytes)
        served, refused = frames.parse_answer(self._receive_body(header, deadline, stall_s))
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
    ) -> FrameHeader:
        """Receive the header, five bytes. `most` limits how far the buffer is filled, so that raw
        bytes stay out of it where only they can follow."""
        while self._end - self._start < _HEADER_BYTES:
            self._receive_ahead(deadline, stall_s, most)
        header = frames.parse_header(self._buffer, self.message_bytes_max, self._start)
        if wanted is not None and header.kind is not wanted:
            raise FrameError(f"a {header.kind.name} frame instead of {wanted.name}")
        self._start += _HEADER_BYTES
        return header

    def _receive_ahead(self, deadline: float, stall_s: float | None, most: int) -> None:
        """Receive some bytes into the buffer, which has less than a header."""
        if self._start == self._end:
            self._start = self._end = 0
        elif self._start:
            rest = bytes(self._buffer[self._start : self._end])
            self._buffer[: len(rest)] = rest
            self._start, self._end = 0, len(rest)
        room = self._buffer[self._end : most]
        self._end += self._look(room) or self._patiently([room], deadline, stall_s)

    def _receive_body(
        self, header: FrameHeader, deadline: float, stall_s: float | None
    ) -> bytes | memoryview:
        """Receive the body after the header, and check its tag if it has one. Raises SealError."""
        if self._seals is None:
            return self._receive_some_bytes(header.body_bytes, deadline, stall_s)
        sealed = self._receive_some_bytes(header.body_bytes + TAG_BYTES, deadline, stall_s)
        body, tag = sealed[: header.body_bytes], sealed[header.body_bytes :]
        self._seals.receiving.check(tag, HEADER.pack(1 + header.body_bytes, header.kind), body)
        return body

    def _receive_shown(
        self,
        shown: BytesTag,
        views: list[memoryview],
        deadline: float,
        stall_s: float | None,
        arrived: Arrived | None,
    ) -> None:
        """Receive raw bytes and their tag. They count as arrived only once the tag is checked."""
        try:
            self._receive(Cursor(views), deadline, stall_s)
            shown.update(views)
            self.end_bytes(shown, deadline, stall_s)
        except TransferError as error:
            error.served = NOTHING
            raise
        if arrived is not None:
            for index in range(len(views)):
                arrived(index)

    def _receive_some_bytes(
        self, nbytes: int, deadline: float, stall_s: float | None
    ) -> bytes | memoryview:
        start = self._start
        if nbytes <= self._end - start:
            self._start = start + nbytes
            return bytes(self._buffer[start : start + nbytes])
        # Not zeroed: the kernel allocates pages as bytes arrive, not as they are announced.
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
            if self._cut:  # bytes left in the kernel's buffer are of no use
                raise self._lost("")
            nbytes = self._receive_some(views, limit - now, whole=whole)
            if nbytes:
                return nbytes
            now = time.monotonic()
        raise late("received", stalled=limit < deadline)

    def _send(self, views: list[memoryview], deadline: float, stall_s: float | None) -> None:
        cursor = None
        if len(views) <= PIECES_MAX:
            # One call sends most of them: messages, requests, answers of some KiB.
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
                return nbytes
            now = time.monotonic()
        raise late("sent", stalled=limit < deadline)

    def _lost(self, why: object) -> PeerLost:
        return PeerLost("the connection was cut" if self._cut else f"the connection broke: {why}")

    def _look(self, view: memoryview) -> int:
        """Receive bytes that are here already or come within the busy polling; else 0. Raises
        PeerLost."""
        return 0

    def _take(self, views: list[memoryview]) -> int:
        """Receive bytes that are here already, without waiting; else 0. Raises PeerLost."""
        return 0

    def _portion(self, left_bytes: int) -> int:
        """How many of the `left_bytes` raw bytes to come the next call should receive; the kernel
        may wake that call for many packets at once (`Gathering`). Raises PeerLost."""
        return _RECEIVE_BYTES_MAX

    def _receive_some(self, views: list[memoryview], wait_s: float, *, whole: bool) -> int:
        """Receive bytes; 0 if none came within `wait_s`, or a little less. Raises PeerLost."""
        raise NotImplementedError

    def _send_some(self, views: list[memoryview], wait_s: float) -> int:
        """Send bytes; 0 if none were sent within `wait_s`, or a little less. Raises PeerLost."""
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
        return False  # the peer has closed the connection, or sent bytes without a request

    def _look(self, view: memoryview) -> int:
        receive = self._socket.recv_into
        give_up = time.monotonic() + _LOOKING_S
        try:
            for _ in range(_LOOKS):
                try:
                    nbytes = receive(view, 0, _DONTWAIT)
                except BlockingIOError:
                    os.sched_yield()
                    if time.monotonic() > give_up:
                        return 0
                else:
                    break
            else:
                return 0
        except OSError as error:
            raise self._lost(error) from error
        if not nbytes:
            raise self._lost("the peer closed it")
        return nbytes

    def _portion(self, left_bytes: int) -> int:
        try:
            return self._gathering.portion(left_bytes, _RECEIVE_BYTES_MAX)
        except OSError as error:
            raise self._lost(error) from error

    def _take(self, views: list[memoryview]) -> int:
        return self._receive_call(views, _DONTWAIT)

    def _receive_some(self, views: list[memoryview], wait_s: float, *, whole: bool) -> int:
        left_s = self._readable.within(wait_s)
        if not left_s:  # fewer bytes than the low-water mark of Gathering may be there
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
        if not left_s:  # `poll` reports room only from a third of the buffer on
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
