"""The contract of a transport, and of what it serves. The suite that every transport passes is
`tiffin.messenger.testing.TransportContract`."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, Protocol, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from contextlib import AbstractContextManager

    from .local import ByteArray


class Range(NamedTuple):
    """`length` bytes at `offset` in the address space of a grant."""

    offset: int
    length: int


class Served(NamedTuple):
    """How far a transfer came: `ranges` leading ranges were moved whole, `nbytes` bytes of them."""

    ranges: int
    nbytes: int


NOTHING = Served(0, 0)


# Called with a range's index once all its bytes are in its target: in order, never two calls at
# once, perhaps in another thread than the caller's, and never after `read` has returned or raised.
Arrived: TypeAlias = "Callable[[int], None]"


class Transport(Protocol):
    """A way to one peer. Any thread may use it.

    `read` and `write` move whole ranges in order and return how many: fewer than were asked for
    only where the peer's grant ends early. A deadline is a `time.monotonic()`. After either returns
    *or raises*, nothing touches targets or sources any more.

    Both raise RangeError (before anything moves) for targets that do not fit their ranges,
    GrantError, PeerLost, TransferTimeout (Stalled) and FrameError. After an error, targets of
    ranges that did not arrive hold anything.
    """

    name: str  # "local", "shm", "tcp", "nixl"

    def read(
        self,
        grant: int,
        ranges: Sequence[Range],
        targets: Sequence[ByteArray],
        *,
        deadline: float,
        arrived: Arrived | None = None,
    ) -> Served:
        """Copy each range of the peer's grant into its target (uint8, contiguous, as long)."""

    def write(
        self,
        grant: int,
        ranges: Sequence[Range],
        sources: Sequence[ByteArray],
        *,
        deadline: float,
    ) -> Served:
        """Copy each source over its range of the peer's grant. Returns when they are there."""

    def close(self) -> None:
        """Let go of connections and mappings. Calls under way end with PeerLost."""


class Grants(Protocol):
    """The serving side's book: which memory a peer may touch, by number."""

    def open(self, grant: int, *, writes: bool) -> AbstractContextManager[Sequence[ByteArray]]:
        """The grant's arrays, valid and not reused inside the block.

        Raises GrantError, with a reason that the peer is told.
        """
