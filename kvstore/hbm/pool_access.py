"""The pool below an HBM tier: fetches blocks with the checksums to verify them by, and finds room.

How a promoted block is verified:

- Schema of `xxh3_64_pages`, node on this host: by the checksums in the block's header. The CPU
  hashes nothing; the device computes the same checksums over the copied bytes. So one checksum
  covers the bytes from the writer's device to the reader's.
- All other cases: the client verifies the bytes in host memory under its policy, this module
  computes page checksums of the verified bytes, and the device compares with these.

If the policy skips a block ("sampled", "off"), the second way has no checksums to compare with: the
device's checksums are then stored unverified, and detect only later damage.
"""

from __future__ import annotations

import contextlib
import random
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tiffin.messenger.shm.host_copy import XXH3_64_PAGES

from ..client.blocks.leased_extents import LeasedExtents
from ..client.pool.home.home import Home
from ..client.verbs.block_verbs import Access
from ..deadlines import until_s
from ..errors import (
    ClientClosed,
    DeadlineExceeded,
    DirectoryUnavailable,
    NodeUnavailable,
    ProtocolError,
    TierUnavailable,
)
from ..node.core import messages
from ..node.core.records import Reason
from .device.device_memory import host_checksums

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    import numpy as np
    from numpy.typing import NDArray

    from ..client.client import Client
    from ..client.connection.node_link import NodeLink
    from ..client.verbs.arguments import Verify
    from ..format.keys import Prefix
    from ..format.schema import KVSchema

    Bytes = NDArray[np.uint8]
    Sums = NDArray[np.uint64]

# Errors by the pool's condition, not by a caller's mistake: HBM serves its own blocks without it.
POOL_ERRORS = (
    NodeUnavailable,
    DirectoryUnavailable,
    DeadlineExceeded,
    TierUnavailable,
    ClientClosed,
    ProtocolError,  # for example after an update
)

PAGES = XXH3_64_PAGES

# How long to wait for room in the pool.
ROOM_WAIT_S = 0.1


@dataclass(slots=True)
class FetchedBlocks:
    """Leading blocks of `prefix` in host memory, valid until `release()`.

    `views[i]`: uint8 [block_bytes]. `sums[i]`: the expected checksums, uint64 [segments], or None.
    """

    prefix: Prefix
    views: list[Bytes]
    sums: list[Sums | None]
    reason: str | None
    release: Callable[[], None]
    report: Callable[[int], None] = lambda _: None  # reports a damaged block; its node checks it


def no_release() -> None:
    """A `release` for blocks without a lease, or whose lease ends elsewhere."""


def while_it_answers(action: Callable[..., None]) -> Callable[..., None]:
    """Wrap `action` to ignore POOL_ERRORS."""

    def attempt(*arguments: int) -> None:
        with contextlib.suppress(*POOL_ERRORS):
            action(*arguments)

    return attempt


@contextlib.contextmanager
def kept_open(client: Client) -> Iterator[None]:
    """Inside the `with` block, the client's `close` waits with its goodbye, after which the node
    frees the client's leases and reservations: a copy into that memory, or out of it, would then be
    of another client's block.

    Raises ClientClosed.
    """
    link = client.near_link
    if link is None:  # the client's blocks are in memory of this process
        yield
        return
    with link.gate:
        yield


def room_wait_s(client: Client, left_s: float) -> float:
    """The timeout for a reservation in the pool. The client sends slots of a remote node at the
    commit, within the same timeout: such a reservation gets all of `left_s`."""
    link = client.near_link
    if link is None or (isinstance(link, Home) and link.away):
        return left_s
    return min(left_s, ROOM_WAIT_S)


def fetch(client: Client, prefix: Prefix, verify: Verify, timeout_s: float) -> FetchedBlocks:
    """Fetch the leading blocks of `prefix` that the pool has. Raises the errors of `Client.get`."""
    client._check_open()
    link = client.near_link if prefix.schema.checksum == PAGES else None
    if link is None:
        return _get(client, prefix, verify, timeout_s)
    deadline = time.monotonic() + timeout_s
    if not client.is_pool:
        return _lease(prefix, link, timeout_s)
    try:
        near = _lease(prefix, link, timeout_s)
    except POOL_ERRORS:
        near = nothing(prefix, "pool")
    count = len(near.views)
    if count == len(prefix):
        return near
    try:
        return _joined(near, _get(client, prefix[count:], verify, until_s(deadline)))
    except BaseException:
        near.release()
        raise


def _joined(near: FetchedBlocks, far: FetchedBlocks) -> FetchedBlocks:
    """Join the results of two fetches; `far` starts at the block where `near` ended."""
    count = len(near.views)

    def release() -> None:
        near.release()
        far.release()

    def report(index: int) -> None:
        if index < count:
            near.report(index)

    views, sums = near.views + far.views, near.sums + far.sums
    return FetchedBlocks(near.prefix, views, sums, far.reason, release, report)


def _lease(prefix: Prefix, link: NodeLink, timeout_s: float) -> FetchedBlocks:
    """Lease blocks in place, with the checksums of their headers; does not read the payloads."""
    reply, memory = link.call(messages.Lease(0, prefix.key_bytes, timeout_s), timeout_s)
    leased = LeasedExtents(prefix, memory, reply)
    shape, reason = prefix.schema.header, _why(reply.reason)
    try:
        headers = leased.headers(0, len(reply.offsets))
        sums: list[Sums | None] = [shape.checksums(raw) for raw in headers]
        if (good := len(headers)) < len(reply.offsets):
            reason = "corrupt"
            link.post(messages.Report(0, prefix.keys[good], reply.generations[good]))
    except BaseException:
        link.post(messages.Release(0, reply.lease))
        raise

    def release() -> None:
        if reply.lease:
            link.post(messages.Release(0, reply.lease))

    def report(index: int) -> None:
        link.post(messages.Report(0, prefix.keys[index], reply.generations[index]))

    views = [leased.payload(index) for index in range(len(sums))]
    return FetchedBlocks(
        prefix,
        views,
        list(sums),
        reason,
        while_it_answers(release),
        while_it_answers(report),
    )


def _get(client: Client, prefix: Prefix, verify: Verify, timeout_s: float) -> FetchedBlocks:
    """Blocks from `Client.get`, which verifies them under its policy, and page checksums, computed
    here for a like share of them."""
    access = Access(verify, random.Random())
    blocks = client.get(prefix, verify=verify, timeout_s=timeout_s)
    try:
        views = [block.bytes for block in blocks]
        spans = spans_of(prefix.schema)
        sums = [host_checksums(v, spans) if access.checks_payload() else None for v in views]
    except BaseException:
        blocks.release()
        raise
    return FetchedBlocks(prefix, views, sums, blocks.reason, while_it_answers(blocks.release))


def spans_of(schema: KVSchema) -> list[tuple[int, int]]:
    """(offset, length) of each segment of a block."""
    return [(segment.offset, segment.length) for segment in schema.segments]


def _why(reason: int) -> str | None:
    return None if reason == Reason.NONE else Reason(reason).name.lower()


def nothing(prefix: Prefix, reason: str) -> FetchedBlocks:
    """An empty result with its reason."""
    return FetchedBlocks(prefix, [], [], reason, no_release)
