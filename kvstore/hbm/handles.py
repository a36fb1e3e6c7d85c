"""A caller's handles on an HBM tier: leased blocks to read, reserved slots to write.

Streams. The store returns both only after its own work on their memory has ended: the caller may
launch kernels on any stream at once. In the other direction the store cannot know what the caller
has launched, so the end of a `with` block records an event in the caller's stream, and the lease or
reservation ends only after the stream has passed it. `release`, `commit` and `abort` take the
`stream` that used the memory; without one it is the calling thread's current stream on that device.
A caller that used several streams joins them first (`stream.wait_stream`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, Self, overload

from ..errors import ClientClosed, StaleLease

if TYPE_CHECKING:
    from collections.abc import Callable

    from ..format.keys import Prefix
    from ..node.core.node_core import Reservation
    from ..node.core.records import Replica
    from .core.hbm_core import HbmEntry
    from .lease_claims import Claim


_ENDED = "this reservation was committed or aborted before"


@dataclass(frozen=True, slots=True)
class HbmBlock:
    """One leased block: `tensor` is its payload on the device, uint8 [block_bytes], to be read.

    `offset` is its offset in the store's `tensor`, for kernels that take a table of offsets.
    """

    tensor: Any
    key: bytes
    generation: int
    offset: int
    entry: HbmEntry


@dataclass(slots=True)
class HbmSlot:
    """One reserved block: `tensor` is its payload, uint8 [block_bytes], to be filled on the device.

    `index` is its position in the prefix. `skip()` leaves it out of the commit.
    """

    tensor: Any
    index: int
    offset: int
    generation: int
    skipped: bool = False

    def skip(self) -> None:
        """Do not commit this slot."""
        self.skipped = True


class Keeper(Protocol):
    """The interface of the store through which handles end their leases and reservations. Both
    methods are idempotent: they return False if the handle has ended before. If the device refuses
    to record an event they raise, and the handle has not ended."""

    def let_go(self, claim: Claim, stream: Any) -> bool:
        """End a use of the memory once `stream` has passed the work launched on it so far."""

    def commit(self, slots: HbmSlots, stream: Any) -> bool:
        """Commit the slots and set `slots.stored`. Ends the use in any case."""


class HbmBlocks(Sequence[HbmBlock]):
    """The leading blocks of a prefix that are in HBM, leased until `release()` or the end of the
    `with` block: never evicted, never overwritten.

    `hits` of them were in HBM at the call, the others were promoted from the pool. `reason` is why
    the next block is missing: "miss" (neither HBM nor the pool has it), "busy" (being written),
    "no_room" (HBM is full of leased or pinned blocks), "deadline", "corrupt" (damaged, and
    dropped), "pool" (the pool does not answer), "admission" (not requested often enough); None if
    complete. `ready` is an event that has passed already on a GPU, and None on the CPU: a stream
    may wait for it, but need not.
    """

    def __init__(
        self,
        prefix: Prefix,
        blocks: Sequence[HbmBlock],
        claim: Claim,
        keeper: Keeper,
        *,
        reason: str | None,
        hits: int,
        ready: Any = None,
    ) -> None:
        self.prefix = prefix
        self.reason = reason if len(blocks) < len(prefix) else None
        self.hits = hits
        self.ready = ready
        self._blocks = blocks
        self._claim = claim
        self._keeper = keeper

    @overload
    def __getitem__(self, index: int) -> HbmBlock: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[HbmBlock]: ...
    def __getitem__(self, index: int | slice) -> HbmBlock | Sequence[HbmBlock]:
        if self._claim.taken:
            raise ClientClosed("these blocks were released; use them inside the `with` block")
        return self._blocks[index]

    def __len__(self) -> int:
        return len(self._blocks)

    @property
    def tokens(self) -> int:
        """How many tokens these blocks cover."""
        return len(self) * self.prefix.schema.block_tokens

    @property
    def complete(self) -> bool:
        """Whether this result has every block of the prefix."""
        return len(self) == len(self.prefix)

    @property
    def released(self) -> bool:
        """Whether `release` was called."""
        return self._claim.taken

    def release(self, stream: Any = None) -> None:
        """End the lease once `stream` has passed the work launched on it so far. Raises StaleLease
        the second time, TierUnavailable if the device refuses: then the lease goes on."""
        if not self._keeper.let_go(self._claim, stream):
            raise StaleLease("these blocks were released before")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._keeper.let_go(self._claim, None)

    def __repr__(self) -> str:
        why = "" if self.complete else f", then {self.reason}"
        return f"<HbmBlocks {len(self)} of {len(self.prefix)}, {self.tokens} tokens{why}>"


class HbmSlots(Sequence[HbmSlot]):
    """A reservation: slots to write on the device. As a context manager it commits them at the end,
    and aborts them all after an exception.

    There is a slot only for each block that was not in HBM. `resident` and `busy` (another thread
    has reserved the block) are positions of the other blocks; `stored`, set by the commit, are
    positions of the committed ones. `reason` is "no_room" if blocks at the end of the prefix got no
    slots, else None.
    """

    def __init__(
        self,
        prefix: Prefix,
        slots: Sequence[HbmSlot],
        reservation: Reservation,
        claim: Claim,
        keeper: Keeper,
        *,
        resident: tuple[int, ...],
        busy: tuple[int, ...],
    ) -> None:
        self.prefix = prefix
        self.resident = resident
        self.busy = busy
        self.reason = "no_room" if len(reservation.statuses) < len(prefix) else None
        self.stored: tuple[int, ...] = ()
        self.claim = claim
        self.lease = reservation.lease.id if reservation.lease is not None else 0
        self._slots = slots
        self._keeper = keeper

    @overload
    def __getitem__(self, index: int) -> HbmSlot: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[HbmSlot]: ...
    def __getitem__(self, index: int | slice) -> HbmSlot | Sequence[HbmSlot]:
        if self.claim.taken:
            raise ClientClosed("these slots were committed or aborted; write inside the `with`")
        return self._slots[index]

    def __len__(self) -> int:
        return len(self._slots)

    def commit(self, stream: Any = None) -> None:
        """Wait for `stream`, compute the checksums on the device, make the blocks visible.

        Raises StaleLease if the reservation expired or has ended, TierUnavailable if the device
        refuses; no block becomes visible then.
        """
        if not self._keeper.commit(self, stream):
            raise StaleLease(_ENDED)

    def abort(self, stream: Any = None) -> None:
        """End the reservation without a commit; the memory is free once `stream` has passed the
        work launched on it so far. Raises StaleLease if it has ended before."""
        if not self._keeper.let_go(self.claim, stream):
            raise StaleLease(_ENDED)

    def kept(self) -> Sequence[HbmSlot]:
        """All slots, also after the end. For the store only, as `claim` and `lease` are."""
        return self._slots

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self._keeper.commit(self, None)
        else:
            self._keeper.let_go(self.claim, None)

    def __repr__(self) -> str:
        why = f", then {self.reason}" if self.reason else ""
        return f"<HbmSlots {len(self)} of {len(self.prefix)} blocks{why}>"


def blocks_of(
    replicas: Sequence[Replica], entries: Sequence[HbmEntry], view: Callable[[Replica], Any]
) -> list[HbmBlock]:
    """An `HbmBlock` for each replica; `view` makes its tensor."""
    return [
        HbmBlock(view(r), r.key, r.generation, r.offset, entry)
        for r, entry in zip(replicas, entries, strict=True)
    ]
