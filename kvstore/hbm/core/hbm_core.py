"""The residency decisions of a GPU's HBM tier. Pure: no I/O, no clock, no threads, no torch.

It is the node's core in its one-tier form. `NodeCore` over a single `TierSpace` already makes the
decisions of an HBM tier: leases and reservations of extents and their expiry, generations, pins,
eviction of a chain from its tail, extents that are QUARANTINED while a copy or a kernel may still
touch them. The terms of a node map to those of an HBM tier so:

    a node has                           here it is
    its first tier, called DRAM          HBM (the name is a slot of `Residency`, nothing more)
    a session: a client's process        one verb's use of the memory
    proof that a process is dead         proof that a stream has passed: an event of the GPU
    a second tier, with extents          none: the pool below makes its own room and may refuse

So this module adds only what the last line leaves open: which blocks are not known to be in the
pool (`dirty`), and which of them to write back before their eviction. A dirty block that must be
evicted earlier is lost, as any block of a cache may be.

There are no headers in HBM. The fields of a header are in the `HbmEntry` of each block, in host
memory: no restart scans a GPU's memory, and a header would cost a copy of its own.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from itertools import islice
from operator import attrgetter
from typing import TYPE_CHECKING

from ...format.header import BlockState
from ...memory.eviction import make_policy
from ...node.core.node_core import CoreOptions, NodeCore
from ...node.core.placement import Residency
from ...node.core.tier_ledger import TierSpace
from ...tiers.base import TierName

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    import numpy as np
    from numpy.typing import NDArray

    from ...format.keys import Prefix
    from ...memory.arena import Arena
    from ...node.core.node_core import Reservation
    from ...node.core.records import BlockRecord, LeaseRecord, Reason, Replica, Session

# The most eviction candidates that one search for dirty blocks examines: 0.2 us each.
COLDEST_MAX = 1024

# Keys that `Admission` remembers: 16 bytes and some 90 of table each, half a MiB in all.
REMEMBERED_KEYS = 4096


@dataclass(frozen=True, slots=True)
class HbmOptions:
    """An operator's options for an HBM tier.

    `policy`: an eviction policy, a name of `eviction.POLICIES`. Above `high_watermark` of its bytes
    the tier writes back its coldest blocks, until all blocks whose eviction would take it down to
    `low_watermark` are in the pool; `write_back` False leaves that to `HbmStore.demote`.
    `admit_on_second_use`: promote a block from the pool only at its second request.
    `write_lease_s`: see `CoreOptions`.
    """

    policy: str = "lru"
    high_watermark: float = 0.80
    low_watermark: float = 0.50
    write_back: bool = True
    admit_on_second_use: bool = False
    write_lease_s: float = 60.0

    def __post_init__(self) -> None:
        """Raises InvalidInput for a policy that does not exist and for impossible numbers."""
        make_policy(self.policy)
        self.core()

    def core(self) -> CoreOptions:
        """These options as `NodeCore` takes them."""
        return CoreOptions(self.high_watermark, self.low_watermark, self.write_lease_s)


@dataclass(slots=True)
class HbmEntry:
    """The metadata of a committed block (in place of a header), and whether the pool has it.

    `checksums`: uint64 [segments], `xxh3_64_pages` of the bytes in HBM; none of blocks that are
    never compared. `prefix[index]` is the block. `dirty` until the pool is known to have had the
    block; the pool may evict it afterwards.
    """

    prefix: Prefix
    index: int
    checksums: NDArray[np.uint64]
    dirty: bool

    @property
    def key(self) -> bytes:
        """The block's key."""
        return self.prefix.keys[self.index]


class HbmResidency(Residency):
    """One tier whose blocks are clean or dirty; tracks the write-backs in flight."""

    def __init__(self, space: TierSpace) -> None:
        super().__init__(space, None)
        self.entries: dict[bytes, HbmEntry] = {}  # has exactly the keys of `index`
        # Write-backs in flight: one hold on each replica, which stays in the eviction order.
        self.saving: set[Replica] = set()
        self.lost_dirty = 0  # dirty blocks evicted before their write-back

    def begin_saves(self, blocks: Iterable[BlockRecord], blocks_max: int) -> list[Replica]:
        """Hold the dirty ones of these blocks and of their ancestors for a write-back; at most
        `blocks_max`. Heads of chains come first: in the pool, a block without its ancestors can
        never be matched."""
        chosen: set[BlockRecord] = set()
        for block in blocks:
            link: BlockRecord | None = block
            while link is not None and link not in chosen and self._must_save(link):
                chosen.add(link)
                link = link.parent
        heads_first = sorted(chosen, key=attrgetter("depth"))[:blocks_max]
        replicas = [block.dram for block in heads_first if block.dram is not None]
        for replica in replicas:
            replica.holds += 1  # keeps its place in the eviction order: a write-back is no use
        self.saving.update(replicas)
        return replicas

    def _must_save(self, block: BlockRecord) -> bool:
        """Whether a block is dirty and no write-back of it is in flight. Ancestors that are still
        being written, or were dropped, have no entry."""
        if self.index.get(block.key) is not block or block.dram in self.saving:
            return False
        return self.entries[block.key].dirty

    def end_save(self, replica: Replica, *, saved: bool) -> None:
        """End a write-back whose copy no longer reads the extent. If `saved`, mark it clean."""
        self.saving.remove(replica)
        if saved and self.index.get(replica.key) is replica.block:
            self.entries[replica.key].dirty = False
        self._unhold_untouched(replica)

    def coldest(self, nbytes: int) -> list[BlockRecord]:
        """The first eviction candidates, `nbytes` of them, but at most COLDEST_MAX: this runs at
        every commit."""
        blocks = []
        for replica in islice(self.dram.candidates(), COLDEST_MAX):
            if nbytes <= 0:
                break
            nbytes -= replica.length
            blocks.append(replica.block)
        return blocks

    def _drop_leaf(self, block: BlockRecord) -> bool:
        dirty = self.entries[block.key].dirty
        dropped = super()._drop_leaf(block)
        self.lost_dirty += dropped and dirty
        return dropped

    def _forget(self, block: BlockRecord) -> None:
        if self.index.get(block.key) is block:
            del self.entries[block.key]
        super()._forget(block)

    def check(self) -> None:
        """See `Residency.check`."""
        super().check()
        assert self.entries.keys() == self.index.keys()
        assert all(replica.holds > 0 for replica in self.saving)

    def _check_replica(self, replica: Replica) -> None:
        if replica not in self.saving:  # else it may be a candidate or not, as before its copy
            super()._check_replica(replica)


class HbmCore(NodeCore):
    """The index of one GPU's HBM tier, and its decisions. See the top of this file.

    A verb's use of the memory is a `Session` from `open_use`. `close_use` ends its leases and
    reservations: at once if no work on the device can touch the memory any more (the use is
    `fenced`), else its reservations are QUARANTINED, and its leases kept, until `fence`.
    """

    residency: HbmResidency

    def __init__(
        self,
        arena: Arena,
        options: HbmOptions | None = None,
        *,
        first_generation: int = 1,
        block_bytes: int | None = None,
    ) -> None:
        """`block_bytes`: of a block here, if that is not all of it: one rank's share."""
        self.hbm = options if options is not None else HbmOptions()
        self._block_bytes = block_bytes
        space = TierSpace(TierName.DRAM, arena, make_policy(self.hbm.policy))
        super().__init__(space, None, self.hbm.core(), first_generation=first_generation)
        self.residency = HbmResidency(space)
        self.index = self.residency.index
        self.space = space
        self.entries = self.residency.entries

    # -- uses ------------------------------------------------------------------------------------

    def open_use(self) -> Session:
        """Open a session for one use of the memory, to read or write."""
        return self.connect("", 0)

    def close_use(self, use: Session, *, fenced: bool) -> bool:
        """End a use. `fenced`: no work that it started can touch the memory any more. Returns
        whether all its leases and reservations have ended; if not, call `fence` when its event has
        passed."""
        return self.disconnect(use, fenced=fenced)

    # -- writing and reading ---------------------------------------------------------------------

    def reserve_blocks(
        self, use: Session, prefix: Prefix, now: float, *, stop_at_busy: bool = False
    ) -> Reservation:
        """Reserve extents for the blocks of `prefix` that are not in HBM: payloads, without
        headers.

        With `stop_at_busy` the reservation ends before the first block that another writer has
        reserved: no reader could use the blocks behind it yet.
        """
        self.tick(now)  # end expired reservations first
        keys: Sequence[bytes] = prefix.keys
        if stop_at_busy:
            writing = self.residency.writing
            keys = keys[: next((i for i, key in enumerate(keys) if key in writing), len(keys))]
        nbytes = self._block_bytes or prefix.schema.block_bytes
        return self.reserve(use, keys, prefix.parent, prefix.start, nbytes, now)

    def publish(
        self, use: Session, lease_id: int, entries: Sequence[HbmEntry | None], now: float
    ) -> bytes:
        """Commit a reservation: blocks with an entry become visible. Returns a `Kept` for each.

        Raises StaleLease if it has expired, and frees its extents: the caller has waited for all
        work that it started on them.
        """
        self.tick(now)
        lease = self.write_lease(use, lease_id)
        kept = self.commit(lease, [entry is not None for entry in entries])
        for replica, entry in zip(lease.replicas, entries, strict=True):
            if replica.state is BlockState.COMMITTED and entry is not None:
                self.entries[replica.key] = entry
        return kept

    def hold(self, use: Session, keys: Sequence[bytes]) -> tuple[LeaseRecord | None, Reason]:
        """Lease the leading blocks of `keys` that are in HBM, None if the first is not; and the
        reason why the lease does not cover all."""
        return self.settle(self.lease(use, keys))

    def resident(self, keys: Sequence[bytes]) -> int:
        """Count the leading `keys` whose blocks are in HBM."""
        return next((i for i, key in enumerate(keys) if key not in self.index), len(keys))

    # -- going down ------------------------------------------------------------------------------

    def is_full(self) -> bool:
        """Whether the used bytes exceed the high watermark."""
        return self.space.used_bytes > self.hbm.high_watermark * self.space.arena.capacity_bytes

    def saves_due(self, blocks_max: int) -> list[Replica]:
        """Above the high watermark: the dirty ones among the first eviction candidates, each held
        until `saved`. Empty below it."""
        if not self.is_full():
            return []
        low_bytes = int(self.hbm.low_watermark * self.space.arena.capacity_bytes)
        excess_bytes = self.space.used_bytes - low_bytes
        return self.residency.begin_saves(self.residency.coldest(excess_bytes), blocks_max)

    def saves_of(self, keys: Iterable[bytes] | None) -> list[Replica]:
        """The dirty blocks among `keys`, or of all, and their dirty ancestors; held as in
        `saves_due`."""
        wanted = self.index if keys is None else keys
        blocks = [self.index[key] for key in wanted if key in self.index]
        return self.residency.begin_saves(blocks, len(self.index))

    def saved(self, replica: Replica, *, saved: bool) -> None:
        """End one of these write-backs. Without `saved` the block stays dirty."""
        self.residency.end_save(replica, saved=saved)

    def worth_waiting(self) -> bool:
        """See `NodeCore.worth_waiting`."""
        return bool(self.residency.saving) or super().worth_waiting()


def positions(made: Reservation, status: int) -> tuple[int, ...]:
    """Positions of the blocks of a reservation that have this `ReserveStatus`."""
    return tuple(i for i, found in enumerate(made.statuses) if found == status)


class Admission:
    """The admission policy: which blocks to promote from the pool to HBM. Pure."""

    def __init__(self, *, second_use: bool) -> None:
        self._second_use = second_use
        self._seen: OrderedDict[bytes, None] = OrderedDict()

    def admits(self, keys: Sequence[bytes]) -> int:
        """Count the leading `keys` that may be promoted now; records a request for all of them."""
        if not self._second_use:
            return len(keys)
        admitted = next((i for i, key in enumerate(keys) if key not in self._seen), len(keys))
        for key in keys:
            self._seen[key] = None
            self._seen.move_to_end(key)
        while len(self._seen) > REMEMBERED_KEYS:
            self._seen.popitem(last=False)
        return admitted


def runs_of(
    replicas: Sequence[Replica], entry_of: Callable[[bytes], HbmEntry]
) -> list[tuple[Prefix, list[Replica]]]:
    """Group blocks into slices of prefixes: one reservation in the pool takes a whole slice.

    Consecutive blocks of one prefix object make a run; the runs are in the order of their first
    blocks.
    """
    runs: list[tuple[HbmEntry, list[Replica]]] = []
    last: dict[int, tuple[HbmEntry, list[Replica]]] = {}  # the open run of each prefix object
    for replica in replicas:
        entry = entry_of(replica.key)
        run = last.get(id(entry.prefix))
        if run is None or run[0].index + len(run[1]) != entry.index:
            run = last[id(entry.prefix)] = (entry, [])
            runs.append(run)
        run[1].append(replica)
    return [
        (head.prefix[head.index : head.index + len(members)], members) for head, members in runs
    ]
