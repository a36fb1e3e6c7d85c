"""Blocks layer by layer, also while they are being written: a reader that does not wait for the
whole of a prompt before it begins.

A stream holds the leading blocks of a prefix, those that are committed and those that a writer has
reserved. It awaits each layer of all of them, verifies it by the checksums that the writer gave it,
and hands it out. At the end it waits until every block is committed, and compares: key, parent,
schema, namespace, tokens, and the checksums of every segment with those that it was told before.
Until that has passed, what was handed out is provisional.

When a node is lost in the middle, another one that has the same blocks committed can take over: it
`resumes` if its headers have the checksums of every segment that was handed out, so that all layers
of a block are of the same bytes, wherever they came from.

`Following` is what both clients and both ways to a node share. Like the verbs of `verbs.py` it is
made of generators, and those of a node on this host do no I/O themselves.
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

from tiffin.messenger import local

from .block import verify_identity
from .blocks import Layer, Payload, select
from .errors import (
    ClientClosed,
    CorruptBlock,
    DeadlineExceeded,
    InvalidInput,
    ProtocolError,
    VersionMismatch,
)
from .node import messages
from .node.records import Reason
from .slices import checksums_of
from .verbs import Call, Post, Work, check_blocks

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence

    from numpy.typing import NDArray

    from .blocks import Selection, Slot
    from .keys import Prefix
    from .schema import HeadRange, KVSchema
    from .verbs import Access, Verb

    Bytes = NDArray[np.uint8]

log = logging.getLogger(__name__)

# One await is parked in the node for so long at most, then asked again: a remote node's thread that
# waits for it learns that its client is gone when it answers, and on a daemon's socket the client's
# other threads have their turn.
POLL_S = 2.0
# Layers that may be fetched before they are asked for, of all blocks each: of 131,072 tokens of a
# large model, half a GiB. More than a few hide no more waiting than one or two do.
AHEAD_MAX = 16


# -- writing ---------------------------------------------------------------------------------------


def publish(slots: Sequence[Slot], lease: int, layer: int, timeout_s: float) -> Verb[None]:
    """Tell the node that this layer of these slots is complete. Raises SchemaError for a layer that
    the schema has not, InvalidInput for one that was published before, StaleLease."""
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
            found = yield Work(partial(local.hash_segments, slot.view, in_payload, algorithm))
            sums += found.astype("<u8").tobytes()
        numbers = [number for number, _ in part]
        yield Call(messages.Publish(0, lease, numbers, segments, spans, sums), timeout_s)


def segments_of(selection: Selection, layer: int) -> list[int]:
    """What a writer of `selection` publishes of a layer: none of one that is not split, on another
    rank than 0. Raises SchemaError for a layer that the schema has not."""
    schema = selection.schema
    select(schema, layers=layer)  # raises what is wrong with it
    if selection.shard is None:
        return list(schema.layer_segments(layer))
    return schema.shard_segments(layer, selection.shard)


def places_of(schema: KVSchema, segments: Sequence[int]) -> tuple[list[tuple[int, int]], list[int]]:
    """(offset, length) of each segment in a payload; and `Publish.spans`, which counts from the
    begin of the extent."""
    chosen = [schema.segments[index] for index in segments]
    in_payload = [(segment.offset, segment.length) for segment in chosen]
    return in_payload, [n for at, size in in_payload for n in (schema.header_bytes + at, size)]


def published_at_once(segments: Sequence[int]) -> int:
    """Of how many slots one message publishes these segments."""
    return max(1, messages.PUBLISHED_BYTES_MAX // (8 * len(segments)))


# -- reading ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class StreamedLayer:
    """One layer of every block of a stream; `blocks[i]` has its arrays `k`, `v`, `part(name)`, of a
    head range only these heads.

    Provisional until the stream has ended well.
    """

    index: int
    blocks: tuple[Layer, ...]


def check_ahead(ahead: int) -> int:
    """`ahead` if it can be a number of layers; raises InvalidInput."""
    if not (isinstance(ahead, int) and 0 <= ahead <= AHEAD_MAX):
        raise InvalidInput(f"ahead={ahead!r}; it is a number of layers from 0 to {AHEAD_MAX}")
    return ahead


class Course(Protocol):
    """What a stream goes through, as verbs. `count` blocks are followed, `reason` says why not
    more."""

    prefix: Prefix

    @property
    def count(self) -> int:
        """How many leading blocks it has, once it has begun."""

    @property
    def reason(self) -> str | None:
        """Why not more."""

    def begin(self) -> Verb[None]:
        """Hold the leading blocks; does nothing the second time."""

    def advance(self) -> Verb[StreamedLayer | None]:
        """The next layer; None at the end, once all blocks have proved themselves."""

    def end(self) -> Verb[None]:
        """Let go of the blocks; does nothing the second time."""


class Following(ABC):
    """A `Course` at one node.

    `heads`: only these heads of each layer are handed out. A checksum covers a whole segment, so of
    heads that cut through segments a verified block's segments are read whole.
    """

    count = 0
    reason: str | None = None
    # Whether `advance` raised DeadlineExceeded because a writer was too slow: the node is well.
    overdue = False

    def __init__(
        self, prefix: Prefix, access: Access, timeout_s: float, heads: HeadRange | None = None
    ) -> None:
        check_blocks(prefix)
        schema = prefix.schema
        if heads is not None:
            schema.ranges(heads=heads)  # raises what is wrong with them
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
        # What the node told us: [blocks, segments], of those segments that were handed out.
        self._said = np.zeros((0, 0), np.uint64)
        self._handed = np.zeros(0, np.bool_)

    # -- the course ------------------------------------------------------------------------------

    def begin(self, left_s: float = math.inf) -> Verb[None]:
        """See `Course.begin`. The node is waited for `left_s` at most."""
        if self._ended or self._interrupted:
            raise ClientClosed("this stream has ended; begin another")
        if self._held is not None or not len(self.prefix):
            return
        timeout_s = max(0.0, min(self._timeout_s, left_s))
        request = messages.Lease(0, self.prefix.key_bytes, timeout_s, follow=True)
        self._held = held = yield from self._lease(request)
        self.count = len(held.offsets)
        self.reason = None if held.reason == Reason.NONE else Reason(held.reason).name.lower()
        self._verified = [self._access.checks_payload() for _ in range(self.count)]
        self._said = np.zeros((self.count, len(self.schema.segments)), np.uint64)
        self._handed = np.zeros(len(self.schema.segments), np.bool_)

    def resume(self, lost: Following, left_s: float = math.inf) -> Verb[bool]:
        """Go on where a stream of the same blocks at another node broke off, with its next layer.

        Whether that can be: all of its blocks are committed here, and by their headers they are, in
        every segment that it handed out, the same bytes. If not, nothing is handed out here: `end`.
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
        """Wait for every block's commit and compare. Raises CorruptBlock, VersionMismatch."""
        headers, _ = yield from self._awaited(None)
        for block, raw in enumerate(headers):
            try:
                self._prove(block, raw)
            except CorruptBlock as error:
                yield from self._report(block)
                raise CorruptBlock(f"block {block} of a stream: {error}") from error

    def _prove(self, block: int, raw: bytes) -> None:
        """Raises CorruptBlock or VersionMismatch unless this is the header of the block that was
        asked for, with the bytes that were handed out."""
        sums = self._recognised(block, raw)
        if not np.array_equal(sums[self._handed], self._said[block][self._handed]):
            raise CorruptBlock("it was committed with other bytes than were published")

    def _recognised(self, block: int, raw: bytes) -> NDArray[np.uint64]:
        """The checksums of a header, checked against all that the prefix knows."""
        assert self._held is not None
        prefix, shape = self.prefix, self.schema.header
        key = prefix.keys[block]
        parent = prefix.keys[block - 1] if block else prefix.parent
        names = (key, parent, prefix.schema_fingerprint, prefix.namespace_fingerprint)
        generation, offset = self._held.generations[block], self._held.offsets[block]
        tokens = prefix.token_bytes(block)
        if not shape.matches(raw, b"".join(names), generation, offset, tokens):
            verify_identity(raw, *names, generation, tokens, offset_expected=offset)
            raise CorruptBlock("another block's header: its sizes or its algorithm differ")
        return shape.checksums(raw)

    def _awaited(self, selection: Selection | None) -> Verb[tuple[list[Any], bytes]]:
        """Ask until all segments of the selection are there: a payload per block, or without a
        selection a header, and the checksums. Raises DeadlineExceeded."""
        assert self._held is not None
        segments = [] if selection is None else selection.segments.tolist()
        began = time.monotonic()
        while True:
            left_s = max(0.0, self._due(began) - time.monotonic())
            request = messages.Await(0, self._held.lease, segments, min(left_s, POLL_S))
            reply, found = yield from self._ask(request, selection)
            if reply.ready:
                return found, reply.checksums
            if time.monotonic() >= self._due(began):
                what = f"layer {self._next}" if segments else "the blocks' commit"
                self.overdue = True
                raise DeadlineExceeded(f"{what} did not come within {self._timeout_s} s")

    def _due(self, began: float) -> float:
        """Until when to wait for what was first asked for at `began`."""
        return -math.inf if self._interrupted else began + self._timeout_s

    def _told(self, sums: bytes, segments: int) -> NDArray[np.uint64]:
        """[blocks, segments] of the node's answer. Raises ProtocolError."""
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
        """From any thread: who waits in `advance` is to come back soon. `end` is to follow."""
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
        """Have the node look at a block itself."""
        assert self._held is not None
        key, generation = self.prefix.keys[block], self._held.generations[block]
        yield from self._post(messages.Report(0, key, generation))

    # -- the way ---------------------------------------------------------------------------------

    @abstractmethod
    def _lease(self, request: messages.Lease) -> Verb[messages.Leased]:
        """Take the lease."""

    @abstractmethod
    def _ask(
        self, request: messages.Await, selection: Selection | None
    ) -> Verb[tuple[messages.Awaited, list[Any]]]:
        """One await and, if it is ready, what it is about. Per block: its header without a
        selection; else its whole payload where it lies, or memory that has the selection packed
        (of a verified block: the segments that it touches, whole)."""

    @abstractmethod
    def _payload(self, block: int, memory: Bytes, selection: Selection) -> Payload:
        """The selection of a block, of what `_ask` returned for it."""

    @abstractmethod
    def _work(self, action: Callable[[], Any]) -> Verb[Any]:
        """Do what takes a while to payload bytes."""

    @abstractmethod
    def _post(self, request: messages.Request) -> Verb[None]:
        """Send what gets no reply."""


class NearFollowing(Following):
    """A stream of a node on this host: layers are views of where they lie."""

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
        """See `Course.end`: no more views."""
        for payload in self._payloads:
            payload.let_go()
        self._payloads.clear()
        self._memory = None
        yield from super().end()


class _Stream:
    """What both clients' streams have. Numbers are known once the stream has begun."""

    def __init__(self, course: Course) -> None:
        self._course = course
        self._entered = False

    @property
    def prefix(self) -> Prefix:
        """What was asked for."""
        return self._course.prefix

    @property
    def blocks(self) -> int:
        """How many leading blocks it has."""
        return self._course.count

    @property
    def tokens(self) -> int:
        """Tokens covered by these."""
        return self.blocks * self.prefix.schema.block_tokens

    @property
    def complete(self) -> bool:
        """Whether every block that was asked for is among them."""
        return self.blocks == len(self.prefix)

    @property
    def reason(self) -> str | None:
        """Why there are not more blocks, as in `Blocks.reason`."""
        return self._course.reason


class LayerStream(_Stream):
    """The layers of leading blocks, in order: iterate over it, once.

    Views are valid until the iteration ends, or in a `with` block until that ends; layers are
    provisional until the iteration has ended without an error.
    """

    def __init__(self, course: Course, run: Callable[[Verb[Any]], Any]) -> None:
        super().__init__(course)
        self._run = run

    def __enter__(self) -> Self:
        self._entered = True
        try:
            self._run(self._course.begin())
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __iter__(self) -> Iterator[StreamedLayer]:
        """Raises CorruptBlock, StaleLease (a writer gave up, or died), DeadlineExceeded,
        NodeUnavailable."""
        try:
            while (layer := self.step()) is not None:
                yield layer
        finally:
            if not self._entered:
                self.close()

    def step(self) -> StreamedLayer | None:
        """The next layer, None at the end: what iterating does."""
        layer: StreamedLayer | None = self._run(self._course.advance())
        return layer

    def close(self) -> None:
        """Let go of the blocks, wherever the stream is."""
        self._run(self._course.end())


class AsyncLayerStream(_Stream):
    """`LayerStream` for `async for` and `async with`."""

    def __init__(self, course: Course, run: Callable[[Verb[Any]], Awaitable[Any]]) -> None:
        super().__init__(course)
        self._run = run

    async def __aenter__(self) -> Self:
        self._entered = True
        try:
            await self._run(self._course.begin())
        except BaseException:
            await self.close()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def __aiter__(self) -> AsyncIterator[StreamedLayer]:
        """See `LayerStream.__iter__`."""
        try:
            while (layer := await self._run(self._course.advance())) is not None:
                yield layer
        finally:
            if not self._entered:
                await self.close()

    async def close(self) -> None:
        """See `LayerStream.close`. A cancellation meanwhile is raised when it is done: else nobody
        would tell the node."""
        ending = asyncio.ensure_future(self._run(self._course.end()))
        try:
            await asyncio.shield(ending)
        except asyncio.CancelledError:
            await outlast(ending)
            raise


async def outlast(running: asyncio.Future[Any]) -> None:
    """Return when it has ended, however, and whatever is cancelled meanwhile."""
    while not running.done():
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.wait([running])
    if not running.cancelled():
        running.exception()  # nobody asks for it any more
