"""Pinned memory: registers the pool's memory on this host with CUDA, so that a GPU copies from it
and to it directly.

Each user has a `PinnedPool`. Several in a process that pin the same mapping (a connector and its
HBM tier, two models) share one registration, which ends with the last of them: the `close` of one
does not unpin the memory under another's copies.
"""

from __future__ import annotations

import logging
import os
import threading
from itertools import takewhile
from typing import TYPE_CHECKING, NamedTuple
from weakref import WeakValueDictionary

from tiffin.messenger.errors import MessengerError
from tiffin.messenger.gpu.pinning import Pinned

from ...errors import TiffinError

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy as np
    from numpy.typing import NDArray

    from ...client.client import Client

    Bytes = NDArray[np.uint8]
    WhileIdle = Callable[[Callable[[], None]], bool]

log = logging.getLogger(__name__)


class PinnedPool:
    """Pins `client`'s mappings of its node's memory for `device` ("cuda:0"), each once: the mapping
    for reads and, once the client has written, the mapping for writes. On "cpu" there is nothing to
    register, and only the bookkeeping is done.

    A restarted node has other memory: `follow` pins it and unpins the old mapping, whose bytes
    would stay allocated while it is pinned. If CUDA refuses, `follow` logs it once per mapping, and
    copies go through staging buffers. The memory stays mapped while it is pinned, also after the
    client's `close`: `close` this object.

    `while_idle(action)` runs `action` if none of the owner's copies is in flight, and returns
    whether it did: memory is unpinned only inside it. Not thread-safe.
    """

    def __init__(self, client: Client, device: str, while_idle: WhileIdle) -> None:
        """Pins nothing yet."""
        self._client = client
        self._device = device
        self._while_idle = while_idle
        self._current: list[_Attempt] = []  # one for each mapping of the last `follow`
        self._old: list[_Registration] = []

    def follow(self) -> None:
        """Pin the client's current mappings, unless that was tried before. About 0.3 s per GiB, the
        first time (an estimate, see `tiffin.messenger.gpu.pinning`)."""
        mapped = self._mapped()
        self._set_aside(mapped)
        # Unpin the old mappings first if possible: a system limits the locked memory.
        self._let_go()
        for memory in mapped[len(self._current) :]:
            self._current.append(_Attempt(memory, self._take(memory)))

    def _mapped(self) -> tuple[Bytes, ...]:
        """The client's current mappings; if it is closed or its node is down, the last ones."""
        try:
            link = self._client.near_link
            return () if link is None else link.mapping.all
        except TiffinError:
            return tuple(attempt.memory for attempt in self._current)

    def _take(self, memory: Bytes) -> _Registration | None:
        try:
            return _shared.take(memory, self._device)
        except MessengerError as error:
            log.warning(
                "the pool's memory is not pinned, so copies pass through staging buffers: %s", error
            )
            return None

    def close(self) -> None:
        """Unpin all memory, unless copies are in flight: then it stays pinned, and another call
        retries."""
        self._set_aside(())
        self._let_go()

    def _set_aside(self, mapped: tuple[Bytes, ...]) -> None:
        """Keep the leading mappings that are unchanged; queue the others to be unpinned."""
        pairs = zip(self._current, mapped, strict=False)
        kept = sum(1 for _ in takewhile(lambda pair: pair[0].memory is pair[1], pairs))
        self._old += [one.registration for one in self._current[kept:] if one.registration]
        del self._current[kept:]

    def _let_go(self) -> None:
        if self._old:
            self._while_idle(self._give_back)

    def _give_back(self) -> None:
        while self._old:
            try:
                self._old.pop().give_back()
            except MessengerError as error:  # at worst it stays pinned
                log.warning("%s", error)


class _Attempt(NamedTuple):
    """A mapping and its registration, None if CUDA refused it."""

    memory: Bytes
    registration: _Registration | None


class _Registration:
    """A pinned mapping with a count of its users: registered once, until the last of them gives it
    back. It also ends when all users have dropped it without `give_back`."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._pinned: Pinned | None = None
        self._users = 0

    def take(self, memory: Bytes, device: str) -> None:
        """Add a user, and pin the memory for the first one. A registration is valid for all devices
        of a kind, so the first user's serves all. Raises the errors of `Pinned`."""
        with self._lock:
            if self._pinned is None:
                self._pinned = Pinned(memory, device)
            self._users += 1

    def give_back(self) -> None:
        """Remove a user; the last one unpins. Raises PinningError when CUDA refuses."""
        with self._lock:
            self._users -= 1
            if not self._users and self._pinned is not None:
                pinned, self._pinned = self._pinned, None
                pinned.close()


class _Shared:
    """The registrations of this process. Thread-safe; while a mapping is being pinned, only callers
    that want the same mapping wait."""

    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        """In a forked child: start empty, as nothing is pinned there, with a new lock, which a
        thread of the parent may have held."""
        self._lock = threading.Lock()
        self._registrations: WeakValueDictionary[tuple[int, int, str], _Registration] = (
            WeakValueDictionary()
        )

    def take(self, memory: Bytes, device: str) -> _Registration:
        """The registration of a mapping, to be given back. Raises the errors of `Pinned`."""
        key = memory.ctypes.data, memory.nbytes, device.partition(":")[0]
        with self._lock:
            found = self._registrations.setdefault(key, _Registration())
        found.take(memory, device)
        return found


_shared = _Shared()
os.register_at_fork(after_in_child=_shared.forget)
