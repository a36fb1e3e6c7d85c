"""Promotion of blocks from the pool to HBM: fetch, copy, verify on the device, publish."""

from __future__ import annotations

import contextlib
import threading
import time
from typing import TYPE_CHECKING

import numpy as np

from tiffin.messenger.health import Health

from ..deadlines import until_s
from ..errors import ClientClosed, NoRoom, StaleLease, TierUnavailable
from ..node.core.node_core import ReserveStatus
from ..node.core.records import Kept
from .core.hbm_core import Admission, HbmEntry, positions
from .device.device_memory import Never, Unfinished
from .pool_access import POOL_ERRORS, fetch, kept_open, no_release, nothing, spans_of

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from ..client.client import Client
    from ..client.verbs.arguments import Verify
    from ..format.keys import Prefix
    from ..node.core.node_core import Reservation
    from ..node.core.records import Session
    from .core.inflight_promotions import InflightPromotion
    from .device.device_memory import HbmMemory
    from .locked_core import LockedCore
    from .pool_access import FetchedBlocks

    Sums = NDArray[np.uint64]


# How long the pool is left alone after a call that it did not answer.
FIRST_S, MAX_S = 0.1, 2.0
# The reason of a promotion that ended early: look up HBM again, and retry for the rest.
AGAIN = "again"


class PoolHealth:
    """A thread-safe circuit breaker for calls to the pool: while the pool does not answer, only a
    probe from time to time calls it, not every prompt."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._health = Health(FIRST_S, MAX_S)

    def admits(self) -> bool:
        """Whether to call the pool now. If it is down, True makes the caller the probe."""
        with self._lock:
            return self._health.admits(time.monotonic())

    def failed(self) -> None:
        """Record that the pool did not answer a call."""
        with self._lock:
            self._health.failed(time.monotonic())

    def answered(self) -> None:
        """Record that the pool answered a call."""
        with self._lock:
            self._health.answered()


class Promoter:
    """Promotes blocks from the pool to HBM, in the calling thread."""

    def __init__(
        self,
        client: Client,
        memory: HbmMemory,
        locked_core: LockedCore,
        pool_health: PoolHealth,
        admission: Admission,
    ) -> None:
        self._client = client
        self._memory = memory
        self._locked_core = locked_core
        self._pool_health = pool_health
        self._admission = admission

    def bring(
        self, prefix: Prefix, verify: Verify, deadline: float, *, join: bool
    ) -> tuple[frozenset[int], str | None]:
        """Promote the leading blocks of `prefix` that the pool has and HBM has room for.

        Returns the generations of the published, verified blocks, and the reason why there are not
        more: AGAIN if a retry may get more, as another caller has promoted some. With `join` it
        does not fetch blocks that another caller is promoting, but waits for that caller. Never
        raises for a condition of the pool; raises TierUnavailable when the device refuses.
        """
        with self._locked_core.lock:
            wanted = prefix[: self._admission.admits(prefix.keys)]
        if not len(wanted):
            return frozenset(), "admission"
        arrival = self._locked_core.begin_arrival(wanted.keys, join=join)
        if arrival is None:
            ended = self._locked_core.await_arrival(wanted.keys[0], deadline)
            return frozenset(), AGAIN if ended else "busy"
        try:
            mine = wanted[: len(arrival.keys)]
            good, why = self._bring(mine, verify, deadline, arrival)
        finally:
            self._locked_core.end_arrival(arrival)
        return good, AGAIN if why is None and len(mine) < len(wanted) else why

    def _bring(
        self, wanted: Prefix, verify: Verify, deadline: float, arrival: InflightPromotion
    ) -> tuple[frozenset[int], str | None]:
        with contextlib.ExitStack() as stack:
            try:
                # The goodbye of the client's `close` would end the lease under the copy.
                stack.enter_context(kept_open(self._client))
            except ClientClosed:
                return frozenset(), "pool"
            fetched = self._fetch(wanted, verify, deadline)
            try:
                return self._arrive(fetched, deadline, arrival)
            except Unfinished as error:
                # A copy that began still reads the host's memory, and writes HBM.
                self._locked_core.count(timeouts=error.late)
                if error.passed is not None:
                    self._locked_core.releases.add(error.passed, fetched.release)
                    fetched.release = no_release
                if error.late:
                    return frozenset(), "deadline"
                raise TierUnavailable(f"a copy to the device failed: {error}") from error
            finally:
                fetched.release()

    def _arrive(
        self, fetched: FetchedBlocks, deadline: float, arrival: InflightPromotion
    ) -> tuple[frozenset[int], str | None]:
        """Copy the fetched blocks to HBM and publish them, as far as there is room. Raises
        Unfinished."""
        if not fetched.views:
            return frozenset(), fetched.reason
        found = fetched.prefix[: len(fetched.views)]
        try:
            use, made = self._locked_core.reserve(found, 0.0, stop_at_busy=True)
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

    def _fetch(self, wanted: Prefix, verify: Verify, deadline: float) -> FetchedBlocks:
        if not self._pool_health.admits():
            return nothing(wanted, "pool")
        try:
            fetched = fetch(self._client, wanted, verify, until_s(deadline))
        except POOL_ERRORS:
            self._pool_health.failed()
            self._locked_core.count(pool_errors=1)
            return nothing(wanted, "pool")
        self._pool_health.answered()
        return fetched

    def _copy(
        self, fetched: FetchedBlocks, use: Session, made: Reservation, deadline: float
    ) -> None:
        """Copy into the reserved extents. Raises Unfinished: then the extents are QUARANTINED until
        the copy in flight has ended."""
        assert made.lease is not None
        nbytes, granted = fetched.prefix.schema.block_bytes, positions(made, ReserveStatus.GRANTED)
        pairs = [
            (self._memory.view(replica.offset, nbytes), fetched.views[index])
            for index, replica in zip(granted, made.lease.replicas, strict=True)
        ]
        try:
            self._memory.copy(pairs, deadline)
        except Unfinished as error:
            self._locked_core.end(use, error.passed)
            raise
        except BaseException:
            self._locked_core.end(use, Never())
            raise

    def _entries(
        self, fetched: FetchedBlocks, use: Session, made: Reservation
    ) -> list[HbmEntry | None]:
        """Verify the copied blocks on the device: an entry for each granted block, None for a
        corrupt one. Raises TierUnavailable when the device refuses."""
        assert made.lease is not None
        try:
            offsets = [replica.offset for replica in made.lease.replicas]
            found = self._memory.checksums(offsets, spans_of(fetched.prefix.schema))
        except BaseException:
            self._locked_core.end(use)
            raise
        pairs = zip(positions(made, ReserveStatus.GRANTED), found, strict=True)
        return [self._entry(fetched, index, sums) for index, sums in pairs]

    def _entry(self, fetched: FetchedBlocks, index: int, sums: Sums) -> HbmEntry | None:
        expected = fetched.sums[index]
        if expected is not None and not np.array_equal(sums, expected):
            fetched.report(index)
            self._locked_core.count(damaged_arrivals=1)
            return None
        return HbmEntry(fetched.prefix, index, sums, dirty=False)

    def _publish(
        self,
        use: Session,
        made: Reservation,
        entries: list[HbmEntry | None],
        arrival: InflightPromotion,
    ) -> frozenset[int]:
        """Publish the blocks with an entry; returns the generations of the stored ones."""
        assert made.lease is not None
        try:
            kept = self._locked_core.publish(use, made.lease.id, entries, arrival)
        except StaleLease:
            return frozenset()
        replicas = made.lease.replicas
        good = [r for r, flag in zip(replicas, kept, strict=True) if flag == Kept.STORED]
        self._locked_core.count(brought=len(good), brought_bytes=sum(r.length for r in good))
        return frozenset(replica.generation for replica in good)
