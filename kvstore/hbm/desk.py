"""The core of an HBM tier under its lock, and what waits for the device before it may be told."""

from __future__ import annotations

import threading
import time
from dataclasses import asdict, dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from ..errors import NoRoom
from .arrivals import Arrival, Arrivals
from .endings import POLL_S, Endings, has_passed

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ..keys import Prefix
    from ..node.core import Reservation
    from ..node.records import Reason, Replica, Session
    from .core import Entry, HbmCore
    from .memory import Passed


@dataclass(slots=True)
class HbmCounters:
    """What happened since the store was opened, in blocks unless the name says otherwise."""

    hbm_hits: int = 0
    pool_hits: int = 0  # came up for the one who asked
    misses: int = 0
    published: int = 0
    brought: int = 0
    brought_bytes: int = 0
    demotions: int = 0
    demoted_bytes: int = 0
    refused: int = 0  # no room in HBM
    not_saved: int = 0  # the pool had no room, or another writer, or did not answer; still dirty
    damaged: int = 0  # in HBM: found, dropped
    damaged_arrivals: int = 0  # came up wrong: never published
    pool_errors: int = 0  # calls that the pool did not answer
    timeouts: int = 0  # copies that went on after their deadline


@dataclass(slots=True)
class Held:
    """A use of the memory and what it holds."""

    use: Session | None
    replicas: Sequence[Replica]
    entries: Sequence[Entry]
    reason: Reason


class Desk:
    """Every decision passes here. Thread-safe; nothing but `reserve` waits.

    The lock is held for decisions only: some microseconds a block, never during a copy, a hash or
    a call to the pool.
    """

    def __init__(
        self, core: HbmCore, kick: Callable[[], None], check_open: Callable[[], None]
    ) -> None:
        """`kick`: something was published. `check_open` raises once the store is closing: who
        waits is not to hold it up."""
        self.core = core
        self.lock = threading.Lock()
        self.endings = Endings()
        self.counters = HbmCounters()
        self.arrivals = Arrivals()
        self.check_open = check_open
        self._kick = kick

    def forget(self) -> None:
        """In a forked child: whoever held the lock is not here."""
        self.lock = threading.Lock()
        self.endings.forget()

    def count(self, **changes: int) -> None:
        """Add to counters."""
        with self.lock:
            for name, change in changes.items():
                setattr(self.counters, name, getattr(self.counters, name) + change)

    # -- uses ------------------------------------------------------------------------------------

    def end(self, use: Session, passed: Passed | None = None) -> None:
        """The use is over: at once, or when `passed` is done."""
        with self.lock:
            ended = self.core.close_use(use, fenced=passed is None or has_passed(passed))
        if not ended and passed is not None:
            self.endings.add(passed, partial(self.fence, use))

    def fence(self, use: Session) -> None:
        """Nothing that the use started can touch the memory any more."""
        with self.lock:
            self.core.fence(use)

    # -- writing ---------------------------------------------------------------------------------

    def reserve(
        self, prefix: Prefix, deadline: float, *, stop_at_busy: bool = False
    ) -> tuple[Session, Reservation]:
        """Extents for what is not here. Raises NoRoom when there was none until `deadline`."""
        while True:
            self.check_open()
            self.endings.look()
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
                    f"HBM has no room for a block of {prefix.schema.block_bytes} bytes: everything "
                    "else is leased, pinned, being written or copied, or an ancestor of this block"
                )
            time.sleep(POLL_S)

    def publish(
        self,
        use: Session,
        lease: int,
        entries: Sequence[Entry | None],
        arrival: Arrival | None = None,
    ) -> bytes:
        """Make blocks visible and end the use: all that was started on it has ended. A `Kept` for
        each; those of an `arrival` that were removed meanwhile are not stored. Raises StaleLease.
        """
        with self.lock:
            gone = arrival.removed if arrival is not None else set()
            entries = [None if e is None or e.key in gone else e for e in entries]
            try:
                return self.core.publish(use, lease, entries, time.monotonic())
            finally:
                self.core.close_use(use, fenced=True)
                self._kick()

    # -- coming up -------------------------------------------------------------------------------

    def begin_arrival(self, keys: Sequence[bytes], *, join: bool) -> Arrival | None:
        """The caller brings `keys`, with `join` only the leading ones that nobody else brings;
        None if that is none. `end_arrival` in any case."""
        with self.lock:
            count = self.arrivals.unclaimed(keys) if join else len(keys)
            return self.arrivals.begin(keys[:count]) if count else None

    def end_arrival(self, arrival: Arrival) -> None:
        """The blocks are published, or will not come."""
        with self.lock:
            self.arrivals.end(arrival)

    def await_arrival(self, key: bytes, deadline: float) -> bool:
        """Wait while somebody brings `key`; whether that has ended in time."""
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
        """The leading blocks that are here, held. Blocks whose tokens are not those of the prefix
        count as missing: their keys collide."""
        self.endings.look()
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
        """Forget blocks, those on their way as well; how many were here."""
        with self.lock:
            self.arrivals.remove(keys)
            return self.core.remove(keys)

    def condemn(self, replica: Replica) -> None:
        """These bytes are not what was written: forget the block."""
        with self.lock:
            self.core.condemn(replica.key, replica.generation)
            self.counters.damaged += 1

    # -- looking ---------------------------------------------------------------------------------

    def statistics(self) -> dict[str, Any]:
        """Bytes by state, blocks and counters, of one moment."""
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


def same_tokens(entry: Entry, prefix: Prefix, index: int) -> bool:
    """Whether an entry is of the tokens that block `index` of `prefix` has."""
    return entry.prefix.token_bytes(entry.index) == prefix.token_bytes(index)
