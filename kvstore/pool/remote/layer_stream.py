"""Streams of a pool: layers from a remote node, the choice of the node, and the takeover by another
node when it is lost."""

from __future__ import annotations

import asyncio
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

from ... import deadlines
from ...blocks.block_views import Payload
from ...blocks.selection_copy import cut
from ...connection.connection import raise_refusal
from ...deadlines import GRACE_S
from ...errors import (
    ClientClosed,
    DeadlineExceeded,
    InvalidInput,
    NodeUnavailable,
    ProtocolError,
    StaleLease,
    TiffinError,
)
from ...node.core import messages
from ...streaming.layer_reader import Following, NearFollowing, StreamedLayer, outlast
from ...streaming.prefetch import Ahead, NotYet
from .peer import as_ours

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Iterator, Sequence

    from numpy.typing import NDArray

    from tiffin.messenger.tcp.stream import Stream

    from ...blocks.block_views import Selection
    from ...format.keys import Prefix
    from ...format.schema import HeadRange
    from ...verbs.block_verbs import Access, Verb
    from .peer import Peer

    Bytes = NDArray[np.uint8]

log = logging.getLogger(__name__)
T = TypeVar("T")

# The most nodes that a stream asks for the first block, or its writer's reservation. The directory
# lists a few holders at most; a list of fixed nodes may be long.
ASKED_MAX = 8
# How often one stream may move to another node: with more losses, the pool is not worth following.
MOVES_MAX = 8


class FarFollowing(Following):
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
        self._ahead = Ahead(self._fetch, ahead, timeout_s) if ahead else None
        self._lock = threading.Lock()
        self._caller = Caller()  # of threads that wait for a TCP stream
        self._using: Stream | None = None  # the TCP stream of the request in flight
        self._given_up = False  # the caller has given up the request for a lease

    @property
    def _peer(self) -> Peer:
        if self._connected is None:
            self._connected = self._connect(self.node)
        return self._connected

    def _lease(self, request: messages.Lease) -> Verb[messages.Leased]:
        yield from ()
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

    def advance(self) -> Verb[StreamedLayer | None]:
        """See `Course.advance`."""
        yield from self.begin()
        if self._ahead is None or not self.count:
            return (yield from super().advance())
        return self._ahead.take()

    def _fetch(self) -> StreamedLayer | None:
        """The next layer, in the prefetching thread."""
        try:
            return _at_once(super().advance())
        except DeadlineExceeded as error:
            if self.overdue:
                raise NotYet(error) from error
            raise

    def _due(self, began: float) -> float:
        if self._ahead is None or self._interrupted:
            return super()._due(began)
        return self._ahead.due(began)

    def _ask(
        self, request: messages.Await, selection: Selection | None
    ) -> Verb[tuple[messages.Awaited, list[Any]]]:
        yield from ()
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
            raise StaleLease(f"node {self._peer.label} did not send all that it said is there")
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
        """Give up the request in flight, after `interrupt`, when the node has not answered for too
        long. From any thread."""
        with self._lock:
            self._given_up = True
        self._cut()

    def interrupt(self) -> None:
        """See `Following.interrupt`."""
        super().interrupt()
        if self._ahead is not None:
            self._ahead.halt()

    def end(self) -> Verb[None]:
        """See `Course.end`. Returns when no thread receives anything any more."""
        if self._ended:
            return
        if self._ahead is not None:
            self._ahead.halt()
        # The release makes the node answer a parked await, so that its connection stays usable.
        yield from super().end()
        if self._ahead is not None and self._ahead.stop(self._cut) and self._held is not None:
            self._peer.post(messages.Release(0, self._held.lease))  # the first may be lost

    def _work(self, action: Callable[[], Any]) -> Verb[Any]:
        yield from ()
        return action()

    def _post(self, request: messages.Request) -> Verb[None]:
        yield from ()
        self._peer.post(request)


def _at_once(verb: Verb[T]) -> T:
    """The result of a verb that has no steps."""
    try:
        step = next(verb)
    except StopIteration as stop:
        return stop.value  # type: ignore[no-any-return]
    raise AssertionError(f"{step} can't be carried out here")


class Searching:
    """A `Course` that chooses its node when it begins: the first candidate that has all blocks,
    else the one that has most of them. When that node is lost, the stream moves to another that can
    `resume`.

    The only candidate is the node of number `node`; without one, the candidates are the home node
    and then the nodes that `locate` returns. After a loss they are the home node and these.
    `home()` is the home node's number; `home` is None for a client without a home node.
    """

    def __init__(
        self,
        prefix: Prefix,
        access: Access,
        timeout_s: float,
        connect: Callable[[int], Peer],
        home: Callable[[], int | None] | None,
        node: int | None,
        locate: Callable[[Prefix], Sequence[int]],
        heads: HeadRange | None = None,
        ahead: int = 0,
    ) -> None:
        self.prefix = prefix
        self._access = access
        self._timeout_s = timeout_s
        self._connect = connect
        self._home = home
        self._node = node
        self._locate = locate
        self._heads = heads
        self._ahead = ahead
        self._found: Following | None = None
        self._asked: Following | None = None  # at the candidate that is being asked
        self._left: list[Following] = []  # at lost nodes; the caller may still use their layers
        self._reason = "miss" if len(prefix) else None
        self._ended = False

    @property
    def count(self) -> int:
        """See `Course.count`."""
        return self._found.count if self._found is not None else 0

    @property
    def reason(self) -> str | None:
        """See `Course.reason`."""
        return self._reason

    def begin(self) -> Verb[None]:
        """See `Course.begin`. Raises the last candidate's error if no candidate answered."""
        if self._ended:
            raise ClientClosed("this stream has ended; begin another")
        if self._found is not None or not len(self.prefix):
            return
        failure: TiffinError | None = None
        until = time.monotonic() + self._timeout_s
        for following, share in self._ways():
            left_s = until - time.monotonic()
            if left_s <= 0 and isinstance(failure, DeadlineExceeded):
                break
            try:
                yield from self._try(following, left_s / share)
            except (ClientClosed, InvalidInput):
                raise
            except TiffinError as error:
                log.info("not streamed from a node: %s", error)
                failure = error
            if self.count == len(self.prefix):
                return
        if self._found is None and failure is not None:
            raise failure

    def _ways(self) -> Iterator[tuple[Following, int]]:
        """The candidates, each with the number of candidates that share the time that is left. The
        link to a silent home node gives up by itself if another node could answer."""
        away = self._node is not None and (self._home is None or self._node != self._home())
        if self._home is not None and not away:
            yield self._near(self.prefix), 1
        if self._node is None:
            yield from self._shared(self.prefix, self._locate(self.prefix))
        elif away:
            yield self._far(self.prefix, self._node), 1

    def _shared(self, prefix: Prefix, nodes: Sequence[int]) -> Iterator[tuple[Following, int]]:
        """These nodes as candidates. A node that hangs leaves half of the time to the others; the
        last one gets all that is left."""
        nodes = nodes[:ASKED_MAX]
        for node in nodes:
            yield self._far(prefix, node), 1 if node == nodes[-1] else 2

    def _near(self, prefix: Prefix) -> Following:
        return NearFollowing(prefix, self._access, self._timeout_s, self._heads)

    def _far(self, prefix: Prefix, node: int) -> Following:
        how = self._access, self._timeout_s, node, self._heads, self._ahead
        return FarFollowing(self._connect, prefix, *how)

    @contextlib.contextmanager
    def _asking(self, another: Following) -> Iterator[None]:
        """During the block, `interrupt` and `give_up` reach the candidate `another`."""
        self._asked = another  # set before the check of `_ended`: `interrupt` does the reverse
        try:
            if self._ended:
                raise ClientClosed("this stream has ended; begin another")
            yield
        finally:
            self._asked = None

    def _try(self, another: Following, left_s: float) -> Verb[None]:
        """Begin at this candidate; keep it if it has more blocks than the best one before."""
        with self._asking(another):
            yield from another.begin(left_s)
        worse: Following | None = another
        if self._found is None or another.count > self._found.count:
            worse, self._found = self._found, another
            self._reason = another.reason
        if worse is not None:
            yield from worse.end()

    def advance(self) -> Verb[StreamedLayer | None]:
        """See `Course.advance`. Raises the node's error if no other node can take over."""
        yield from self.begin()
        while self._found is not None:
            if self._ended:
                raise ClientClosed("this stream has ended; begin another")
            try:
                return (yield from self._found.advance())
            except (NodeUnavailable, DeadlineExceeded, ProtocolError, StaleLease) as error:
                if self._ended or self._found.overdue or not (yield from self._move(error)):
                    raise
        return None

    def _move(self, error: TiffinError) -> Verb[bool]:
        """Move the stream to another node that has all blocks committed; whether there is one."""
        lost = self._found
        assert lost is not None
        if len(self._left) >= MOVES_MAX:
            return False
        # Perhaps only the lease has ended: then the stream may go on at the same node.
        again = isinstance(error, StaleLease)
        until = time.monotonic() + deadlines.left_s(self._timeout_s + GRACE_S)
        for another, share in self._others(lost, again=again):
            left_s = until - time.monotonic()
            if left_s <= 0 or self._ended:
                break
            resumed = False
            try:
                with self._asking(another):
                    resumed = yield from another.resume(lost, left_s / share)
            except (ClientClosed, InvalidInput):
                raise
            except TiffinError as failure:
                log.debug("not resumed at another node: %s", failure)
            finally:
                if not resumed:
                    yield from another.end()
            if resumed:
                log.info("a stream goes on at another node: %s", error)
                self._left.append(lost)
                self._found = another
                return True
        return False

    def _others(self, lost: Following, *, again: bool) -> Iterator[tuple[Following, int]]:
        """As `_ways`: the candidates to take over from a lost node. `again`: that node as well."""
        prefix = self.prefix[: lost.count]
        if self._home is not None and (again or not isinstance(lost, NearFollowing)):
            yield self._near(prefix), 1
        gone = lost.node if isinstance(lost, FarFollowing) and not again else None
        yield from self._shared(prefix, [node for node in self._locate(prefix) if node != gone])

    def interrupt(self) -> None:
        """Make a thread that waits in `advance` return soon; call `end` afterwards. From any
        thread."""
        self._ended = True
        for following in (self._found, self._asked):
            if following is not None:
                following.interrupt()

    def give_up(self) -> None:
        """Stop waiting for a remote node, whether for a layer or for a lease. Called some time
        after `interrupt`, from any thread. A lease that the node grants now expires there."""
        for following in (self._found, self._asked):
            if isinstance(following, FarFollowing):
                following.give_up()

    def break_off(self) -> None:
        """End the waits of threads in `begin` or `advance`. From any thread."""
        self.interrupt()
        self.give_up()

    def forsake(self) -> None:
        """Release the leases of a stream that no caller refers to any more: those at remote nodes.
        At home, the caller may still use layers, and the last one gives the lease back."""
        self._ended = True
        for following in (*self._left, self._found, self._asked):
            if isinstance(following, FarFollowing):
                with contextlib.suppress(TiffinError):
                    _at_once(following.end())

    def end(self) -> Verb[None]:
        """See `Course.end`."""
        self._ended = True
        followings, self._left = [*self._left, self._found], []
        for following in followings:
            if following is not None:
                yield from following.end()


async def interruptible(course: Searching, step: Coroutine[Any, Any, T]) -> T:
    """Await a step of a course. A cancellation interrupts the step, and is raised once the step has
    ended, when no thread works for the course any more."""
    running = asyncio.ensure_future(step)
    try:
        return await asyncio.shield(running)
    except asyncio.CancelledError:
        course.interrupt()
        running.cancel()  # it may still wait for its turn
        # A healthy node answers a lease at once, so that only a sick one is given up.
        late = asyncio.get_running_loop().call_later(GRACE_S, course.give_up)
        try:
            await outlast(running)
        finally:
            late.cancel()
        raise
