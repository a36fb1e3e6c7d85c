"""Staging buffers: pieces of registered memory for transfers, and their quarantine. No I/O here.

A transfer that its caller gave up continues: NIXL cannot cancel. The transfer may write to its
piece at any time until it has ended, so both go into quarantine, and the staging polls the transfer
when another call needs a piece. The quarantine is bounded by the number of pieces: no memory is
allocated to replace them.
"""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING, Protocol

from ..errors import PeerLost, RangeError, TransferTimeout

if TYPE_CHECKING:
    from collections.abc import Callable

    from ..shm.host_copy import ByteArray

# A thread that waits for a piece polls the transfers in quarantine at this interval.
_LOOK_S = 0.05


class Ending(Protocol):
    """A transfer that may still access its memory."""

    def quiet(self, now: float) -> bool:
        """Whether the transfer no longer accesses the memory."""


class Staging:
    """A pool of pieces of `piece_bytes` of `memory`; thread-safe. `owner` is the transport whose
    transfer uses a piece.

    One owner may have a quarter of the pieces in quarantine (and one at least), so that a peer that
    hangs does not stop the transfers with other peers.
    """

    def __init__(self, memory: ByteArray, piece_bytes: int) -> None:
        count = len(memory) // piece_bytes
        if not count:
            raise RangeError(f"no piece of {piece_bytes} bytes in {len(memory)}")
        self.piece_bytes = piece_bytes
        self.quarantined_max = max(1, count // 4)
        self._count = count
        self._free = [memory[i * piece_bytes : (i + 1) * piece_bytes] for i in range(count)]
        self._quarantine: list[tuple[ByteArray, Ending, object]] = []
        self._changed = threading.Condition()

    @property
    def free(self) -> int:
        """The number of free pieces."""
        return len(self._free)

    @property
    def quarantined(self) -> int:
        """The number of pieces whose transfers were given up and had not ended when last polled."""
        return len(self._quarantine)

    def check(self, owner: object, now: float) -> None:
        """Raise PeerLost while too many transfers of this owner hang."""
        with self._changed:
            self._reap(now)
            hanging = sum(whose is owner for _, _, whose in self._quarantine)
        if hanging >= self.quarantined_max:
            raise PeerLost(
                f"{hanging} transfers with this peer were given up and have not ended; "
                "it is used again when they have"
            )

    def try_take(self) -> ByteArray | None:
        """A piece, if one is free."""
        with self._changed:
            if not self._free:
                self._reap(time.monotonic())
            return self._free.pop() if self._free else None

    def take(self, deadline: float, check: Callable[[], None]) -> ByteArray:
        """A piece, as soon as one is free. The caller must not have another piece (deadlock).
        Raises TransferTimeout, PeerLost when all pieces are in quarantine, and what `check` raises.
        """
        while True:
            check()
            piece = self.try_take()
            if piece is not None:
                return piece
            with self._changed:
                if len(self._quarantine) == self._count:
                    raise PeerLost("every staging piece belongs to a transfer that does not end")
                left_s = deadline - time.monotonic()
                if left_s <= 0:
                    raise TransferTimeout("no staging piece became free by the deadline")
                if not self._free:
                    self._changed.wait(min(left_s, _LOOK_S))

    def give(self, piece: ByteArray, flight: Ending | None, owner: object, now: float) -> None:
        """Give back a piece: it is free once the transfer `flight` is quiet, and in quarantine
        until then."""
        with self._changed:
            if flight is not None and not flight.quiet(now):
                self._quarantine.append((piece, flight, owner))
            else:
                self._free.append(piece)
                self._changed.notify()

    def _reap(self, now: float) -> None:
        waiting = []
        for piece, flight, owner in self._quarantine:
            if flight.quiet(now):
                self._free.append(piece)
                self._changed.notify()
            else:
                waiting.append((piece, flight, owner))
        self._quarantine = waiting
