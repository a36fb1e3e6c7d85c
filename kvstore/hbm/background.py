"""The thread of an HBM store: it copies down what would be lost, and tidies up."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from typing import TYPE_CHECKING

from ..errors import DeadlineExceeded, TiffinError
from .below import POOL_ERRORS
from .memory import left_s
from .saving import RUN_BYTES, CopyLate, DeviceRefused, OutOfTime, Saved, Saver

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from ..client import Client
    from ..node.records import Replica
    from ..pinned import PinnedPool
    from .bringing import PoolDoor
    from .core import Entry
    from .desk import Desk
    from .memory import HbmMemory

log = logging.getLogger(__name__)

# Expiry and pins are counted in seconds; a publication wakes the thread at once.
TICK_S = 0.25
# While something waits for a stream to pass.
ENDINGS_S = 0.005
# How long a copy down in the background may take before it is given up: 256 MiB at 50 MB/s.
SAVE_TIMEOUT_S = 5.0


class Background:
    """Saves in the background, and saves that are asked for: one at a time."""

    def __init__(
        self,
        client: Client,
        memory: HbmMemory,
        desk: Desk,
        door: PoolDoor,
        pinned: PinnedPool | None,
        block_bytes: int,
    ) -> None:
        self._desk = desk
        self._pinned = pinned
        self._door = door
        self._blocks_max = max(1, RUN_BYTES // block_bytes)
        self._saver = Saver(client, memory, desk.endings, self._ended, desk.condemn)
        self._saving = threading.Lock()  # held by whoever copies down
        self._wake = threading.Event()
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="tiffin-hbm", daemon=True)

    def start(self) -> None:
        """Begin. Not in the constructor: the thread's first look needs a complete store."""
        self._thread.start()

    def kick(self) -> None:
        """Something was published: look now."""
        self._wake.set()

    def close(self) -> None:
        """Returns when the thread has ended; a save under way ends first."""
        self._closed = True
        self._wake.set()
        if self._thread.is_alive():
            self._thread.join()

    def save(self, keys: Sequence[bytes] | None, deadline: float) -> Saved:
        """Copy down the dirty ones among `keys`, or all. Waits for a save that is under way.

        Raises DeadlineExceeded, and what the pool or the device meets.
        """
        with self._turn(deadline):
            with self._desk.lock:
                replicas = self._desk.core.saves_of(keys)
                entries = self._entries(replicas)
            return self._save(replicas, entries, deadline)

    def settle(self, deadline: float) -> None:
        """Wait until no save is under way that began before this. Raises DeadlineExceeded."""
        with self._turn(deadline):
            pass

    @contextlib.contextmanager
    def _turn(self, deadline: float) -> Iterator[None]:
        if not self._saving.acquire(timeout=left_s(deadline)):
            raise DeadlineExceeded("a copy from HBM to the pool is still under way")
        try:
            yield
        finally:
            self._saving.release()

    def _entries(self, replicas: Sequence[Replica]) -> list[Entry]:
        return [self._desk.core.entries[replica.key] for replica in replicas]

    def _save(
        self, replicas: Sequence[Replica], entries: Sequence[Entry], deadline: float
    ) -> Saved:
        total = Saved()
        try:
            self._saver.save(replicas, entries, deadline, total)
            if replicas:
                self._door.answered()
        except CopyLate:
            self._desk.count(timeouts=1)
            raise
        except (DeviceRefused, OutOfTime):
            raise
        except POOL_ERRORS:
            self._door.failed()
            self._desk.count(pool_errors=1)
            raise
        finally:
            self._desk.count(
                demotions=total.saved, demoted_bytes=total.nbytes, not_saved=total.refused
            )
        return total

    def _ended(self, replica: Replica, saved: bool) -> None:
        with self._desk.lock:
            self._desk.core.saved(replica, saved=saved)

    # -- the thread ------------------------------------------------------------------------------

    def _run(self) -> None:
        while not self._closed:
            self._wake.wait(ENDINGS_S if len(self._desk.endings) else TICK_S)
            self._wake.clear()
            try:
                self._desk.endings.look()
                with self._desk.lock:
                    self._desk.core.tick(time.monotonic())
                if self._pinned is not None:
                    self._pinned.follow()
                while not self._closed and self._save_due():
                    pass
            except TiffinError as error:
                log.warning("a copy from HBM to the pool failed: %s", error)
            except Exception:  # the thread must not end: nothing would be saved any more
                log.exception("a copy from HBM to the pool failed")

    def _save_due(self) -> bool:
        """One batch of what is due; whether it is worth looking for another one."""
        if not self._desk.core.hbm.write_back:
            return False
        if not self._saving.acquire(blocking=False):
            return False  # somebody demotes; this thread has other things to do as well
        try:
            with self._desk.lock:
                replicas = self._desk.core.saves_due(self._blocks_max)
                entries = self._entries(replicas)
            # Asked only when there is something: an answer makes the caller the probe.
            if not replicas or not self._door.admits():
                for replica in replicas:
                    self._ended(replica, saved=False)
                return False
            return self._save(replicas, entries, time.monotonic() + SAVE_TIMEOUT_S).refused == 0
        finally:
            self._saving.release()
