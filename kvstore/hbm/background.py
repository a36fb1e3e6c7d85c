"""The background thread of an HBM store: writes dirty blocks back to the pool before eviction,
expires leases and pins, and runs deferred releases."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from typing import TYPE_CHECKING

from ..deadlines import until_s
from ..errors import DeadlineExceeded, TiffinError
from .pool_access import POOL_ERRORS
from .writeback import RUN_BYTES, CopyLate, DeviceRefused, OutOfTime, Saved, Saver

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from ..client.client import Client
    from ..node.core.records import Replica
    from .core.hbm_core import HbmEntry
    from .device.device_memory import HbmMemory
    from .device.host_pinning import PinnedPool
    from .locked_core import LockedCore
    from .promotion import PoolHealth

log = logging.getLogger(__name__)

# The usual interval: expiry and pins are counted in seconds; a commit wakes the thread at once.
TICK_S = 0.25
# The interval while deferred releases wait for a stream.
RELEASES_S = 0.005
# The timeout of a write-back in the background: 256 MiB at 50 MB/s.
SAVE_TIMEOUT_S = 5.0


class Background:
    """Write-backs from HBM to the pool, in the background and on request: one at a time."""

    def __init__(
        self,
        client: Client,
        memory: HbmMemory,
        locked_core: LockedCore,
        pool_health: PoolHealth,
        pinned: PinnedPool | None,
        block_bytes: int,
        wake: threading.Event,
    ) -> None:
        """`wake`: set after a commit in HBM, so that the thread looks at once."""
        self._locked_core = locked_core
        self._pinned = pinned
        self._pool_health = pool_health
        self._blocks_max = max(1, RUN_BYTES // block_bytes)
        self._saver = Saver(client, memory, locked_core.releases, self._ended, locked_core.condemn)
        self._saving = threading.Lock()  # held by the thread that writes back
        self._wake = wake
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="tiffin-hbm", daemon=True)

    def start(self) -> None:
        """Start the thread. Not in the constructor: its first pass needs a complete store."""
        self._thread.start()

    def close(self) -> None:
        """Stop the thread and wait for its end; a save in flight ends first."""
        self._closed = True
        self._wake.set()
        if self._thread.is_alive():
            self._thread.join()

    def save(self, keys: Sequence[bytes] | None, deadline: float) -> Saved:
        """Write back the dirty blocks among `keys`, or of all. Waits for a save in flight.

        Raises DeadlineExceeded, and the errors of the pool and the device (see `Saver.save`).
        """
        with self._turn(deadline):
            with self._locked_core.lock:
                replicas = self._locked_core.core.saves_of(keys)
                entries = self._entries(replicas)
            return self._save(replicas, entries, deadline)

    def settle(self, deadline: float) -> None:
        """Wait for the end of a save that began before this call. Raises DeadlineExceeded."""
        with self._turn(deadline):
            pass

    @contextlib.contextmanager
    def _turn(self, deadline: float) -> Iterator[None]:
        if not self._saving.acquire(timeout=until_s(deadline)):
            raise DeadlineExceeded("a copy from HBM to the pool is still under way")
        try:
            yield
        finally:
            self._saving.release()

    def _entries(self, replicas: Sequence[Replica]) -> list[HbmEntry]:
        return [self._locked_core.core.entries[replica.key] for replica in replicas]

    def _save(
        self, replicas: Sequence[Replica], entries: Sequence[HbmEntry], deadline: float
    ) -> Saved:
        total = Saved()
        try:
            self._saver.save(replicas, entries, deadline, total)
            if replicas:
                self._pool_health.answered()
        except CopyLate:
            self._locked_core.count(timeouts=1)
            raise
        except (DeviceRefused, OutOfTime):
            raise
        except POOL_ERRORS:
            self._pool_health.failed()
            self._locked_core.count(pool_errors=1)
            raise
        finally:
            self._locked_core.count(
                demotions=total.saved, demoted_bytes=total.nbytes, not_saved=total.refused
            )
        return total

    def _ended(self, replica: Replica, saved: bool) -> None:
        with self._locked_core.lock:
            self._locked_core.core.saved(replica, saved=saved)

    # -- the thread ------------------------------------------------------------------------------

    def _run(self) -> None:
        while not self._closed:
            self._wake.wait(RELEASES_S if len(self._locked_core.releases) else TICK_S)
            self._wake.clear()
            try:
                self._locked_core.releases.look()
                with self._locked_core.lock:
                    self._locked_core.core.tick(time.monotonic())
                if self._pinned is not None:
                    self._pinned.follow()
                while not self._closed and self._save_due():
                    pass
            except TiffinError as error:
                log.warning("a copy from HBM to the pool failed: %s", error)
            except Exception:  # the thread must not end: write-backs would stop
                log.exception("a copy from HBM to the pool failed")

    def _save_due(self) -> bool:
        """Write back one batch of due blocks. Returns whether the caller should try another one."""
        if not self._locked_core.core.hbm.write_back or self._saver.device_failed:
            return False
        if not self._saving.acquire(blocking=False):
            return False  # a `save` is in flight; this thread does not wait for it
        try:
            with self._locked_core.lock:
                replicas = self._locked_core.core.saves_due(self._blocks_max)
                entries = self._entries(replicas)
            # Only with blocks to save: after a yes, the breaker takes this call as its probe.
            if not replicas or not self._pool_health.admits():
                for replica in replicas:
                    self._ended(replica, saved=False)
                return False
            return self._save(replicas, entries, time.monotonic() + SAVE_TIMEOUT_S).refused == 0
        finally:
            self._saving.release()
