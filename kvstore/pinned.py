"""The pool's memory on this host, registered with CUDA: a GPU copies from it and to it directly.

Who wants it pinned has a `PinnedPool`. Several in a process that want the same mapping (a connector
and its HBM tier, two models) share one registration, which ends with the last of them: nobody's
copies lose it to another's `close`.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from typing import TYPE_CHECKING
from weakref import WeakValueDictionary

from tiffin.messenger.errors import MessengerError
from tiffin.messenger.pinning import Pinned

from .errors import TiffinError
from .near import near_link

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy as np
    from numpy.typing import NDArray

    from .client import Client

    Bytes = NDArray[np.uint8]
    WhileIdle = Callable[[Callable[[], None]], bool]

log = logging.getLogger(__name__)


class PinnedPool:
    """Pins what `client` maps of its node's memory for `device` ("cuda:0"), once per mapping. On
    "cpu" there is nothing to register, and only the bookkeeping is done.

    A node that was restarted has other memory: `follow` pins it, and lets go of the old, which
    would take its bytes for as long as it is pinned. Refused, it says so once, and copies go
    through staging buffers. The memory stays mapped while it is pinned, also when the client is
    closed: `close` it.

    `while_idle(action)` does `action` if none of the owner's copies is under way, and says whether
    it did: memory is let go of nowhere else. One thread at a time.
    """

    def __init__(self, client: Client, device: str, while_idle: WhileIdle) -> None:
        """Pins nothing yet."""
        self._client = client
        self._device = device
        self._while_idle = while_idle
        self._seen: Bytes | None = None  # also if it was refused
        self._current: _Registration | None = None  # of `_seen`
        self._old: list[_Registration] = []

    def follow(self) -> None:
        """Pin the memory that the client has now, unless that was tried before. About 0.3 s per
        GiB, the first time (an estimate, see `tiffin.messenger.pinning`)."""
        memory = self._seen
        with contextlib.suppress(TiffinError):  # closed, or gone for the moment: all stays as it is
            link = near_link(self._client)
            memory = None if link is None else link.memory
        changed = memory is not self._seen
        if changed:
            self._set_aside()
            self._seen = memory
        # The old goes first where it may: a system locks only so much.
        self._let_go()
        if changed and memory is not None:
            try:
                self._current = _shared.take(memory, self._device)
            except MessengerError as error:
                log.warning(
                    "the pool's memory is not pinned, so copies pass through staging buffers: %s",
                    error,
                )

    def close(self) -> None:
        """Make it ordinary memory again, unless copies are under way: that stays pinned, and
        another call tries again."""
        self._set_aside()
        self._seen = None
        self._let_go()

    def _set_aside(self) -> None:
        if self._current is not None:
            self._old.append(self._current)
            self._current = None

    def _let_go(self) -> None:
        if self._old:
            self._while_idle(self._give_back)

    def _give_back(self) -> None:
        while self._old:
            try:
                self._old.pop().give_back()
            except MessengerError as error:  # at worst it stays pinned
                log.warning("%s", error)


class _Registration:
    """A mapping that several may have pinned: once, as long as one of them wants it. Dropped by all
    without being given back, it ends as well."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._pinned: Pinned | None = None
        self._users = 0

    def take(self, memory: Bytes, device: str) -> None:
        """Pin it, or be one more. It holds for all devices of a kind, so the first one's serves
        all. Raises what `Pinned` does."""
        with self._lock:
            if self._pinned is None:
                self._pinned = Pinned(memory, device)
            self._users += 1

    def give_back(self) -> None:
        """The last one ends it. Raises PinningError when CUDA refuses."""
        with self._lock:
            self._users -= 1
            if not self._users and self._pinned is not None:
                pinned, self._pinned = self._pinned, None
                pinned.close()


class _Shared:
    """What this process has pinned. Thread-safe; only who wants the same mapping waits while it is
    pinned."""

    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        """In a forked child nothing is pinned, and another thread may have held the lock."""
        self._lock = threading.Lock()
        self._registrations: WeakValueDictionary[tuple[int, int, str], _Registration] = (
            WeakValueDictionary()
        )

    def take(self, memory: Bytes, device: str) -> _Registration:
        """Its registration, to be given back. Raises what `Pinned` does."""
        key = memory.ctypes.data, memory.nbytes, device.partition(":")[0]
        with self._lock:
            found = self._registrations.setdefault(key, _Registration())
        found.take(memory, device)
        return found


_shared = _Shared()
os.register_at_fork(after_in_child=_shared.forget)
