"""The core of an HBM tier under its lock, and the releases that wait for the device."""

from __future__ import annotations

import threading
import time
from dataclasses import asdict, dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from ..errors import NoRoom
from ..sizes import format_bytes
from .core.inflight_promotions import InflightPromotion, InflightPromotions
from .device.deferred_release import POLL_S, DeferredReleases, has_passed

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ..format.keys import Prefix
    from ..node.core.node_core import Reservation
    from ..node.core.records import Reason, Replica, Session
    from .core.hbm_core import HbmCore, HbmEntry
    from .device.device_memory import Passed


@dataclass(slots=True)
class HbmCounters:
    """Counters since the store was opened, in blocks unless the name says otherwise."""

    hbm_hits: int = 0
    pool_hits: int = 0  # promoted for the `promote` that asked for them
    misses: int = 0
    published: int = 0
    brought: int = 0
    brought_bytes: int = 0
    demotions: int = 0
    demoted_bytes: int = 0
    refused: int = 0  # no room in HBM
    not_saved: int = 0  # the pool had no room, or another writer, or did not answer; still dirty
    damaged: int = 0  # corrupt in HBM: found and dropped
    damaged_arrivals: int = 0  # corrupt after promotion: never published
    pool_errors: int = 0  # calls that the pool did not answer
    timeouts: int = 0  # copies that went on after their deadline


@dataclass(slots=True)
class Held:
    """A use of the memory, with its leased replicas."""

    use: Session | None
    replicas: Sequence[Replica]
    entries: Sequence[HbmEntry]
    reason: Reason


class LockedCore:
    """Serialises all decisions of an HBM tier. Thread-safe; only `reserve` and `await_arrival`
    wait.

    The lock is held for decisions only: some microseconds a block, never during a copy, a hash or
    a call to the pool.
    """

    def __init__(
        self, core: HbmCore, kick: Callable[[], None], check_open: Callable[[], None]
    ) -> None:
        """`kick` is called after each commit. `check_open` raises once the store is closing, so
        that waiting calls do not delay the close."""
        self.core = core
        self.lock = threading.Lock()
        self.releases = DeferredReleases()
        self.counters = HbmCounters()
        self.arrivals = InflightPromotions()
        self.check_open = check_open
        self._kick = kick

    def forget(self) -> None:
        """In a forked child: make a new lock, as the thread that held the old one is not there."""
        self.lock = threading.Lock()
        self.releases.forget()

    def count(self, **changes: int) -> None:
        """Add to counters."""
        with self.lock:
            for name, change in changes.items():
                setattr(self.counters, name, getattr(self.counters, name) + change)

    # -- uses ------------------------------------------------------------------------------------

    def end(self, use: Session, passed: Passed | None = None) -> None:
        """End the use: at once, or once `passed` is done."""
        with self.lock:
            ended = self.core.close_use(use, fenced=passed is None or has_passed(passed))
        if not ended and passed is not None:
            self.releases.add(passed, partial(self.fence, use))

    def fence(self, use: Session) -> None:
        """Free the memory of an ended use: no work that it started can touch it any more."""
        with self.lock:
            self.core.fence(use)

    # -- writing ---------------------------------------------------------------------------------

    def reserve(
        self, prefix: Prefix, deadline: float, *, stop_at_busy: bool = False
    ) -> tuple[Session, Reservation]:
        """Reserve extents for the blocks that are not in HBM. Raises NoRoom if there was no room
        until `deadline`."""
        while True:
            self.check_open()
            self.releases.look()
            now = time.monotonic()
            with self.lock:
                use = self.core.open_use()
                made = self.core.reserve_blocks(use, prefix, now, stop_at_busy=stop_at_busy)
                full = len(prefix) > 0 and not made.statuses and bool(made.reason)
                waits = full and now < deadline and self.core.worth_waiting()
                if made.lease is None:
                    self.core.close_use(use, fenced=True)
                if full and not waits:
                    self.counters.refused += len(prefix)
            if not full:
                return use, made
            if not waits:
                raise NoRoom(
                    f"HBM has no room for a block of {format_bytes(prefix.schema.block_bytes)}: "
                    "everything else is leased, pinned, being written or copied, or an ancestor "
                    "of this block"
                )
            time.sleep(POLL_S)

    def publish(
        self,
        use: Session,
        lease: int,
        entries: Sequence[HbmEntry | None],
        arrival: InflightPromotion | None = None,
    ) -> bytes:
        """Make blocks visible and end the use, whose device work has all ended. Returns a `Kept`
        for each; blocks of an `arrival` that were removed meanwhile are not stored. Raises
        StaleLease."""
        with self.lock:
            gone = arrival.removed if arrival is not None else set()
            entries = [None if e is None or e.key in gone else e for e in entries]
            try:
                return self.core.publish(use, lease, entries, time.monotonic())
            finally:
                self.core.close_use(use, fenced=True)
                self._kick()

    # -- coming up -------------------------------------------------------------------------------

    def begin_arrival(self, keys: Sequence[bytes], *, join: bool) -> InflightPromotion | None:
        """Register the caller's promotion of `keys`, with `join` only of the leading ones that no
        other caller is promoting. Returns None if that leaves none; else the caller must call
        `end_arrival` in any case."""
        with self.lock:
            count = self.arrivals.unclaimed(keys) if join else len(keys)
            return self.arrivals.begin(keys[:count]) if count else None

    def end_arrival(self, arrival: InflightPromotion) -> None:
        """End a promotion: its blocks are published, or will not come."""
        with self.lock:
            self.arrivals.end(arrival)

    def await_arrival(self, key: bytes, deadline: float) -> bool:
        """Wait while other callers promote `key`; returns whether that ended before `deadline`."""
        while True:
            self.check_open()
            with self.lock:
                if self.arrivals.unclaimed([key]):
                    return True
            if time.monotonic() >= deadline:
                return False
            time.sleep(POLL_S)

    # -- reading ---------------------------------------------------------------------------------

    def hold(self, prefix: Prefix) -> Held:
        """Lease the leading blocks that are in HBM. A block whose tokens differ from the prefix's
        (a collision of keys) counts as missing."""
        self.releases.look()
        keys = prefix.keys
        with self.lock:
            use = self.core.open_use()
            lease, reason = self.core.hold(use, keys)
            replicas = lease.replicas if lease is not None else []
            entries = [self.core.entries[replica.key] for replica in replicas]
            good = next((i for i, e in enumerate(entries) if not same_tokens(e, prefix, i)), None)
            if good is None and replicas:
                return Held(use, replicas, entries, reason)
            self.core.close_use(use, fenced=True)
        return self.hold(prefix[:good]) if good else Held(None, [], [], reason)

    def remove(self, keys: Sequence[bytes]) -> int:
        """Remove blocks, also from promotions in flight; returns how many were in HBM."""
        with self.lock:
            self.arrivals.remove(keys)
            return self.core.remove(keys).blocks

    def condemn(self, replica: Replica) -> None:
        """Drop a corrupt block, whose bytes are not those that were written."""
        with self.lock:
            self.core.condemn(replica.key, replica.generation)
            self.counters.damaged += 1

    # -- looking ---------------------------------------------------------------------------------

    def statistics(self) -> dict[str, Any]:
        """A consistent snapshot of bytes by state, blocks and counters."""
        with self.lock:
            space = self.core.space.statistics()
            residency = self.core.residency
            return {
                "capacity_bytes": space.capacity_bytes,
                "free_bytes": space.free_bytes,
                "reserved_bytes": space.reserved_bytes,
                "committed_bytes": space.committed_bytes,
                "quarantined_bytes": space.quarantined_bytes,
                "largest_free_bytes": space.largest_free_bytes,
                "blocks": space.blocks,
                "dirty_blocks": sum(entry.dirty for entry in self.core.entries.values()),
                "saving_blocks": len(residency.saving),
                "uses": len(self.core.sessions),
                "evictions": residency.counters.evictions,
                "lost_dirty": residency.lost_dirty,
                "expired": residency.counters.expired,
                **asdict(self.counters),
            }


def same_tokens(entry: HbmEntry, prefix: Prefix, index: int) -> bool:
    """Whether the entry's block has the tokens of block `index` of `prefix`."""
    return entry.prefix.token_bytes(entry.index) == prefix.token_bytes(index)
