"""Copying blocks up from the pool: fetched, copied, verified on the device, published."""

from __future__ import annotations

import contextlib
import threading
import time
from typing import TYPE_CHECKING

import numpy as np

from ..directory.breaker import Breaker
from ..errors import ClientClosed, NoRoom, StaleLease, TierUnavailable
from ..node.core import Status
from ..node.records import Kept
from .below import POOL_ERRORS, fetch, kept_open, no_release, nothing, spans_of
from .core import Admission, Entry, positions
from .memory import Never, Unfinished, left_s

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from ..client import Client
    from ..keys import Prefix
    from ..node.core import Reservation
    from ..node.records import Session
    from ..verbs import Verify
    from .arrivals import Arrival
    from .below import Fetched
    from .desk import Desk
    from .memory import HbmMemory

    Sums = NDArray[np.uint64]


# Why a call brought no more: look at HBM again, and ask for the rest.
AGAIN = "again"


class PoolDoor:
    """Whether the pool answers: one that does not is asked again from time to time, not by every
    prompt. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._breaker = Breaker()

    def admits(self) -> bool:
        """Whether to call it now."""
        with self._lock:
            return self._breaker.admits(time.monotonic())

    def failed(self) -> None:
        """A call was not answered."""
        with self._lock:
            self._breaker.failed(time.monotonic())

    def answered(self) -> None:
        """A call was."""
        with self._lock:
            self._breaker.succeeded()


class Bringer:
    """Brings blocks up for whoever asks; in that thread."""

    def __init__(
        self,
        client: Client,
        memory: HbmMemory,
        desk: Desk,
        door: PoolDoor,
        admission: Admission,
    ) -> None:
        self._client = client
        self._memory = memory
        self._desk = desk
        self._door = door
        self._admission = admission

    def bring(
        self, prefix: Prefix, verify: Verify, deadline: float, *, join: bool
    ) -> tuple[frozenset[int], str | None]:
        """Bring up the leading blocks of `prefix` that the pool has and HBM has room for.

        Returns the generations that are published and proven, and why there are not more: AGAIN if
        that may have changed, as another has brought some. With `join` it fetches nothing that
        another is bringing, and waits for it instead. Never raises for what the pool is or does;
        TierUnavailable when the device refuses.
        """
        with self._desk.lock:
            wanted = prefix[: self._admission.admits(prefix.keys)]
        if not len(wanted):
            return frozenset(), "admission"
        arrival = self._desk.begin_arrival(wanted.keys, join=join)
        if arrival is None:
            ended = self._desk.await_arrival(wanted.keys[0], deadline)
            return frozenset(), AGAIN if ended else "busy"
        try:
            mine = wanted[: len(arrival.keys)]
            good, why = self._bring(mine, verify, deadline, arrival)
        finally:
            self._desk.end_arrival(arrival)
        return good, AGAIN if why is None and len(mine) < len(wanted) else why

    def _bring(
        self, wanted: Prefix, verify: Verify, deadline: float, arrival: Arrival
    ) -> tuple[frozenset[int], str | None]:
        with contextlib.ExitStack() as stack:
            try:
                # Its goodbye would end the lease of what is being read.
                stack.enter_context(kept_open(self._client))
            except ClientClosed:
                return frozenset(), "pool"
            fetched = self._fetch(wanted, verify, deadline)
            try:
                return self._arrive(fetched, deadline, arrival)
            except Unfinished as error:
                # The copy, if it began, still reads the host's memory, and writes HBM.
                self._desk.count(timeouts=error.late)
                if error.passed is not None:
                    self._desk.endings.add(error.passed, fetched.release)
                    fetched.release = no_release
                if error.late:
                    return frozenset(), "deadline"
                if error.interrupt is not None:
                    raise error.interrupt from None
                raise TierUnavailable(f"a copy to the device failed: {error}") from error
            finally:
                fetched.release()

    def _arrive(
        self, fetched: Fetched, deadline: float, arrival: Arrival
    ) -> tuple[frozenset[int], str | None]:
        """Copy up and publish what was fetched, as far as there is room. Raises Unfinished."""
        if not fetched.views:
            return frozenset(), fetched.reason
        found = fetched.prefix[: len(fetched.views)]
        try:
            use, made = self._desk.reserve(found, 0.0, stop_at_busy=True)
        except NoRoom:
            return frozenset(), "no_room"
        good: frozenset[int] = frozenset()
        if made.lease is not None:
            self._copy(fetched, use, made, deadline)
            entries = self._entries(fetched, use, made)
            good = self._publish(use, made, entries, arrival)
            if None in entries:
                return good, "corrupt"
        if made.reason:
            return good, "no_room"
        return good, "busy" if len(made.statuses) < len(found) else fetched.reason

    def _fetch(self, wanted: Prefix, verify: Verify, deadline: float) -> Fetched:
        if not self._door.admits():
            return nothing(wanted, "pool")
        try:
            fetched = fetch(self._client, wanted, verify, left_s(deadline))
        except POOL_ERRORS:
            self._door.failed()
            self._desk.count(pool_errors=1)
            return nothing(wanted, "pool")
        self._door.answered()
        return fetched

    def _copy(self, fetched: Fetched, use: Session, made: Reservation, deadline: float) -> None:
        """Copy into the reserved extents. Raises Unfinished: they are QUARANTINED then, until the
        copy that goes on has ended."""
        assert made.lease is not None
        nbytes, granted = fetched.prefix.schema.block_bytes, positions(made, Status.GRANTED)
        pairs = [
            (self._memory.view(replica.offset, nbytes), fetched.views[index])
            for index, replica in zip(granted, made.lease.replicas, strict=True)
        ]
        try:
            self._memory.copy(pairs, deadline)
        except Unfinished as error:
            self._desk.end(use, error.passed)
            raise
        except BaseException:
            self._desk.end(use, Never())
            raise

    def _entries(self, fetched: Fetched, use: Session, made: Reservation) -> list[Entry | None]:
        """Verify what arrived where it arrived: an entry for each granted block, None for a wrong
        one. Raises TierUnavailable when the device refuses."""
        assert made.lease is not None
        try:
            offsets = [replica.offset for replica in made.lease.replicas]
            found = self._memory.checksums(offsets, spans_of(fetched.prefix.schema))
        except BaseException:
            self._desk.end(use)
            raise
        pairs = zip(positions(made, Status.GRANTED), found, strict=True)
        return [self._entry(fetched, index, sums) for index, sums in pairs]

    def _entry(self, fetched: Fetched, index: int, sums: Sums) -> Entry | None:
        expected = fetched.sums[index]
        if expected is not None and not np.array_equal(sums, expected):
            fetched.report(index)
            self._desk.count(damaged_arrivals=1)
            return None
        return Entry(fetched.prefix, index, sums, dirty=False)

    def _publish(
        self, use: Session, made: Reservation, entries: list[Entry | None], arrival: Arrival
    ) -> frozenset[int]:
        """Make visible what is right; the generations of what was stored."""
        assert made.lease is not None
        try:
            kept = self._desk.publish(use, made.lease.id, entries, arrival)
        except StaleLease:
            return frozenset()
        replicas = made.lease.replicas
        good = [r for r, flag in zip(replicas, kept, strict=True) if flag == Kept.STORED]
        self._desk.count(brought=len(good), brought_bytes=sum(r.length for r in good))
        return frozenset(replica.generation for replica in good)
