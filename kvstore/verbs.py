"""The client's verbs, written once for both clients.

A verb is a generator. It yields what has to be done (`Call` a node and wait, `Post` a message, do
some `Work` on bytes), gets the outcome back, and returns its result. `Client` carries the steps out
one after the other; `AsyncClient` awaits them. No verb knows which of the two drives it, so there
is no second copy of any of this.

Verification. Whatever the policy, each block's header is checked before its bytes are handed out:
header checksum, key, parent, schema, namespace, generation, and the token ids, which the prefix
knows. That costs a few microseconds a block. `verify` decides about the payload: "always" compares
every touched segment's checksum, "sampled" those of one block in SAMPLE_BLOCKS, "off" none.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeVar, cast

from tiffin.messenger import local

from .blocks import Block, Blocks, Selection, Slot, select, select_shard
from .errors import InvalidInput, NoRoom
from .leased import Leased, check
from .node import messages
from .node.core import Status
from .node.records import IN_DRAM, Kept, Reason
from .payloads import target_views
from .sealing import check_shard_blocks, seal, shard_blocks_max, shard_header
from .slices import all_checksums, scatter_hashed, source_views
from .tiers.base import TierName

if TYPE_CHECKING:
    import random

    import numpy as np
    from numpy.typing import NDArray

    from .keys import Prefix
    from .schema import HeadRange, LayerRange, Shard

    Bytes = NDArray[np.uint8]

Verify = Literal["always", "sampled", "off"]
VERIFY: tuple[Verify, ...] = ("always", "sampled", "off")
SAMPLE_BLOCKS = 16
DEFAULT_TIMEOUT_S = 5.0
BLOCKS_MAX = messages.KEYS_BYTES_MAX // 16
FOREVER_S = 1e9

# Small blocks are checked and copied together, so that not each of them pays for a step (and, in
# `AsyncClient`, for a thread): as many as a core copies in some 0.1 ms.
WORK_BYTES = 1 << 20
WORK_BLOCKS_MAX = 64

# A put reserves at most this share of the node's DRAM at a time, so that one long prompt does not
# take the room of everybody else's while it is being written.
PUT_SHARE = 4


@dataclass(slots=True)
class Call:
    """Send `request`, wait up to `timeout_s` for its reply."""

    request: messages.Request
    timeout_s: float


@dataclass(slots=True)
class Post:
    """Send `request`; nobody waits."""

    request: messages.Request


@dataclass(slots=True)
class Work:
    """Run `action`: it copies or hashes payload bytes, so it may take milliseconds."""

    action: Callable[[], Any]


Step = Call | Post | Work
T = TypeVar("T")
Verb = Generator[Step, Any, T]


@dataclass(frozen=True, slots=True)
class Hit:
    """How much of a prefix is resident: leading `blocks`, and the `tokens` they cover.

    `where` has one byte per block, the tiers that hold it (bit 0: DRAM, bit 1: NVMe).
    """

    blocks: int
    tokens: int
    where: bytes = b""

    @property
    def tiers(self) -> tuple[TierName, ...]:
        """The fastest tier of each block."""
        return tuple(TierName.DRAM if w & IN_DRAM else TierName.NVME for w in self.where)


@dataclass(frozen=True, slots=True)
class PutResult:
    """What became of each block of a put, as positions in the prefix.

    `stored`: written now. `resident`: was there already. `busy`: another writer is at it.
    `refused`: the node did not accept it, or another rank of a shared write gave up. `pending`:
    this rank's slice is in, other ranks' are awaited. The rest found no room, `reason` says why.
    """

    stored: tuple[int, ...]
    resident: tuple[int, ...]
    busy: tuple[int, ...]
    refused: tuple[int, ...]
    reason: str | None
    pending: tuple[int, ...] = ()

    @property
    def complete(self) -> bool:
        """Whether every block of the prefix is in the pool now."""
        return self.reason is None and not (self.busy or self.refused or self.pending)


class Access(NamedTuple):
    """How much a client distrusts the pool's memory."""

    verify: Verify
    dice: random.Random

    def checks_payload(self) -> bool:
        """Whether to verify the payload of the next block."""
        if self.verify == "sampled":
            return self.dice.randrange(SAMPLE_BLOCKS) == 0
        return self.verify == "always"


def check_timeout(timeout_s: float) -> float:
    """`timeout_s` if a node takes it; raises InvalidInput."""
    number = isinstance(timeout_s, int | float)
    if not (number and 0 <= timeout_s <= messages.TIMEOUT_S_MAX):
        raise InvalidInput(
            f"timeout_s={timeout_s!r}; it must be from 0 to {messages.TIMEOUT_S_MAX:.0f}"
        )
    return timeout_s


def check_ttl(ttl_s: float | None) -> float:
    """How long a pin lasts, FOREVER_S without a time; raises InvalidInput."""
    if ttl_s is None:
        return FOREVER_S
    if not (isinstance(ttl_s, int | float) and ttl_s > 0):
        raise InvalidInput(f"ttl_s must be a positive number of seconds, not {ttl_s!r}")
    return ttl_s


def check_blocks(prefix: Prefix) -> None:
    """Raise InvalidInput for more blocks than one call takes."""
    if len(prefix) > BLOCKS_MAX:
        raise InvalidInput(f"{len(prefix)} blocks in one call; the limit is {BLOCKS_MAX}")


def check_name(name: str) -> str:
    """`name` if a node takes it; raises InvalidInput."""
    # Printable: it is shown on the terminals of others.
    if not (isinstance(name, str) and len(name) <= messages.NAME_MAX and name.isprintable()):
        raise InvalidInput(
            f"a client's name is printable text of at most {messages.NAME_MAX} characters"
        )
    return name


def check_verify(verify: str) -> Verify:
    """`verify` if it is a policy; raises InvalidInput."""
    if verify not in VERIFY:
        raise InvalidInput(f"verify={verify!r}; choose one of {', '.join(VERIFY)}")
    return verify


# -- looking ---------------------------------------------------------------------------------------


def match(prefix: Prefix, timeout_s: float) -> Verb[Hit]:
    """How many leading blocks are resident."""
    if not len(prefix):
        return Hit(0, 0)
    reply, _ = yield Call(messages.Match(0, _keys(prefix)), timeout_s)
    where = reply.flags
    return Hit(len(where), len(where) * prefix.schema.block_tokens, where)


def exists(prefix: Prefix, timeout_s: float) -> Verb[list[bool]]:
    """Which blocks are resident, each on its own."""
    if not len(prefix):
        return []
    reply, _ = yield Call(messages.Exists(0, _keys(prefix)), timeout_s)
    return [bool(flag) for flag in reply.flags]


def pin(prefix: Prefix, level: int, ttl_s: float | None, timeout_s: float) -> Verb[int]:
    """Pin or unpin the resident blocks."""
    until_s = check_ttl(ttl_s)
    if not len(prefix):
        return 0
    request = messages.Pin(0, _keys(prefix), level, until_s)
    reply, _ = yield Call(request, timeout_s)
    return int(reply.count)


def remove(prefix: Prefix, timeout_s: float) -> Verb[int]:
    """Forget the resident blocks."""
    if not len(prefix):
        return 0
    reply, _ = yield Call(messages.Remove(0, _keys(prefix)), timeout_s)
    return int(reply.count)


def statistics(timeout_s: float) -> Verb[dict[str, Any]]:
    """The node's numbers."""
    reply, _ = yield Call(messages.Statistics(0), timeout_s)
    return cast("dict[str, Any]", reply.numbers)


# -- reading ---------------------------------------------------------------------------------------


def get(
    prefix: Prefix,
    access: Access,
    layers: LayerRange | None,
    heads: HeadRange | None,
    timeout_s: float,
) -> Verb[tuple[Blocks, int]]:
    """Hold the leading blocks and view them where they are. Returns them and the lease's id."""
    selection = select(prefix.schema, layers, heads)
    if not len(prefix):
        return Blocks(prefix, 0, None, _no_block), 0
    reply, memory = yield Call(messages.Lease(0, _keys(prefix), timeout_s), timeout_s)
    leased = Leased(prefix, memory, reply)
    try:
        good = yield from _checked(leased, access, selection, [])
    except BaseException:
        yield Post(messages.Release(0, reply.lease))
        raise
    reason = _why(reply.reason) if good == len(reply.offsets) else "corrupt"
    return Blocks(prefix, good, reason, partial(leased.block, selection)), reply.lease


def _no_block(index: int) -> Block:
    raise IndexError(index)


def get_into(
    prefix: Prefix,
    access: Access,
    into: Any,
    layers: LayerRange | None,
    heads: HeadRange | None,
    timeout_s: float,
) -> Verb[Blocks]:
    """Copy the leading blocks into caller memory, as many at a time as fit the node's DRAM."""
    selection = select(prefix.schema, layers, heads)
    targets = target_views(into, len(prefix), selection.nbytes)
    deadline = time.monotonic() + timeout_s
    generations: list[int] = []
    reason: str | None = None
    while len(generations) < len(prefix):
        done = len(generations)
        rest = prefix[done:]
        left_s = max(0.0, deadline - time.monotonic())
        reply, memory = yield Call(messages.Lease(0, _keys(rest), left_s), left_s)
        leased = Leased(rest, memory, reply)
        try:
            good = yield from _checked(leased, access, selection, targets[done:])
        finally:
            if reply.lease:
                yield Post(messages.Release(0, reply.lease))
        generations += reply.generations[:good]
        reason = _why(reply.reason) if good == len(reply.offsets) else "corrupt"
        if not good or reason not in (None, "no_room"):
            break
    count = len(generations)

    def make(index: int) -> Block:
        target, key = targets[index], prefix.keys[index]
        return Block(target, selection, key, generations[index], packed=True)

    return Blocks(prefix, count, None if count == len(prefix) else reason, make)


def _checked(
    leased: Leased, access: Access, selection: Selection, targets: Sequence[Bytes]
) -> Verb[int]:
    """Check the leased blocks, and copy them if there are `targets`; how many were good."""
    count = len(leased.offsets)
    good = leased.leading() if access.verify == "off" and not targets else 0
    at_once = max(1, min(WORK_BLOCKS_MAX, WORK_BYTES // selection.nbytes))
    while good < count:
        sample = [access.checks_payload() for _ in range(min(at_once, count - good))]
        action = partial(check, leased, selection, targets, good, sample)
        stop = good + len(sample)
        good = (yield Work(action)) if targets or any(sample) else action()
        if good < stop:
            key, generation = leased.prefix.keys[good], leased.generations[good]
            yield Post(messages.Report(0, key, generation))
            break
    return good


# -- writing ---------------------------------------------------------------------------------------


def put(
    prefix: Prefix,
    payloads: Sequence[Any],
    region_bytes: int,
    timeout_s: float,
    shard: Shard | None = None,
) -> Verb[PutResult]:
    """Copy payloads in, checksums computed on the way; resident blocks are skipped."""
    schema = prefix.schema
    selection = select_shard(schema, shard)
    views = source_views(selection, payloads, len(prefix))
    deadline = time.monotonic() + timeout_s
    at_once = max(1, region_bytes // PUT_SHARE // schema.extent_bytes)
    if selection.shard is not None:
        at_once = min(at_once, shard_blocks_max(schema))
    outcome = empty_outcome()
    position, reason = 0, None
    while position < len(prefix):
        part = prefix[position : position + at_once]
        reply, slots = yield from _reserve(part, selection, deadline)
        sources = [views[position + slot.index] for slot in slots]
        flags = yield from _filled(part, reply.lease, slots, sources)
        note_outcome(outcome, position, reply.statuses, flags)
        position += len(reply.statuses)
        if not reply.statuses:
            reason = _why(reply.reason)
            break
    return PutResult(**{k: tuple(v) for k, v in outcome.items()}, reason=reason)


def _filled(part: Prefix, lease: int, slots: list[Slot], sources: list[Bytes]) -> Verb[bytes]:
    """Fill and commit reserved slots; whatever goes wrong, the reservation ends."""
    if not slots:
        return b""
    headers: list[bytes] = []
    try:
        for slot, source in zip(slots, sources, strict=True):
            headers.append((yield Work(partial(_fill, part, slot, source))))
        reply, _ = yield Call(_commit(lease, slots, headers), DEFAULT_TIMEOUT_S)
    except BaseException:
        yield Post(messages.Abort(0, lease))  # as `commit` does
        raise
    return cast("bytes", reply.flags)


def _fill(prefix: Prefix, slot: Slot, source: Bytes) -> bytes:
    return _seal(prefix, slot, scatter_hashed(slot.view, source, slot.selection))


def empty_outcome() -> dict[str, list[int]]:
    """Where `note_outcome` writes: the fields of a `PutResult`."""
    return {"stored": [], "resident": [], "busy": [], "refused": [], "pending": []}


def note_outcome(
    outcome: dict[str, list[int]], position: int, statuses: bytes, kept: bytes
) -> None:
    """Sort the blocks from `position` on by what a reservation and its commit said of them."""
    flags = iter(kept)
    for index, status in enumerate(statuses, start=position):
        if status == Status.GRANTED:
            # What a node does not say in words that we know, it has not stored.
            outcome[_KEPT.get(next(flags, Kept.REFUSED), "refused")].append(index)
        else:
            outcome["resident" if status == Status.RESIDENT else "busy"].append(index)


_KEPT: dict[int, str] = {Kept.STORED: "stored", Kept.PENDING: "pending"}


@dataclass(frozen=True, slots=True)
class Reserved:
    """Slots for the blocks that were not resident, and positions of those that got none.

    `resident`: in the pool already. `busy`: another writer is at it. The rest, from the end of the
    prefix, found no room: `reason` is "no_room" then, else None.
    """

    slots: list[Slot]
    lease: int
    resident: tuple[int, ...] = ()
    busy: tuple[int, ...] = ()
    reason: str | None = None


def reserve(prefix: Prefix, timeout_s: float, shard: Shard | None = None) -> Verb[Reserved]:
    """Slots for the blocks that are not resident."""
    selection = select_shard(prefix.schema, shard)
    if not len(prefix):
        return Reserved([], 0)
    if selection.shard is not None:
        check_shard_blocks(prefix)
    reply, slots = yield from _reserve(prefix, selection, time.monotonic() + timeout_s)
    if not reply.statuses:
        raise NoRoom(
            f"no room for a block of {prefix.schema.extent_bytes} bytes within {timeout_s} s: "
            "everything else is leased, pinned, being written, or an ancestor of this block"
        )
    resident, busy = (
        tuple(i for i, status in enumerate(reply.statuses) if status == wanted)
        for wanted in (Status.RESIDENT, Status.BUSY)
    )
    return Reserved(slots, reply.lease, resident, busy, _why(reply.reason))


def commit(
    prefix: Prefix, slots: Sequence[Slot], lease: int, timeout_s: float = DEFAULT_TIMEOUT_S
) -> Verb[bytes]:
    """Checksum what was written in place and make it visible. A `Kept` per slot."""
    if not slots:
        return b""
    headers: list[bytes] = []
    try:
        for slot in slots:
            if slot.skipped:
                headers.append(b"")
            else:
                headers.append((yield Work(partial(_seal_in_place, prefix, slot))))
        reply, _ = yield Call(_commit(lease, slots, headers), timeout_s)
    except BaseException:
        # Also when its turn to be sent never came. After a commit, an abort has nothing to end.
        yield Post(messages.Abort(0, lease))
        raise
    return cast("bytes", reply.flags)


def _commit(lease: int, slots: Sequence[Slot], headers: list[bytes]) -> messages.Commit:
    """The request; only ranks of a shared write send headers."""
    skip = [i for i, slot in enumerate(slots) if slot.skipped]
    shared = slots[0].selection.shard is not None
    return messages.Commit(0, lease, skip, headers if shared else [])


def reserve_request(prefix: Prefix, selection: Selection, timeout_s: float) -> messages.Reserve:
    """The request for extents for the missing blocks of `prefix`; `selection` says whether for one
    rank's slice of each."""
    request = messages.Reserve(
        0, _keys(prefix), prefix.parent, prefix.start, prefix.schema.extent_bytes, timeout_s
    )
    if selection.shard is not None:
        request.rank, request.ranks = selection.shard
        request.owned = selection.bitmap()
    return request


def _reserve(
    prefix: Prefix, selection: Selection, deadline: float
) -> Verb[tuple[messages.Reserved, list[Slot]]]:
    """The node's answer, and the slots that it granted."""
    left_s = max(0.0, deadline - time.monotonic())
    request = reserve_request(prefix, selection, left_s)
    reply, memory = yield Call(request, left_s)
    granted = [i for i, status in enumerate(reply.statuses) if status == Status.GRANTED]
    size = prefix.schema.extent_bytes
    slots = [
        Slot(memory[offset : offset + size], selection, index, offset, generation)
        for index, offset, generation in zip(granted, reply.offsets, reply.generations, strict=True)
    ]
    return reply, slots


def _seal_in_place(prefix: Prefix, slot: Slot) -> bytes:
    algorithm = prefix.schema.checksum
    return _seal(prefix, slot, local.hash_segments(slot.view, slot.selection.spans, algorithm))


def _seal(prefix: Prefix, slot: Slot, found: NDArray[np.uint64]) -> bytes:
    """Write the header; one rank of several returns its own for the commit instead."""
    place = {"generation": slot.generation, "offset": slot.offset}
    checksums = all_checksums(slot.selection, found)
    if slot.selection.shard is not None:
        return shard_header(prefix, slot.index, checksums=checksums, **place)
    seal(slot.extent, prefix, slot.index, checksums=checksums, **place)
    return b""


# -- small -----------------------------------------------------------------------------------------


def _keys(prefix: Prefix) -> bytes:
    check_blocks(prefix)
    return prefix.key_bytes


def _why(reason: int) -> str | None:
    return None if reason == Reason.NONE else Reason(reason).name.lower()
