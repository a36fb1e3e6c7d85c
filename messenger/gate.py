"""Who is inside, and a door that is closed behind the last one."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable

T = TypeVar("T")


class Gate:
    """Calls that use something which `close` is about to take away: a region, a connection, memory.

    `with gate:` is a call; any number of threads may be inside at once, and one may enter again
    while it is. After `close` nobody gets in: `refusal()` makes the error that is raised instead.
    A class with `__enter__`: a generator would cost every small get a microsecond.
    """

    __slots__ = ("_changed", "_inside", "_refusal", "closed")

    def __init__(self, refusal: Callable[[], Exception]) -> None:
        self.closed = False
        self._refusal = refusal
        self._changed = threading.Condition()
        self._inside = 0

    def __enter__(self) -> None:
        with self._changed:
            self.check()
            self._inside += 1

    def __exit__(self, *_: object) -> None:
        with self._changed:
            self._inside -= 1
            self._changed.notify_all()

    def run(self, action: Callable[[], T]) -> T:
        """Do `action` inside; returns, or raises, what it does."""
        with self:
            return action()

    def check(self) -> None:
        """Raise `refusal()` once the gate is closed. For calls that are inside, to end early."""
        if self.closed:
            raise self._refusal()

    def close(self) -> None:
        """Let nobody in any more; returns when nobody is inside. Not to be called from inside."""
        with self._changed:
            self.closed = True
            self._changed.wait_for(lambda: not self._inside)
