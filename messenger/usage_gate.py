"""A gate that tracks the calls which use a resource, so that `close` can wait for their end."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable

T = TypeVar("T")

# How often `close` polls whether the last call has ended. A call that ends notifies no waiter: an
# exception from a signal handler could interrupt it in between.
_LOOK_S = 0.001


class UsageGate:
    """Tracks the calls that use a resource which `close` is about to release: a region, a
    connection, memory. Thread-safe.

    A call is `run(action)`, or a `with gate:` block, which an exception from a signal handler may
    leave half entered or half left: in the main thread use `run`. Any number of threads may be
    inside at once, and a thread may enter again while it is inside. After `close`, a call raises
    the error that `refusal()` makes.
    """

    __slots__ = ("_entered", "_inside", "_refusal", "closed")

    def __init__(self, refusal: Callable[[], Exception]) -> None:
        self.closed = False
        self._refusal = refusal
        self._inside: dict[object, None] = {}
        self._entered: list[object] = []  # tokens of `with` blocks; they are interchangeable

    def __enter__(self) -> None:
        token = object()
        self._inside[token] = None
        self._entered.append(token)
        if self.closed:
            self.__exit__()
            raise self._refusal()

    def __exit__(self, *_: object) -> None:
        self._inside.pop(self._entered.pop(), None)

    def run(self, action: Callable[[], T]) -> T:
        """Call `action` inside the gate; returns its result, or raises its error."""
        inside, token = self._inside, object()
        try:
            inside[token] = None
            if self.closed:
                raise self._refusal()
            return action()
        finally:
            inside.pop(token, None)

    def check(self) -> None:
        """Raise `refusal()` once the gate is closed. For calls that are inside, to end early."""
        if self.closed:
            raise self._refusal()

    def close(self, timeout_s: float = float("inf")) -> bool:
        """Refuse new calls, and wait until no call is inside; returns whether that was so within
        `timeout_s`. Must not be called from inside."""
        self.closed = True
        until = time.monotonic() + timeout_s
        while self._inside:
            if time.monotonic() >= until:
                return False
            time.sleep(_LOOK_S)
        return True
