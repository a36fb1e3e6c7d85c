"""The pool below an HBM tier: blocks fetched from it with what proves them, and room in it.

What proves a block that comes up:

- Schema of `xxh3_64_pages`, node on this host: the checksums in the block's header. Nothing hashes
  on the CPU; the device computes the same checksums over what arrived. From the writer's device to
  the reader's, one checksum travels with the bytes.
- Anything else: the client verifies the bytes in host memory as its policy says, and page checksums
  of these verified bytes, computed here, are what the device compares with.

With a policy that skips a block ("sampled", "off"), the second way has nothing to compare with: the
device's checksums are then taken as they are, and prove only what happens to the block from there.
"""

from __future__ import annotations

import contextlib
import random
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tiffin.messenger.local import XXH3_64_PAGES

from ..client import Client, drive
from ..errors import (
    ClientClosed,
    CorruptBlock,
    DeadlineExceeded,
    DirectoryUnavailable,
    NodeUnavailable,
    ProtocolError,
    TierUnavailable,
    VersionMismatch,
)
from ..leased import Leased
from ..near import near_link
from ..node import messages
from ..node.records import Reason
from ..pool.client import PoolClient
from ..pool.home import Home
from ..verbs import Access, Call, Post, check_blocks
from .memory import host_checksums, left_s

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    import numpy as np
    from numpy.typing import NDArray

    from ..keys import Prefix
    from ..link import Link
    from ..schema import KVSchema
    from ..verbs import Verb, Verify

    Bytes = NDArray[np.uint8]
    Sums = NDArray[np.uint64]

# The pool's condition, not a mistake of anybody: HBM goes on with what it has.
POOL_ERRORS = (
    NodeUnavailable,
    DirectoryUnavailable,
    DeadlineExceeded,
    TierUnavailable,
    ClientClosed,
    ProtocolError,  # after an update, say
)

PAGES = XXH3_64_PAGES

# How long to wait for room in the pool: a client's calls take turns, and a reader may be next.
ROOM_WAIT_S = 0.1


@dataclass(slots=True)
class Fetched:
    """Leading blocks of `prefix` in host memory, valid until `release()`.

    `views[i]`: uint8 [block_bytes]. `sums[i]`: what they must have, uint64 [segments], or None.
    """

    prefix: Prefix
    views: list[Bytes]
    sums: list[Sums | None]
    reason: str | None
    release: Callable[[], None]
    report: Callable[[int], None] = lambda _: None  # a block is damaged: its node looks for itself


def no_release() -> None:
    """Of blocks that nobody holds, or that another will release."""


def while_it_answers(action: Callable[..., None]) -> Callable[..., None]:
    """The same action; nothing happens where the pool is gone."""

    def attempt(*arguments: int) -> None:
        with contextlib.suppress(*POOL_ERRORS):
            action(*arguments)

    return attempt


@contextlib.contextmanager
def kept_open(client: Client) -> Iterator[None]:
    """Inside, the client's `close` waits with its goodbye. It would free what the client holds in
    the pool's memory: a copy into it, or out of it, would be of another's block by then.

    Raises ClientClosed.
    """
    link = near_link(client)
    if link is None:  # what it holds is memory of this process
        yield
        return
    with link.gate:
        yield


def room_wait_s(client: Client, left_s: float) -> float:
    """How long to wait for room in the pool. Slots elsewhere than on this host are sent when they
    are committed, within the same time: that needs all that there is."""
    link = near_link(client)
    if link is None or (isinstance(link, Home) and link.away):
        return left_s
    return min(left_s, ROOM_WAIT_S)


def fetch(client: Client, prefix: Prefix, verify: Verify, timeout_s: float) -> Fetched:
    """The leading blocks of `prefix` that the pool has. Raises what `Client.get` does."""
    client._check(timeout_s)
    check_blocks(prefix)
    link = near_link(client) if prefix.schema.checksum == PAGES else None
    if link is None:
        return _get(client, prefix, verify, timeout_s)
    deadline = time.monotonic() + timeout_s
    if not isinstance(client, PoolClient):
        return drive(_lease(prefix, link, timeout_s), link)
    try:
        near = drive(_lease(prefix, link, timeout_s), link)
    except POOL_ERRORS:
        near = nothing(prefix, "pool")
    count = len(near.views)
    if count == len(prefix):
        return near
    try:
        return _joined(near, _get(client, prefix[count:], verify, left_s(deadline)))
    except BaseException:
        near.release()
        raise


def _joined(near: Fetched, far: Fetched) -> Fetched:
    """One after the other: the second begins where the first ended."""
    count = len(near.views)

    def release() -> None:
        near.release()
        far.release()

    def report(index: int) -> None:
        if index < count:
            near.report(index)

    views, sums = near.views + far.views, near.sums + far.sums
    return Fetched(near.prefix, views, sums, far.reason, release, report)


def _lease(prefix: Prefix, link: Link, timeout_s: float) -> Verb[Fetched]:
    """Blocks where they lie, with the checksums of their headers; payloads are not looked at."""
    reply, memory = yield Call(messages.Lease(0, prefix.key_bytes, timeout_s), timeout_s)
    leased = Leased(prefix, memory, reply)
    shape, reason = prefix.schema.header, _why(reply.reason)
    sums: list[Sums | None] = []
    try:
        while len(sums) < len(reply.offsets):
            sums.append(shape.checksums(leased.identify(len(sums))))
    except (CorruptBlock, VersionMismatch):
        reason = "corrupt"
        yield Post(messages.Report(0, prefix.keys[len(sums)], reply.generations[len(sums)]))
    except BaseException:
        yield Post(messages.Release(0, reply.lease))
        raise

    def release() -> None:
        if reply.lease:
            link.post(messages.Release(0, reply.lease))

    def report(index: int) -> None:
        link.post(messages.Report(0, prefix.keys[index], reply.generations[index]))

    views = [leased.payload(index) for index in range(len(sums))]
    return Fetched(
        prefix,
        views,
        list(sums),
        reason,
        while_it_answers(release),
        while_it_answers(report),
    )


def _get(client: Client, prefix: Prefix, verify: Verify, timeout_s: float) -> Fetched:
    """Blocks that the client verified, and checksums of our own for the same share of them."""
    access = Access(verify, random.Random())
    blocks = client.get(prefix, verify=verify, timeout_s=timeout_s)
    try:
        views = [block.bytes for block in blocks]
        spans = spans_of(prefix.schema)
        sums = [host_checksums(v, spans) if access.checks_payload() else None for v in views]
    except BaseException:
        blocks.release()
        raise
    return Fetched(prefix, views, sums, blocks.reason, while_it_answers(blocks.release))


def spans_of(schema: KVSchema) -> list[tuple[int, int]]:
    """(offset, length) of each segment of a block."""
    return [(segment.offset, segment.length) for segment in schema.segments]


def _why(reason: int) -> str | None:
    return None if reason == Reason.NONE else Reason(reason).name.lower()


def nothing(prefix: Prefix, reason: str) -> Fetched:
    """No blocks, and why."""
    return Fetched(prefix, [], [], reason, no_release)
