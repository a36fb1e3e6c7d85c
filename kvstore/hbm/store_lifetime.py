"""The end of an HBM store: by `close`, or by garbage collection of a dropped store."""

from __future__ import annotations

import contextlib
import threading
import time
from typing import TYPE_CHECKING

from ..deadlines import until_s

if TYPE_CHECKING:
    from tiffin.messenger.usage_gate import UsageGate

    from .background import Background
    from .device.device_memory import HbmMemory
    from .device.host_pinning import PinnedPool
    from .locked_core import LockedCore

# The default timeout of `close` for copies in flight, and for callers' streams.
CLOSE_TIMEOUT_S = 10.0


class Closing:
    """Closes all resources of a store, once. Has no reference to the store, which may be gone."""

    def __init__(
        self,
        gate: UsageGate,
        background: Background,
        locked_core: LockedCore,
        memory: HbmMemory,
        pinned: PinnedPool | None,
    ) -> None:
        self._gate = gate
        self._background = background
        self._locked_core = locked_core
        self._memory = memory
        self._pinned = pinned
        self._turn = threading.Lock()
        self._began = False

    def forget(self) -> None:
        """In a forked child: do not close anything, as all of it is the parent's."""
        self._turn, self._began = threading.Lock(), True

    def close(self, timeout_s: float = CLOSE_TIMEOUT_S) -> None:
        """See `HbmStore.close`. A second call waits for the end of the first."""
        with self._turn:
            began, self._began = self._began, True
            if not began:
                self._close(timeout_s)

    def _close(self, timeout_s: float) -> None:
        self._gate.close()
        self._background.close()
        deadline = time.monotonic() + timeout_s
        ended = self._locked_core.releases.wait(timeout_s)
        self._memory.close(until_s(deadline))
        if ended:
            self._unpin()
            return
        with contextlib.suppress(RuntimeError):  # the interpreter is ending
            threading.Thread(target=self._finish, name="tiffin-hbm-late", daemon=True).start()

    def _finish(self) -> None:
        """Wait for the copies in flight, whose leases and slots in the pool delay the client's
        `close`, and unpin the memory after them."""
        self._locked_core.releases.wait()
        self._unpin()

    def _unpin(self) -> None:
        if self._pinned is not None:
            self._pinned.close()
