"""The pool's memory on this host, as a GPU copies from it and to it directly."""

from __future__ import annotations

import contextlib
import logging
from typing import TYPE_CHECKING

from tiffin.messenger.errors import MessengerError
from tiffin.messenger.pinning import Pinned

from ..errors import TiffinError
from .below import near_link

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from ..client import Client
    from .memory import HbmMemory

    Bytes = NDArray[np.uint8]

log = logging.getLogger(__name__)


class PinnedPool:
    """The pool's memory on this host, registered with CUDA, about 0.3 s per GiB, so that copies
    need no staging. Where that is refused, they go on through staging buffers, and the log says
    why. A node that was restarted has other memory: `renew` registers it, and lets go of the old,
    which would take its bytes for as long as it is registered."""

    def __init__(self, client: Client, device: str, memory: HbmMemory) -> None:
        self._link = near_link(client)
        self._device = device
        self._memory = memory
        self._seen: Bytes | None = None
        self._pinned: list[Pinned] = []  # the last one is of `_seen`
        self.renew()

    def renew(self) -> None:
        """Look whether the memory is another one. One thread at a time."""
        if len(self._pinned) > 1:
            self._memory.while_idle(self._let_go_of_old)
        if self._link is None:
            return
        try:
            memory = self._link.memory
        except TiffinError:
            return  # closed, or gone for the moment
        if memory is self._seen:
            return
        self._seen = memory
        try:
            self._pinned.append(Pinned(memory, self._device))
        except MessengerError as error:
            log.warning("copies to and from the pool pass through staging buffers: %s", error)

    def _let_go_of_old(self) -> None:
        while len(self._pinned) > 1:
            _unpin(self._pinned.pop(0))

    def close(self) -> None:
        """When no copy is under way."""
        while self._pinned:
            _unpin(self._pinned.pop())
        self._seen = None


def _unpin(pinned: Pinned) -> None:
    with contextlib.suppress(MessengerError):  # at worst it stays pinned
        pinned.close()
