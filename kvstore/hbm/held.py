"""What a caller holds of an HBM tier: blocks to read, slots to write.

Streams. Both are handed out when nothing of the store's own work on them is under way: the caller
may launch on any stream at once. In the other direction the store cannot know what the caller has
launched, so the end of a `with` block notes where the caller's stream is (an event), and the memory
stays held until the stream has passed it. `release`, `commit` and `abort` take the `stream` that
used the memory; without one it is the calling thread's current stream on that device. Who used
several streams joins them first (`stream.wait_stream`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, Self, overload

from ..errors import ClientClosed, StaleLease

if TYPE_CHECKING:
    from collections.abc import Callable

    from ..keys import Prefix
    from ..node.core import Reservation
    from ..node.records import Replica, Session
    from .core import Entry
    from .memory import Point


@dataclass(frozen=True, slots=True)
class HbmBlock:
    """One leased block: `tensor` is its payload on the device, uint8 [block_bytes], to be read.

    `offset` is where it begins in the store's `tensor`, for kernels that take a table of places.
    """

    tensor: Any
    key: bytes
    generation: int
    offset: int
    entry: Entry


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
    """Who ends what is held here: the store."""

    def point(self, stream: Any) -> Point:
        """Where `stream` is now. Nothing has ended yet if this raises."""

    def let_go(self, use: Session, point: Point) -> None:
        """End a use of the memory when the stream has passed `point`."""

    def commit(self, slots: HbmSlots, use: Session, lease: int, point: Point) -> tuple[int, ...]:
        """Publish; the positions that were stored. Ends the use in any case."""


class HbmBlocks(Sequence[HbmBlock]):
    """The leading blocks of a prefix that are in HBM, leased until `release()` or the end of the
    `with` block: never evicted, never overwritten.

    `hits` of them were in HBM when they were asked for, the others came up from the pool. `reason`
    says why there are not more: "miss" (nobody has it), "busy" (being written), "no_room" (HBM is
    full of what is leased or pinned), "deadline", "corrupt" (was damaged, and was dropped),
    "pool" (it does not answer), "admission" (not wanted often enough); None if complete. `ready`
    is an event that has passed on a GPU, and None on the CPU: a stream may wait for it, none must.
    """

    def __init__(
        self,
        prefix: Prefix,
        blocks: Sequence[HbmBlock],
        use: Session | None,
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
        self._use = use
        self._keeper = keeper
        self._released = False

    @overload
    def __getitem__(self, index: int) -> HbmBlock: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[HbmBlock]: ...
    def __getitem__(self, index: int | slice) -> HbmBlock | Sequence[HbmBlock]:
        if self._released:
            raise ClientClosed("these blocks were released; use them inside the `with` block")
        return self._blocks[index]

    def __len__(self) -> int:
        return len(self._blocks)

    @property
    def tokens(self) -> int:
        """Tokens that the blocks cover."""
        return len(self) * self.prefix.schema.block_tokens

    @property
    def complete(self) -> bool:
        """Whether every block that was asked for is here."""
        return len(self) == len(self.prefix)

    @property
    def released(self) -> bool:
        """Whether `release` was called."""
        return self._released

    def release(self, stream: Any = None) -> None:
        """End the lease once `stream` has passed what was launched on it so far. Raises StaleLease
        the second time, TierUnavailable if the device refuses: then they are held as before."""
        if self._released:
            raise StaleLease("these blocks were released before")
        if self._use is not None:
            point = self._keeper.point(stream)
            self._released = True
            self._keeper.let_go(self._use, point)
        self._released = True

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if not self._released:
            self.release()

    def __repr__(self) -> str:
        why = "" if self.complete else f", then {self.reason}"
        return f"<HbmBlocks {len(self)} of {len(self.prefix)}, {self.tokens} tokens{why}>"


class HbmSlots(Sequence[HbmSlot]):
    """Reserved blocks to write on the device; a context manager that publishes them when it ends
    well. An exception inside aborts all.

    Holds only blocks that were not in HBM; `resident` and `busy` (another thread is at it) are
    positions of the others, and so is, after the commit, `stored`. `reason` is "no_room" if the end
    of the prefix got no slots, else None.
    """

    def __init__(
        self,
        prefix: Prefix,
        slots: Sequence[HbmSlot],
        reservation: Reservation,
        use: Session,
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
        self._slots = slots
        self._lease = reservation.lease.id if reservation.lease is not None else 0
        self._use = use
        self._keeper = keeper
        self._ended = False

    @overload
    def __getitem__(self, index: int) -> HbmSlot: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[HbmSlot]: ...
    def __getitem__(self, index: int | slice) -> HbmSlot | Sequence[HbmSlot]:
        if self._ended:
            raise ClientClosed("these slots were committed or aborted; write inside the `with`")
        return self._slots[index]

    def __len__(self) -> int:
        return len(self._slots)

    def commit(self, stream: Any = None) -> None:
        """Wait for `stream`, compute the checksums on the device, publish.

        Raises StaleLease if the reservation expired or has ended, TierUnavailable if the device
        refuses; nothing is published then.
        """
        point = self._end(stream)
        self.stored = self._keeper.commit(self, self._use, self._lease, point)

    def abort(self, stream: Any = None) -> None:
        """Give the slots back; their memory is free when `stream` has passed."""
        point = self._end(stream)
        self._keeper.let_go(self._use, point)

    def kept(self) -> Sequence[HbmSlot]:
        """All slots, also after the end. For the store."""
        return self._slots

    def _end(self, stream: Any) -> Point:
        if self._ended:
            raise StaleLease("this reservation was committed or aborted before")
        point = self._keeper.point(stream)
        self._ended = True
        return point

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if self._ended:
            return
        if kind is None:
            self.commit()
        else:
            self.abort()

    def __repr__(self) -> str:
        why = f", then {self.reason}" if self.reason else ""
        return f"<HbmSlots {len(self)} of {len(self.prefix)} blocks{why}>"


def blocks_of(
    replicas: Sequence[Replica], entries: Sequence[Entry], view: Callable[[Replica], Any]
) -> list[HbmBlock]:
    """Replicas as what a caller holds; `view` gives a tensor."""
    return [
        HbmBlock(view(r), r.key, r.generation, r.offset, entry)
        for r, entry in zip(replicas, entries, strict=True)
    ]
