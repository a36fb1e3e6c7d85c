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

A `NodeSource` is the layers of one node, `local_source.py` and `pool/remote/remote_source.py` its
two transports; `pool/failover_source.py` chooses the node. Like the verbs of `block_verbs.py` they
consist of generators, so that both clients share them.
"""

from __future__ import annotations

import logging
import math
import time
from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from ...deadlines import until_s
from ...errors import (
    ClientClosed,
    CorruptBlock,
    DeadlineExceeded,
    InvalidInput,
    ProtocolError,
    VersionMismatch,
)
from ...format.expected_headers import ExpectedHeaders
from ...node.core import messages
from ...node.core.records import Reason
from ..blocks.block_views import Layer, Payload, select
from ..blocks.selection_copy import checksums_of
from ..verbs.arguments import check_blocks
from ..verbs.block_verbs import POLL_S, blocks_at_once

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

    from ...format.keys import Prefix
    from ...format.schema import HeadRange
    from ..blocks.block_views import Selection
    from ..verbs.block_verbs import Access

    Bytes = NDArray[np.uint8]

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class StreamedLayer:
    """One layer of every block of a stream; `blocks[i]` has its arrays `k`, `v`, `part(name)`, with
    only the selected heads.

    Provisional until the stream has ended without an error.
    """

    index: int
    blocks: tuple[Layer, ...]


class LayerSource(Protocol):
    """The steps of a stream as verbs: begin, advance layer by layer, end."""

    prefix: Prefix

    @property
    def count(self) -> int:
        """How many leading blocks the stream covers, known once it has begun."""

    @property
    def reason(self) -> str | None:
        """Why `count` is less than the prefix's blocks; None if it is not."""

    def begin(self) -> None:
        """Take a lease on the leading blocks; idempotent."""

    def advance(self) -> StreamedLayer | None:
        """The next layer; None at the end, once all committed headers have passed the check."""

    def end(self) -> None:
        """Release the lease; idempotent."""

    def interrupt(self) -> None:
        """Make a thread that waits in `advance` return soon; call `end` afterwards. From any
        thread."""

    def give_up(self) -> None:
        """Stop waiting for a remote node, whether for a layer or for a lease. Called some time
        after `interrupt`, from any thread. A lease that the node grants now expires there."""


class NodeSource(ABC):
    """A `LayerSource` at one node.

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
        self._leased: messages.Leased | None = None
        self._ended = False
        self._interrupted = False
        self._next = 0
        self._verified: list[bool] = []
        # The checksums that the node reported: [blocks, segments], set for the yielded segments.
        self._reported = np.zeros((0, 0), np.uint64)
        self._yielded = np.zeros(0, np.bool_)

    # -- the source ------------------------------------------------------------------------------

    def begin(self, left_s: float = math.inf) -> None:
        """See `LayerSource.begin`. Waits for the node for `left_s` at most."""
        if self._ended or self._interrupted:
            raise ClientClosed("this stream has ended; begin another")
        if self._leased is not None or not len(self.prefix):
            return
        timeout_s = max(0.0, min(self._timeout_s, left_s))
        request = messages.Lease(0, self.prefix.key_bytes, timeout_s, follow=True)
        self._leased = leased = self._lease(request)
        self._expected = ExpectedHeaders(self.prefix)
        self.count = len(leased.offsets)
        self.reason = None if leased.reason == Reason.NONE else Reason(leased.reason).name.lower()
        self._verified = [self._access.checks_payload() for _ in range(self.count)]
        self._reported = np.zeros((self.count, len(self.schema.segments)), np.uint64)
        self._yielded = np.zeros(len(self.schema.segments), np.bool_)

    def resume(self, lost: NodeSource, left_s: float = math.inf) -> bool:
        """Take over from `lost`, a stream of the same blocks at another node, at its next layer.

        Returns whether it can: all its blocks are committed at this node, and their headers have
        the checksums of every segment that `lost` yielded. If not, this stream must be ended (call
        `end`) and not advanced.
        """
        self.begin(left_s)
        if not self.count or self.count != lost.count:
            return False
        assert self._leased is not None
        committed = messages.Await(0, self._leased.lease, [], 0.0)
        reply, headers = self._ask(committed, None)
        if not reply.ready:
            return False
        self._next, self._verified = lost._next, lost._verified
        self._reported, self._yielded = lost._reported.copy(), lost._yielded.copy()
        for block, raw in enumerate(headers):
            try:
                self._check_header(block, raw)
            except (CorruptBlock, VersionMismatch) as error:
                log.info("not resumed: block %d there: %s", block, error)
                return False
        return True

    def advance(self) -> StreamedLayer | None:
        """See `LayerSource.advance`."""
        self.overdue = False
        self.begin()
        if not self.count:
            return None
        if self._next == len(self.schema.layers):
            self._finish()
            return None
        index = self._next
        selection = select(self.schema, index, self._heads)
        arrived, sums = self._awaited(selection)
        reported = self._checksum_table(sums, len(selection.segments))
        verified = [block for block in range(self.count) if self._verified[block]]
        at_once = blocks_at_once(selection.spans_bytes)
        for i in range(0, len(verified), at_once):
            part = verified[i : i + at_once]
            memory = [arrived[block] for block in part]
            found = self._work(partial(checksums_of, memory, selection))
            for block, checksums in zip(part, found, strict=True):
                self._compare(block, index, checksums, reported[block])
        payloads = [self._payload(block, memory, selection) for block, memory in enumerate(arrived)]
        self._reported[:, selection.segments] = reported
        self._yielded[selection.segments] = True
        self._next += 1
        return StreamedLayer(index, tuple(payload.layer(index) for payload in payloads))

    def _finish(self) -> None:
        """Wait for every block's commit and check its header against the yielded layers. Raises
        CorruptBlock, VersionMismatch."""
        headers, _ = self._awaited(None)
        for block, raw in enumerate(headers):
            try:
                self._check_header(block, raw)
            except CorruptBlock as error:
                self._report(block)
                raise CorruptBlock(f"block {block} of a stream: {error}") from error

    def _check_header(self, block: int, raw: bytes) -> None:
        """Check that `raw` is the header of this block of the prefix, with the checksums of the
        yielded segments. Raises CorruptBlock or VersionMismatch."""
        sums = self._checksums_of_header(block, raw)
        if not np.array_equal(sums[self._yielded], self._reported[block][self._yielded]):
            raise CorruptBlock("it was committed with other bytes than were published")

    def _checksums_of_header(self, block: int, raw: bytes) -> NDArray[np.uint64]:
        """Check a header against the prefix; returns its checksums."""
        assert self._leased is not None
        generation, offset = self._leased.generations[block], self._leased.offsets[block]
        self._expected.check(block, raw, generation, offset)
        return self.schema.header.checksums(raw)

    def _awaited(self, selection: Selection | None) -> tuple[list[Any], bytes]:
        """Poll the node until it has all segments of the selection, or without a selection the
        commit of every block. Returns a payload per block, or without a selection a header per
        block, and the checksums. Raises DeadlineExceeded."""
        assert self._leased is not None
        segments = [] if selection is None else selection.segments.tolist()
        began = time.monotonic()
        while True:
            left_s = until_s(self._deadline_of(began))
            request = messages.Await(0, self._leased.lease, segments, min(left_s, POLL_S))
            reply, found = self._ask(request, selection)
            if reply.ready:
                return found, reply.checksums
            if time.monotonic() >= self._deadline_of(began):
                what = f"layer {self._next}" if segments else "the blocks' commit"
                self.overdue = True
                raise DeadlineExceeded(f"{what} did not come within {self._timeout_s} s")

    def _deadline_of(self, began: float) -> float:
        """The deadline of an await that began at `began`, by `time.monotonic()`."""
        return -math.inf if self._interrupted else began + self._timeout_s

    def _checksum_table(self, sums: bytes, segments: int) -> NDArray[np.uint64]:
        """The checksums of the node's reply as [blocks, segments]. Raises ProtocolError."""
        if len(sums) != 8 * self.count * segments:
            raise ProtocolError(
                f"{len(sums)} bytes of checksums for {self.count} blocks of {segments} segments"
            )
        return np.frombuffer(sums, "<u8").reshape(self.count, segments)

    def _compare(
        self, block: int, layer: int, found: NDArray[np.uint64], reported: NDArray[np.uint64]
    ) -> None:
        if not np.array_equal(found, reported):
            self._report(block)
            raise CorruptBlock(f"block {block} of a stream: checksum of layer {layer} differs")

    def interrupt(self) -> None:
        """See `LayerSource.interrupt`."""
        self._interrupted = True

    def give_up(self) -> None:  # noqa: B027 - at a node on this host there is nothing to do
        """See `LayerSource.give_up`."""

    def end(self) -> None:
        """See `LayerSource.end`."""
        if self._ended:
            return
        self._ended = True
        leased = self._leased
        if leased is not None and leased.lease:
            self._post(messages.Release(0, leased.lease))

    def _report(self, block: int) -> None:
        """Report a block as suspect, so that the node checks it itself."""
        assert self._leased is not None
        key, generation = self.prefix.keys[block], self._leased.generations[block]
        self._post(messages.Report(0, key, generation))

    # -- the way ---------------------------------------------------------------------------------

    @abstractmethod
    def _lease(self, request: messages.Lease) -> messages.Leased:
        """Send the lease request and return the node's reply."""

    @abstractmethod
    def _ask(
        self, request: messages.Await, selection: Selection | None
    ) -> tuple[messages.Awaited, list[Any]]:
        """Send one `Await` and, if its reply is ready, return data per block: its header without a
        selection; else its whole payload in place, or memory that has the selection packed (for a
        verified block: the whole segments that the selection touches)."""

    @abstractmethod
    def _payload(self, block: int, memory: Bytes, selection: Selection) -> Payload:
        """The selection of a block as a `Payload` over `memory`, which `_ask` returned for it."""

    @abstractmethod
    def _work(self, action: Callable[[], Any]) -> Any:
        """Run `action`, which copies or hashes payload bytes and may take milliseconds."""

    @abstractmethod
    def _post(self, request: messages.Request) -> None:
        """Send a request that gets no reply."""
