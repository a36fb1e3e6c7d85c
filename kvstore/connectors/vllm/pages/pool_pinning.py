"""Pinned memory of the pool on this host, so that a GPU copies from it and to it directly.

It is registered when blocks are first loaded or saved, in the background: that takes some 0.3 s per
GiB, and must not happen while the engine captures CUDA graphs, which it does before its first step.
Until then copies pass through buffers of the messenger's, at the speed of a core.
"""

from __future__ import annotations

import logging
import threading
import time
from typing import TYPE_CHECKING

from ....errors import TiffinError
from ....hbm.device.host_pinning import PinnedPool

if TYPE_CHECKING:
    from ....client.client import Client
    from ....hbm.device.host_pinning import WhileIdle
    from ..pool_link import PoolLink

log = logging.getLogger(__name__)

# How often it is looked whether the node was started anew, and has other memory.
PERIOD_S = 5.0
# How long the end waits for a registration, which can't be given up. The process ends without it.
_CLOSE_S = 5.0


class PoolPinning:
    """Pins the memory that `link`'s client has mapped, for `device` ("cuda:0"), and follows the
    node's restarts. `while_idle`: see `PinnedPool`. Thread-safe."""

    def __init__(self, link: PoolLink, device: str, while_idle: WhileIdle) -> None:
        self._link = link
        self._device = device
        self._while_idle = while_idle
        self._lock = threading.Lock()
        # Protected by _lock.
        self._thread: threading.Thread | None = None
        self._due_at = 0.0
        self._closed = False
        # Of the thread, which is one at a time.
        self._client: Client | None = None
        self._pool: PinnedPool | None = None

    def follow_soon(self) -> None:
        """Pin what is mapped now, in a thread, unless that was tried `PERIOD_S` ago or less."""
        now = time.monotonic()
        with self._lock:
            running = self._thread is not None and self._thread.is_alive()
            if self._closed or running or now < self._due_at:
                return
            self._due_at = now + PERIOD_S
            self._thread = threading.Thread(target=self._follow, name="tiffin-pin", daemon=True)
            self._thread.start()

    def close(self) -> None:
        """Unpin. Call it when no copy uses the memory."""
        with self._lock:
            self._closed = True
            thread = self._thread
        if thread is not None:
            thread.join(_CLOSE_S)
            if thread.is_alive():
                return
        if self._pool is not None:
            self._pool.close()

    def _follow(self) -> None:
        try:
            self._link.call(self._pin)
        except TiffinError as error:
            log.debug("the pool's memory is not pinned: %s", error)

    def _pin(self, client: Client) -> None:
        if client is not self._client:
            if self._pool is not None:
                self._pool.close()
            self._client, self._pool = client, PinnedPool(client, self._device, self._while_idle)
        assert self._pool is not None
        self._pool.follow()
