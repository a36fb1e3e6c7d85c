"""A caller's claim on the tier's memory (a lease or a reservation) ends exactly once, in any case.

The caller ends it: `release`, `commit`, `abort`, or the end of a `with` block. An exception of a
signal handler may come before any of them, or between a verb's return and the assignment of its
result. So a use also ends when its result and all views of its memory are garbage. It never ends
early: as long as a view lives, its memory stays leased or reserved.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from tiffin.messenger.signal_safe import Forsaken, Once

if TYPE_CHECKING:
    from collections.abc import Callable

    from ..node.core.records import Session


class Claim:
    """The right to end `use`, which is None without a lease or reservation. Thread-safe."""

    __slots__ = ("_ending", "_forsaken", "use")

    def __init__(
        self, use: Session | None, memory: object, forsaken: Callable[[Session], None]
    ) -> None:
        """Calls `forsaken(use)` in another thread if `memory` becomes garbage before `take`."""
        self.use = use
        self._ending = Once()
        self._forsaken: Forsaken | None = None
        if use is not None:
            self._forsaken = Forsaken.when(memory, partial(self._end, use, forsaken))

    @property
    def taken(self) -> bool:
        """Whether a thread has ended the use, or is about to."""
        return self._ending.taken

    def take(self) -> bool:
        """Take the right to end the use. Returns True for the first caller only."""
        if not self._ending.take():
            return False
        watcher, self._forsaken = self._forsaken, None  # breaks a cycle: the watcher refers to us
        if watcher is not None:
            watcher.forget()
        return True

    def _end(self, use: Session, forsaken: Callable[[Session], None]) -> None:
        if self.take():
            forsaken(use)
