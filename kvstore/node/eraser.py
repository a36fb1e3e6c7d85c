"""Carries out wipes, so that no restarted node finds removed blocks, even after a power cut."""

from __future__ import annotations

import logging
import threading
from typing import TYPE_CHECKING

from ..errors import DeadlineExceeded, TierUnavailable
from .core import messages
from .mover import extent_of

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ..tiers.nvme import NvmeTier
    from .core.records import Removal, Wipe

log = logging.getLogger(__name__)


class Eraser:
    """A thread that carries out all queued wipes in one batch: a flush of the disk costs the same
    for one as for a thousand, and meanwhile the next batch collects.

    The thread calls `wiped(wipes, failed)` once per batch.
    """

    def __init__(self, nvme: NvmeTier, wiped: Callable[[Sequence[Wipe], bool], None]) -> None:
        self._nvme = nvme
        self._wiped = wiped
        self._ordered: list[Wipe] = []
        self._wake = threading.Condition()
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="tiffin-eraser", daemon=True)
        self._thread.start()

    def submit(self, wipe: Wipe) -> None:
        """Queue a wipe. Does not block."""
        with self._wake:
            self._ordered.append(wipe)
            self._wake.notify()

    def close(self) -> None:
        """Wait until all queued wipes are done, and end the thread."""
        with self._wake:
            self._closed = True
            self._wake.notify()
        self._thread.join()

    def _run(self) -> None:
        while wipes := self._next():
            failed = not self._carry_out(wipes)
            try:
                self._wiped(wipes, failed)
            except Exception:  # the thread must not end: `Remove` requests would get no reply
                log.exception("telling that blocks were wiped failed unexpectedly")

    def _next(self) -> list[Wipe]:
        with self._wake:
            self._wake.wait_for(lambda: self._ordered or self._closed)
            wipes, self._ordered = self._ordered, []
            return wipes

    def _carry_out(self, wipes: Sequence[Wipe]) -> bool:
        try:
            self._nvme.wipe([extent_of(w.replica) for w in wipes if w.replica is not None])
        except TierUnavailable as error:
            log.warning("NVMe does not forget what was removed: %s", error)
            return False
        except Exception:
            log.exception("wiping removed blocks failed unexpectedly")
            return False
        return True


def removed(request_id: int, removal: Removal, *, durable: bool) -> messages.AnyReply:
    """The reply to a `Remove`: the number of removed blocks, or a refusal because a restarted node
    may find some of them again."""
    here = f"{removal.blocks} blocks are forgotten here, but"
    if removal.failed:
        refused = "the disk refused to forget them: a restart may find them again"
        return messages.refusal(request_id, TierUnavailable(f"{here} {refused}"))
    if not durable:
        late = "the disk did not confirm it in time: a power cut may bring them back. Remove again"
        return messages.refusal(request_id, DeadlineExceeded(f"{here} {late}"))
    return messages.Done(request_id, removal.blocks)
