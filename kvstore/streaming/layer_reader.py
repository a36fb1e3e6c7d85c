"""Layer-wise streaming: a reader gets a prompt's blocks layer by layer, also while a writer still
writes them, and need not wait for the whole prompt.

A stream has a lease on the leading blocks of a prefix: committed blocks, and blocks that a writer
has reserved. It awaits each layer of all blocks, verifies it by the checksums that the writer
published with it, and yields it. At the end it waits until every block is committed, and checks the
headers: key, parent, schema, namespace, tokens, and every segment's checksum against the published
one. Until that check has passed, the yielded layers are provisional.

When a node is lost in the middle, another node that has the same blocks committed can take over: a
stream at that node `resumes` if the headers there have the checksums of every segment that the lost
stream yielded. So all layers of a block are of the same bytes, whichever node they came from.

`Following` is the code shared by both clients, and by local and remote nodes. Like the verbs of
`block_verbs.py` it consists of generators, and those for a node on this host do no I/O themselves.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import time
from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol, Self

import numpy as np

from tiffin.messenger.shm import host_copy

from .. import deadlines
from ..after_fork import OfOneProcess
from ..blocks.block_views import Layer, Payload, select
from ..blocks.selection_copy import checksums_of
from ..deadlines import until_s
from ..errors import (
    ClientClosed,
    CorruptBlock,
    DeadlineExceeded,
    InvalidInput,
    ProtocolError,
    VersionMismatch,
)
from ..format.expected_headers import ExpectedHeaders
from ..node.core import messages
from ..node.core.records import Reason
from ..verbs.arguments import check_blocks
from ..verbs.block_verbs import Call, Post, Work

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence

    from numpy.typing import NDArray

    from ..blocks.block_views import Selection, Slot
    from ..format.keys import Prefix
    from ..format.schema import HeadRange, KVSchema
    from ..verbs.block_verbs import Access, Verb

    Bytes = NDArray[np.uint8]

log = logging.getLogger(__name__)

# The longest time that a node parks one `Await` request; after it the stream polls again. A remote
# node's thread notices a lost client only when it answers, and on a daemon's socket the client's
# other threads get their turn between two polls.
POLL_S = 2.0


# -- writing ---------------------------------------------------------------------------------------


def publish(slots: Sequence[Slot], lease: int, layer: int, timeout_s: float) -> Verb[None]:
    """Publish `layer` of these slots with its checksums, so that streams can read it before the
    commit. Raises SchemaError for a layer that the schema does not have, InvalidInput for a layer
    that was published before, StaleLease."""
    kept = [(number, slot) for number, slot in enumerate(slots) if not slot.skipped]
    if not kept:
        return
    selection = kept[0][1].selection
    segments = segments_of(selection, layer)
    if not segments:
        return
    in_payload, spans = places_of(selection.schema, segments)
    algorithm = selection.schema.checksum
    at_once = published_at_once(segments)
    for first in range(0, len(kept), at_once):
        part = kept[first : first + at_once]
        sums = b""
        for _, slot in part:
            found = yield Work(partial(host_copy.hash_segments, slot.view, in_payload, algorithm))
            sums += found.astype("<u8").tobytes()
        numbers = [number for number, _ in part]
        yield Call(messages.Publish(0, lease, numbers, segments, spans, sums), timeout_s)


def segments_of(selection: Selection, layer: int) -> list[int]:
    """The segments of `layer` that a writer of `selection` publishes: none if the layer is not
    split and the rank is not 0. Raises SchemaError for a layer that the schema does not have."""
    schema = selection.schema
    select(schema, layers=layer)  # raises SchemaError
    if selection.shard is None:
        return list(schema.layer_segments(layer))
    return schema.shard_segments(layer, selection.shard)


def places_of(schema: KVSchema, segments: Sequence[int]) -> tuple[list[tuple[int, int]], list[int]]:
    """(offset, length) of each segment in a payload; and `Publish.spans`, whose offsets count from
    the start of the extent."""
    chosen = [schema.segments[index] for index in segments]
    in_payload = [(segment.offset, segment.length) for segment in chosen]
    return in_payload, [n for at, size in in_payload for n in (schema.header_bytes + at, size)]


def published_at_once(segments: Sequence[int]) -> int:
    """How many slots one `Publish` message covers, for these segments of each."""
    return max(1, messages.PUBLISHED_BYTES_MAX // (8 * len(segments)))


# -- reading ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class StreamedLayer:
    """One layer of every block of a stream; `blocks[i]` has its arrays `k`, `v`, `part(name)`, with
    only the selected heads.

    Provisional until the stream has ended without an error.
    """

    index: int
    blocks: tuple[Layer, ...]


class Course(Protocol):
    """The steps of a stream as verbs: begin, advance layer by layer, end."""

    prefix: Prefix

    @property
    def count(self) -> int:
        """How many leading blocks the stream covers, known once it has begun."""

    @property
    def reason(self) -> str | None:
        """Why `count` is less than the prefix's blocks; None if it is not."""

    def begin(self) -> Verb[None]:
        """Take a lease on the leading blocks; idempotent."""

    def advance(self) -> Verb[StreamedLayer | None]:
        """The next layer; None at the end, once all committed headers have passed the check."""

    def end(self) -> Verb[None]:
        """Release the lease; idempotent."""


class Following(ABC):
    """A `Course` at one node.

    `heads`: the stream yields only these heads of each layer. A checksum covers a whole segment, so
    if the heads cut through segments, the stream reads whole segments of the blocks it verifies.
    """

    count = 0
    reason: str | None = None
    # Whether `advance` raised DeadlineExceeded because a writer was too slow: the node is healthy.
    overdue = False

    def __init__(
        self, prefix: Prefix, access: Access, timeout_s: float, heads: HeadRange | None = None
    ) -> None:
        check_blocks(prefix)
        schema = prefix.schema
        if heads is not None:
            schema.ranges(heads=heads)  # raises SchemaError
        most = max(map(len, map(schema.layer_segments, range(len(schema.layers)))))
        if len(prefix) * most * 8 > messages.AWAITED_BYTES_MAX:
            raise InvalidInput(
                f"{len(prefix)} blocks of {most} segments a layer; a stream has at most "
                f"{messages.AWAITED_BYTES_MAX // 8} of them in a layer: stream slices of the prefix"
            )
        self.prefix = prefix
        self.schema = schema
        self._access = access
        self._timeout_s = timeout_s
        self._heads = heads
        self._held: messages.Leased | None = None
        self._ended = False
        self._interrupted = False
        self._next = 0
        self._verified: list[bool] = []
        # The checksums that the node reported: [blocks, segments], set for the yielded segments.
        self._said = np.zeros((0, 0), np.uint64)
        self._handed = np.zeros(0, np.bool_)

    # -- the course ------------------------------------------------------------------------------

    def begin(self, left_s: float = math.inf) -> Verb[None]:
        """See `Course.begin`. Waits for the node for `left_s` at most."""
        if self._ended or self._interrupted:
            raise ClientClosed("this stream has ended; begin another")
        if self._held is not None or not len(self.prefix):
            return
        timeout_s = max(0.0, min(self._timeout_s, left_s))
        request = messages.Lease(0, self.prefix.key_bytes, timeout_s, follow=True)
        self._held = held = yield from self._lease(request)
        self._expected = ExpectedHeaders(self.prefix)
        self.count = len(held.offsets)
        self.reason = None if held.reason == Reason.NONE else Reason(held.reason).name.lower()
        self._verified = [self._access.checks_payload() for _ in range(self.count)]
        self._said = np.zeros((self.count, len(self.schema.segments)), np.uint64)
        self._handed = np.zeros(len(self.schema.segments), np.bool_)

    def resume(self, lost: Following, left_s: float = math.inf) -> Verb[bool]:
        """Take over from `lost`, a stream of the same blocks at another node, at its next layer.

        Returns whether it can: all its blocks are committed at this node, and their headers have
        the checksums of every segment that `lost` yielded. If not, this stream must be ended (call
        `end`) and not advanced.
        """
        yield from self.begin(left_s)
        if not self.count or self.count != lost.count:
            return False
        assert self._held is not None
        committed = messages.Await(0, self._held.lease, [], 0.0)
        reply, headers = yield from self._ask(committed, None)
        if not reply.ready:
            return False
        self._next, self._verified = lost._next, lost._verified
        self._said, self._handed = lost._said.copy(), lost._handed.copy()
        for block, raw in enumerate(headers):
            try:
                self._prove(block, raw)
            except (CorruptBlock, VersionMismatch) as error:
                log.info("not resumed: block %d there: %s", block, error)
                return False
        return True

    def advance(self) -> Verb[StreamedLayer | None]:
        """See `Course.advance`."""
        self.overdue = False
        yield from self.begin()
        if not self.count:
            return None
        if self._next == len(self.schema.layers):
            yield from self._finish()
            return None
        index = self._next
        selection = select(self.schema, index, self._heads)
        arrived, sums = yield from self._awaited(selection)
        said = self._told(sums, len(selection.segments))
        payloads = []
        for block, memory in enumerate(arrived):
            if self._verified[block]:
                found = yield from self._work(partial(checksums_of, memory, selection))
                yield from self._compare(block, index, found, said[block])
            payloads.append(self._payload(block, memory, selection))
        self._said[:, selection.segments] = said
        self._handed[selection.segments] = True
        self._next += 1
        return StreamedLayer(index, tuple(payload.layer(index) for payload in payloads))

    def _finish(self) -> Verb[None]:
        """Wait for every block's commit and check its header against the yielded layers. Raises
        CorruptBlock, VersionMismatch."""
        headers, _ = yield from self._awaited(None)
        for block, raw in enumerate(headers):
            try:
                self._prove(block, raw)
            except CorruptBlock as error:
                yield from self._report(block)
                raise CorruptBlock(f"block {block} of a stream: {error}") from error

    def _prove(self, block: int, raw: bytes) -> None:
        """Check that `raw` is the header of this block of the prefix, with the checksums of the
        yielded segments. Raises CorruptBlock or VersionMismatch."""
        sums = self._recognised(block, raw)
        if not np.array_equal(sums[self._handed], self._said[block][self._handed]):
            raise CorruptBlock("it was committed with other bytes than were published")

    def _recognised(self, block: int, raw: bytes) -> NDArray[np.uint64]:
        """Check a header against the prefix; returns its checksums."""
        assert self._held is not None
        generation, offset = self._held.generations[block], self._held.offsets[block]
        self._expected.check(block, raw, generation, offset)
        return self.schema.header.checksums(raw)

    def _awaited(self, selection: Selection | None) -> Verb[tuple[list[Any], bytes]]:
        """Poll the node until it has all segments of the selection, or without a selection the
        commit of every block. Returns a payload per block, or without a selection a header per
        block, and the checksums. Raises DeadlineExceeded."""
        assert self._held is not None
        segments = [] if selection is None else selection.segments.tolist()
        began = time.monotonic()
        while True:
            left_s = until_s(self._due(began))
            request = messages.Await(0, self._held.lease, segments, min(left_s, POLL_S))
            reply, found = yield from self._ask(request, selection)
            if reply.ready:
                return found, reply.checksums
            if time.monotonic() >= self._due(began):
                what = f"layer {self._next}" if segments else "the blocks' commit"
                self.overdue = True
                raise DeadlineExceeded(f"{what} did not come within {self._timeout_s} s")

    def _due(self, began: float) -> float:
        """The deadline of an await that began at `began`, by `time.monotonic()`."""
        return -math.inf if self._interrupted else began + self._timeout_s

    def _told(self, sums: bytes, segments: int) -> NDArray[np.uint64]:
        """The checksums of the node's reply as [blocks, segments]. Raises ProtocolError."""
        if len(sums) != 8 * self.count * segments:
            raise ProtocolError(
                f"{len(sums)} bytes of checksums for {self.count} blocks of {segments} segments"
            )
        return np.frombuffer(sums, "<u8").reshape(self.count, segments)

    def _compare(
        self, block: int, layer: int, found: NDArray[np.uint64], said: NDArray[np.uint64]
    ) -> Verb[None]:
        if not np.array_equal(found, said):
            yield from self._report(block)
            raise CorruptBlock(f"block {block} of a stream: checksum of layer {layer} differs")

    def interrupt(self) -> None:
        """Make a thread that waits in `advance` return soon, with an error; call `end` afterwards.
        Thread-safe."""
        self._interrupted = True

    def end(self) -> Verb[None]:
        """See `Course.end`."""
        if self._ended:
            return
        self._ended = True
        held = self._held
        if held is not None and held.lease:
            yield from self._post(messages.Release(0, held.lease))

    def _report(self, block: int) -> Verb[None]:
        """Report a block as suspect, so that the node checks it itself."""
        assert self._held is not None
        key, generation = self.prefix.keys[block], self._held.generations[block]
        yield from self._post(messages.Report(0, key, generation))

    # -- the way ---------------------------------------------------------------------------------

    @abstractmethod
    def _lease(self, request: messages.Lease) -> Verb[messages.Leased]:
        """Send the lease request and return the node's reply."""

    @abstractmethod
    def _ask(
        self, request: messages.Await, selection: Selection | None
    ) -> Verb[tuple[messages.Awaited, list[Any]]]:
        """Send one `Await` and, if its reply is ready, return data per block: its header without a
        selection; else its whole payload in place, or memory that has the selection packed (for a
        verified block: the whole segments that the selection touches)."""

    @abstractmethod
    def _payload(self, block: int, memory: Bytes, selection: Selection) -> Payload:
        """The selection of a block as a `Payload` over `memory`, which `_ask` returned for it."""

    @abstractmethod
    def _work(self, action: Callable[[], Any]) -> Verb[Any]:
        """Run `action`, which copies or hashes payload bytes and may take milliseconds."""

    @abstractmethod
    def _post(self, request: messages.Request) -> Verb[None]:
        """Send a request that gets no reply."""


class NearFollowing(Following):
    """A stream from a node on this host: its layers are views into the mapped region, no copies."""

    def __init__(
        self, prefix: Prefix, access: Access, timeout_s: float, heads: HeadRange | None = None
    ) -> None:
        super().__init__(prefix, access, timeout_s, heads)
        self._memory: Bytes | None = None
        self._payloads: list[Payload] = []

    def _lease(self, request: messages.Lease) -> Verb[messages.Leased]:
        reply, self._memory = yield Call(request, request.timeout_s)
        return reply  # type: ignore[no-any-return]

    def _ask(
        self, request: messages.Await, selection: Selection | None
    ) -> Verb[tuple[messages.Awaited, list[Any]]]:
        reply, _ = yield Call(request, request.timeout_s)
        if not reply.ready:
            return reply, []
        assert self._held is not None
        assert self._memory is not None
        begins, size = self._held.offsets, self.schema.header_bytes
        if selection is None:
            return reply, [self._memory[at : at + size].tobytes() for at in begins]
        views = []
        for at in begins:
            view = self._memory[at + size : at + size + self.schema.block_bytes]
            view.flags.writeable = False
            views.append(view)
        return reply, views

    def _payload(self, block: int, memory: Bytes, selection: Selection) -> Payload:
        payload = Payload(memory, selection, packed=False)
        self._payloads.append(payload)
        return payload

    def _work(self, action: Callable[[], Any]) -> Verb[Any]:
        return (yield Work(action))

    def _post(self, request: messages.Request) -> Verb[None]:
        yield Post(request)

    def end(self) -> Verb[None]:
        """See `Course.end`; invalidates the views of all layers."""
        for payload in self._payloads:
            payload.let_go()
        self._payloads.clear()
        yield from super().end()
        self._memory = None


class _Stream(OfOneProcess):
    """Base of both clients' streams. Its counts are known once the stream has begun."""

    def __init__(self, course: Course, timeout_s: float) -> None:
        self._course = course
        self._timeout_s = timeout_s  # the timeout of each step
        self._entered = False

    @property
    def prefix(self) -> Prefix:
        """The prefix whose blocks this streams."""
        return self._course.prefix

    @property
    def blocks(self) -> int:
        """How many leading blocks the stream covers."""
        return self._course.count

    @property
    def tokens(self) -> int:
        """How many tokens these blocks cover."""
        return self.blocks * self.prefix.schema.block_tokens

    @property
    def complete(self) -> bool:
        """Whether the stream covers every block of the prefix."""
        return self.blocks == len(self.prefix)

    @property
    def reason(self) -> str | None:
        """Why there are not more blocks, as in `Blocks.reason`."""
        return self._course.reason


class LayerStream(_Stream):
    """An iterable of the layers of the leading blocks, in order; iterate over it once.

    Views are valid until the iteration ends, or in a `with` block until that ends; layers are
    provisional until the iteration has ended without an error.
    """

    def __init__(self, course: Course, run: Callable[[Verb[Any]], Any], timeout_s: float) -> None:
        super().__init__(course, timeout_s)
        self._run = run

    def __enter__(self) -> Self:
        self._entered = True
        self._check_process()
        try:
            deadlines.Within(self._timeout_s).run(partial(self._run, self._course.begin()))
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __iter__(self) -> Iterator[StreamedLayer]:
        """Raises CorruptBlock, StaleLease (a writer aborted, or died), DeadlineExceeded,
        NodeUnavailable."""
        try:
            while (layer := self.step()) is not None:
                yield layer
        finally:
            if not self._entered:
                self.close()

    def step(self) -> StreamedLayer | None:
        """The next layer, None at the end: one step of the iteration."""
        self._check_process()
        advance = partial(self._run, self._course.advance())
        layer: StreamedLayer | None = deadlines.Within(self._timeout_s).run(advance)
        return layer

    def close(self) -> None:
        """Release the lease, at any point of the stream."""
        if not self._inherited:
            self._run(self._course.end())


class AsyncLayerStream(_Stream):
    """`LayerStream` for `async for` and `async with`."""

    def __init__(
        self, course: Course, run: Callable[[Verb[Any]], Awaitable[Any]], timeout_s: float
    ) -> None:
        super().__init__(course, timeout_s)
        self._run = run

    async def __aenter__(self) -> Self:
        self._entered = True
        self._check_process()
        try:
            await self._in_time(self._course.begin())
        except BaseException:
            await self.close()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def __aiter__(self) -> AsyncIterator[StreamedLayer]:
        """See `LayerStream.__iter__`."""
        self._check_process()
        try:
            while (layer := await self._step()) is not None:
                yield layer
        finally:
            if not self._entered:
                await self.close()

    async def _step(self) -> StreamedLayer | None:
        layer: StreamedLayer | None = await self._in_time(self._course.advance())
        return layer

    async def _in_time(self, verb: Verb[Any]) -> Any:
        return await deadlines.Within(self._timeout_s).run_soon(partial(self._run, verb))

    async def close(self) -> None:
        """See `LayerStream.close`. A cancellation meanwhile is raised after the release, which
        would otherwise not reach the node."""
        if self._inherited:
            return
        ending = asyncio.ensure_future(self._run(self._course.end()))
        try:
            await asyncio.shield(ending)
        except asyncio.CancelledError:
            await outlast(ending)
            raise


async def outlast(running: asyncio.Future[Any]) -> None:
    """Wait until `running` is done, in whatever way, and ignore cancellations meanwhile."""
    while not running.done():
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.wait([running])
    if not running.cancelled():
        running.exception()  # mark as retrieved, so that asyncio does not log it
