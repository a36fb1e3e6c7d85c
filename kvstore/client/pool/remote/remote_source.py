"""The layers of a node over the network: an await and the read of what it exposes, in one round
trip."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from tiffin.messenger.errors import GrantError
from tiffin.messenger.tcp.pending_connect import Caller
from tiffin.messenger.transport import Range
from tiffin.messenger.wire.frames import RANGES_MAX

from .... import deadlines
from ....deadlines import GRACE_S
from ....errors import (
    ClientClosed,
    DeadlineExceeded,
    ProtocolError,
    StaleLease,
)
from ....node.core import messages
from ...blocks.block_views import Payload
from ...blocks.selection_copy import cut
from ...connection.connection import raise_refusal
from ...streaming.layer_source import NodeSource, StreamedLayer
from ...streaming.prefetch import FetchTimedOut, Prefetcher
from .peer import as_ours

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from numpy.typing import NDArray

    from tiffin.messenger.tcp.stream import Stream

    from ....format.keys import Prefix
    from ....format.schema import HeadRange
    from ...blocks.block_views import Selection
    from ...verbs.block_verbs import Access
    from .peer import Peer

    Bytes = NDArray[np.uint8]

log = logging.getLogger(__name__)
T = TypeVar("T")


class RemoteSource(NodeSource):
    """A stream of a node over the network: layers are memory of this process, packed.

    An await and the read of what it exposes leave together, so a layer that the node has costs one
    round trip. The node refuses the read if the await was not fulfilled. A thread prefetches up to
    `ahead` layers; `end` waits for it.
    """

    def __init__(
        self,
        connect: Callable[[int], Peer],
        prefix: Prefix,
        access: Access,
        timeout_s: float,
        node: int,
        heads: HeadRange | None = None,
        ahead: int = 0,
    ) -> None:
        """`connect(node)` returns the node's `Peer`; called when the stream begins."""
        super().__init__(prefix, access, timeout_s, heads)
        self.node = node
        self._connect = connect
        self._connected: Peer | None = None
        self._prefetcher = Prefetcher(self._fetch, ahead, timeout_s) if ahead else None
        self._lock = threading.Lock()
        self._caller = Caller()  # of threads that wait for a TCP stream
        self._using: Stream | None = None  # the TCP stream of the request in flight
        self._given_up = False  # the caller has given up the request for a lease

    @property
    def _peer(self) -> Peer:
        if self._connected is None:
            self._connected = self._connect(self.node)
        return self._connected

    def _lease(self, request: messages.Lease) -> messages.Leased:
        deadline = time.monotonic() + deadlines.left_s(request.timeout_s + GRACE_S)
        with self._stream(deadline) as stream:
            self._use(stream)
            try:
                self._peer.queue(stream, request)
                stream.flush(deadline)
                answer = self._peer.receive(stream, request, deadline)
            finally:
                self._use(None)
        reply = raise_refusal(answer)
        assert isinstance(reply, messages.Leased)
        size = self.schema.extent_bytes
        if any(length != size for length in reply.lengths):
            self._peer.post(messages.Release(0, reply.lease))
            raise ProtocolError(f"extents of {reply.lengths} bytes; blocks have {size}")
        return reply

    def advance(self) -> StreamedLayer | None:
        """See `LayerSource.advance`."""
        self.begin()
        if self._prefetcher is None or not self.count:
            return super().advance()
        return self._prefetcher.take()

    def _fetch(self) -> StreamedLayer | None:
        """The next layer, in the prefetching thread."""
        try:
            return super().advance()
        except DeadlineExceeded as error:
            if self.overdue:
                raise FetchTimedOut(error) from error
            raise

    def _deadline_of(self, began: float) -> float:
        if self._prefetcher is None or self._interrupted:
            return super()._deadline_of(began)
        return self._prefetcher.due(began)

    def _ask(
        self, request: messages.Await, selection: Selection | None
    ) -> tuple[messages.Awaited, list[Any]]:
        ranges: list[Range] = []
        memories: list[Bytes] = []
        targets: list[Bytes] = []
        for block in range(self.count):
            memory, parts = self._place(block, selection)
            memories.append(memory)
            at = 0
            for part in parts:
                ranges.append(part)
                targets.append(memory[at : at + part.length])
                at += part.length
        reply = self._exchange(request, ranges, targets)
        if not reply.ready:
            return reply, []
        if selection is None:
            return reply, [memory.tobytes() for memory in memories]
        return reply, memories

    def _place(self, block: int, selection: Selection | None) -> tuple[Bytes, list[Range]]:
        """Memory for the bytes to read of a block, and their ranges in what the await exposes: all
        blocks' extents, or all blocks' awaited segments, end to end."""
        if selection is None:
            where = Range(block * self.schema.extent_bytes, self.schema.header_bytes)
            return np.empty(where.length, np.uint8), [where]
        base = block * selection.spans_bytes
        if self._verified[block] or selection.aligned:
            return np.empty(selection.spans_bytes, np.uint8), [Range(base, selection.spans_bytes)]
        parts = [Range(base + offset, length) for offset, length in selection.cuts()]
        return np.empty(selection.nbytes, np.uint8), parts

    def _payload(self, block: int, memory: Bytes, selection: Selection) -> Payload:
        if len(memory) != selection.nbytes:  # whole segments, which were read to verify them
            whole, memory = memory, np.empty(selection.nbytes, np.uint8)
            cut(memory, whole, selection)
        return Payload(memory, selection, packed=True)

    def _exchange(
        self, request: messages.Await, ranges: list[Range], targets: list[Bytes]
    ) -> messages.Awaited:
        """Send one await and its read. Raises the node's refusal, and the errors of a lost node."""
        deadline = time.monotonic() + deadlines.left_s(request.timeout_s + GRACE_S)
        with self._stream(deadline) as stream:
            self._use(stream)
            try:
                reply, served = self._converse(stream, request, ranges, targets, deadline)
            finally:
                self._use(None)
        raise_refusal(reply)
        assert isinstance(reply, messages.Awaited)
        if reply.ready and served < len(ranges):
            raise StaleLease(f"node {self._peer.label} did not send all that it reported is there")
        return reply

    def _converse(
        self,
        stream: Stream,
        request: messages.Await,
        ranges: list[Range],
        targets: list[Bytes],
        deadline: float,
    ) -> tuple[messages.AnyReply, int]:
        """The node's reply, and how many ranges it sent."""
        starts = range(0, len(ranges), RANGES_MAX)
        self._peer.queue(stream, request)
        for at in starts:
            stream.ask_read(request.lease, ranges[at : at + RANGES_MAX])
        stream.flush(deadline)
        reply = self._peer.receive(stream, request, deadline)
        # The bytes that follow get a deadline of their own: a layer of a long prompt has many.
        late = time.monotonic() + deadlines.left_s(self._timeout_s + GRACE_S)
        served = 0
        for at in starts:
            part, into = ranges[at : at + RANGES_MAX], targets[at : at + RANGES_MAX]
            try:
                served += stream.receive_data(part, into, late).ranges
            except GrantError as error:
                log.debug("nothing to read yet: %s", error)
        return reply, served

    @contextlib.contextmanager
    def _stream(self, deadline: float) -> Iterator[Stream]:
        """A TCP stream to the node; waits for one until the deadline or `_cut`."""
        peer = self._peer
        with self._caller.in_this_thread(), as_ours(peer.label), peer.stream(deadline) as stream:
            yield stream

    def _use(self, stream: Stream | None) -> None:
        """Set the TCP stream that `_cut` ends. Raises ClientClosed if the stream of layers has
        ended meanwhile."""
        with self._lock:
            if stream is not None and (self._ended or self._given_up):
                raise ClientClosed("this stream has ended; begin another")
            self._using = stream

    def _cut(self) -> None:
        """End the waits of all threads of this stream: for the node's reply, for a connection to
        it, or for the rest of a layer."""
        self._caller.cut()
        with self._lock:
            if self._using is not None:
                self._using.cut()

    def give_up(self) -> None:
        """See `LayerSource.give_up`: ends the request in flight."""
        with self._lock:
            self._given_up = True
        self._cut()

    def interrupt(self) -> None:
        """See `LayerSource.interrupt`."""
        super().interrupt()
        if self._prefetcher is not None:
            self._prefetcher.halt()

    def end(self) -> None:
        """See `LayerSource.end`. Returns when no thread receives anything any more."""
        if self._ended:
            return
        if self._prefetcher is not None:
            self._prefetcher.halt()
        # The release makes the node answer a parked await, so that its connection stays usable.
        super().end()
        if (
            self._prefetcher is not None
            and self._prefetcher.stop(self._cut)
            and self._leased is not None
        ):
            self._peer.post(messages.Release(0, self._leased.lease))  # the first may be lost

    def _work(self, action: Callable[[], Any]) -> Any:
        return action()

    def _post(self, request: messages.Request) -> None:
        self._peer.post(request)
