"""Pieces of registered memory through which bytes pass, and their quarantine. No I/O happens here.

A transfer that its caller gave up goes on: NIXL cannot cancel. Its piece may be written at any
time until the transfer has ended, so it is put aside together with it, and looked at again when
somebody needs a piece. What is put aside is bounded by what there is: nothing is allocated instead.
"""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING, Protocol

from .errors import PeerLost, RangeError, TransferTimeout

if TYPE_CHECKING:
    from collections.abc import Callable

    from .local import ByteArray

# Who waits for a piece looks so often whether a transfer in quarantine has ended.
_LOOK_S = 0.05


class Ending(Protocol):
    """A transfer, as far as its memory is concerned."""

    def quiet(self, now: float) -> bool:
        """Whether nothing touches the memory any more."""


class Staging:
    """`memory` in pieces of `piece_bytes`; thread-safe. `owner` is whose transfer a piece serves.

    One owner may have a quarter of the pieces in quarantine (and one at least), so that a peer that
    hangs does not stop the transfers with others.
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
        """Pieces that anybody can have now."""
        return len(self._free)

    @property
    def quarantined(self) -> int:
        """Pieces whose transfers were given up and had not ended when last looked at."""
        return len(self._quarantine)

    def check(self, owner: object, now: float) -> None:
        """Raises PeerLost while too many transfers of this owner hang."""
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
        """A piece, as soon as one is free. Who waits must hold none. Raises TransferTimeout,
        PeerLost when all are in quarantine, and what `check` raises."""
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
        """The owner needs the piece no more: it is free once `flight` is quiet."""
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
