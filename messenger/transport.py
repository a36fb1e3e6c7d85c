"""The contract of a transport, and of the grants that it serves. The test suite that every
transport passes is `tiffin.messenger.testing.TransportContract`."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, Protocol, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from contextlib import AbstractContextManager

    import numpy as np
    from numpy.typing import NDArray


class Range(NamedTuple):
    """`length` bytes at `offset` in the address space of a grant."""

    offset: int
    length: int


class Served(NamedTuple):
    """Progress of a transfer: `ranges` leading ranges were moved whole, `nbytes` bytes in all."""

    ranges: int
    nbytes: int


NOTHING = Served(0, 0)


# Callback, called with a range's index once all its bytes are in its target: in order, never
# concurrently, perhaps in another thread than the caller's, and never after `read` has returned or
# raised.
Arrived: TypeAlias = "Callable[[int], None]"


class Transport(Protocol):
    """A path to one peer, to read from. Thread-safe.

    `read` moves whole ranges in order and returns how many: fewer than requested only where the
    peer's grant ends early. A deadline is a `time.monotonic()`. After `read` returns *or raises*,
    the transport no longer accesses the targets.

    It raises RangeError (before any byte moves) for targets that do not fit their ranges,
    GrantError, PeerLost, TransferTimeout (Stalled) and FrameError. After an error, the content of
    the targets of ranges that did not arrive is undefined.
    """

    name: str  # "tcp", "nixl"

    def read(
        self,
        grant: int,
        ranges: Sequence[Range],
        targets: Sequence[NDArray[np.uint8]],
        *,
        deadline: float,
        arrived: Arrived | None = None,
    ) -> Served:
        """Copy each range of the peer's grant into its target (uint8, contiguous, as long)."""

    def close(self) -> None:
        """Release connections and mappings. In-flight calls raise PeerLost."""


class Grants(Protocol):
    """The serving side's table of grants: the memory that a peer may access, by grant number."""

    def open(
        self, grant: int, *, writes: bool
    ) -> AbstractContextManager[Sequence[NDArray[np.uint8]]]:
        """The grant's arrays, valid and not reused inside the block.

        Raises GrantError, whose message is sent to the peer.
        """
