"""What is in a GPU's HBM tier: the decisions. Pure: no I/O, no clock, no threads, no torch.

It is the node's core in its one-tier form. `NodeCore` over a single `TierSpace` already knows all
that an HBM tier decides: who may read and write which extent and until when, generations, pins, a
chain that leaves from its tail, extents that are QUARANTINED while somebody may still touch them.
What stands in for what:

    a node has                           here it is
    its first tier, called DRAM          HBM (the name is a slot of `Residency`, nothing more)
    a session: a client's process        one verb's use of the memory
    proof that a process is dead         proof that a stream has passed: an event of the GPU
    a second tier, with extents          none: the pool below makes its own room and may say no

So only what the last line leaves open is added: which blocks are not known to be in the pool
(`dirty`), and which of them are to be copied down before somebody needs their room. A dirty block
that must leave earlier is lost, as anything in a cache may be.

There are no headers in HBM. What a header would say is in the `Entry` of each block, in host
memory: nothing scans a GPU's memory after a restart, and a header would cost a copy of its own.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from operator import attrgetter
from typing import TYPE_CHECKING

from ..block import BlockState
from ..eviction import make_policy
from ..node.core import CoreOptions, NodeCore
from ..node.residency import Residency
from ..node.space import TierSpace
from ..tiers.base import TierName

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    import numpy as np
    from numpy.typing import NDArray

    from ..arena import Arena
    from ..keys import Prefix
    from ..node.core import Reservation
    from ..node.records import Block, Lease, Reason, Replica, Session

# Keys that `Admission` remembers: 16 bytes and some 90 of table each, so half a MiB.
REMEMBERED_KEYS = 4096


@dataclass(frozen=True, slots=True)
class HbmOptions:
    """What an operator may choose about an HBM tier's decisions.

    `policy`: a name of `eviction.POLICIES`. Above `high_watermark` of its bytes the coldest blocks
    are copied down, until those that leave first down to `low_watermark` are in the pool;
    `write_back` False leaves that to `HbmStore.demote`. `admit_on_second_use`: a block comes up
    from the pool only when it was asked for before. `write_lease_s`: see `CoreOptions`.
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
        """The same for `NodeCore`."""
        return CoreOptions(self.high_watermark, self.low_watermark, self.write_lease_s)


@dataclass(slots=True)
class Entry:
    """What a header would say of a committed block, and whether the pool has it.

    `checksums`: uint64 [segments], `xxh3_64_pages` of what lies in HBM. `prefix[index]` is the
    block. `dirty` until it is known to have been in the pool; the pool may drop it afterwards.
    """

    prefix: Prefix
    index: int
    checksums: NDArray[np.uint64]
    dirty: bool

    @property
    def key(self) -> bytes:
        """The block's."""
        return self.prefix.keys[self.index]


class HbmResidency(Residency):
    """One tier whose blocks are clean or dirty; some of the dirty ones are being copied down."""

    def __init__(self, space: TierSpace) -> None:
        super().__init__(space, None)
        self.entries: dict[bytes, Entry] = {}  # of exactly the blocks in `index`
        self.saving: set[Replica] = set()  # each held once, and left in the eviction order
        self.lost_dirty = 0  # evicted before they were saved

    def begin_saves(self, blocks: Iterable[Block], blocks_max: int) -> list[Replica]:
        """Hold these blocks and their ancestors, as far as they are dirty, for a copy down; at most
        `blocks_max`. Heads of chains come first: in the pool, a block without its ancestors can
        never be matched."""
        chosen: set[Block] = set()
        for block in blocks:
            link: Block | None = block
            while link is not None and link not in chosen and self._must_save(link):
                chosen.add(link)
                link = link.parent
        heads_first = sorted(chosen, key=attrgetter("depth"))[:blocks_max]
        replicas = [block.dram for block in heads_first if block.dram is not None]
        for replica in replicas:
            replica.holds += 1  # without leaving the eviction order: being copied is not a use
        self.saving.update(replicas)
        return replicas

    def _must_save(self, block: Block) -> bool:
        """Ancestors that are still being written, or were dropped, have no entry."""
        if self.index.get(block.key) is not block or block.dram in self.saving:
            return False
        return self.entries[block.key].dirty

    def end_save(self, replica: Replica, *, saved: bool) -> None:
        """The copy down has ended, and reads the extent no more."""
        self.saving.remove(replica)
        if saved and self.index.get(replica.key) is replica.block:
            self.entries[replica.key].dirty = False
        self._unhold_untouched(replica)

    def coldest(self, nbytes: int) -> list[Block]:
        """The blocks that would leave first, so many bytes of them."""
        blocks = []
        for replica in self.dram.candidates():
            if nbytes <= 0:
                break
            nbytes -= replica.length
            blocks.append(replica.block)
        return blocks

    def _drop_leaf(self, block: Block) -> bool:
        dirty = self.entries[block.key].dirty
        dropped = super()._drop_leaf(block)
        self.lost_dirty += dropped and dirty
        return dropped

    def _forget(self, block: Block) -> None:
        if self.index.get(block.key) is block:
            del self.entries[block.key]
        super()._forget(block)

    def check(self) -> None:
        """See `Residency.check`."""
        super().check()
        assert self.entries.keys() == self.index.keys()
        assert all(replica.holds > 0 for replica in self.saving)

    def _check_replica(self, replica: Replica) -> None:
        if replica not in self.saving:  # a candidate or not, as it was when its copy began
            super()._check_replica(replica)


class HbmCore(NodeCore):
    """The truth about what is in one GPU's HBM tier. See the top of this file.

    A verb's use of the memory is a `Session` from `open_use`. Whatever it leased or reserved is
    let go of when the use is `closed`: at once if nothing can touch the memory any more (it is
    `fenced`), else its reservations are QUARANTINED, and its leases held, until `fence`.
    """

    residency: HbmResidency

    def __init__(
        self, arena: Arena, options: HbmOptions | None = None, *, first_generation: int = 1
    ) -> None:
        self.hbm = options if options is not None else HbmOptions()
        space = TierSpace(TierName.DRAM, arena, make_policy(self.hbm.policy))
        super().__init__(space, None, self.hbm.core(), first_generation=first_generation)
        self.residency = HbmResidency(space)
        self.index = self.residency.index
        self.space = space
        self.entries = self.residency.entries

    # -- uses ------------------------------------------------------------------------------------

    def open_use(self) -> Session:
        """Somebody is about to read or write."""
        return self.connect("", 0)

    def close_use(self, use: Session, *, fenced: bool) -> bool:
        """It is over. `fenced`: nothing it started can touch the memory any more. Returns whether
        everything it held is free; if not, call `fence` when its event has passed."""
        return self.disconnect(use, fenced=fenced)

    # -- writing and reading ---------------------------------------------------------------------

    def reserve_blocks(
        self, use: Session, prefix: Prefix, now: float, *, stop_at_busy: bool = False
    ) -> Reservation:
        """Extents for those blocks of `prefix` that are not here: payloads, without headers.

        With `stop_at_busy` it ends before the first block that another is writing: what comes
        behind it could not be read yet.
        """
        self.tick(now)  # what has expired is nobody's any more
        keys: Sequence[bytes] = prefix.keys
        if stop_at_busy:
            writing = self.residency.writing
            keys = keys[: next((i for i, key in enumerate(keys) if key in writing), len(keys))]
        nbytes = prefix.schema.block_bytes
        return self.reserve(use, keys, prefix.parent, prefix.start, nbytes, now)

    def publish(
        self, use: Session, lease_id: int, entries: Sequence[Entry | None], now: float
    ) -> bytes:
        """End a reservation; blocks become visible, but for those without an entry. A `Kept` each.

        Raises StaleLease if it has expired, and frees its extents: the caller has waited for all
        that it had started on them.
        """
        self.tick(now)
        lease = self.write_lease(use, lease_id)
        kept = self.commit(lease, [entry is not None for entry in entries])
        for replica, entry in zip(lease.replicas, entries, strict=True):
            if replica.state is BlockState.COMMITTED and entry is not None:
                self.entries[replica.key] = entry
        return kept

    def hold(self, use: Session, keys: Sequence[bytes]) -> tuple[Lease | None, Reason]:
        """A lease of the leading blocks of `keys`, None if not even the first is here; and why it
        has not all of them."""
        return self.settle(self.lease(use, keys))

    def resident(self, keys: Sequence[bytes]) -> int:
        """How many leading ones of `keys` are here."""
        return next((i for i, key in enumerate(keys) if key not in self.index), len(keys))

    # -- going down ------------------------------------------------------------------------------

    def is_full(self) -> bool:
        """Whether more is used than the high watermark."""
        return self.space.used_bytes > self.hbm.high_watermark * self.space.arena.capacity_bytes

    def saves_due(self, blocks_max: int) -> list[Replica]:
        """Above the high watermark: the dirty ones among the blocks that would leave first, each
        held until `saved`. Empty below it."""
        if not self.is_full():
            return []
        low_bytes = int(self.hbm.low_watermark * self.space.arena.capacity_bytes)
        excess_bytes = self.space.used_bytes - low_bytes
        return self.residency.begin_saves(self.residency.coldest(excess_bytes), blocks_max)

    def saves_of(self, keys: Iterable[bytes] | None) -> list[Replica]:
        """The dirty ones among `keys`, or of all blocks, with their ancestors; as `saves_due`."""
        wanted = self.index if keys is None else keys
        blocks = [self.index[key] for key in wanted if key in self.index]
        return self.residency.begin_saves(blocks, len(self.index))

    def saved(self, replica: Replica, *, saved: bool) -> None:
        """One of these copies has ended. Not `saved`: it stays dirty."""
        self.residency.end_save(replica, saved=saved)

    def worth_waiting(self) -> bool:
        """See `NodeCore.worth_waiting`."""
        return bool(self.residency.saving) or super().worth_waiting()


def positions(made: Reservation, status: int) -> tuple[int, ...]:
    """Positions of the blocks of a reservation that have this `Status`."""
    return tuple(i for i, found in enumerate(made.statuses) if found == status)


class Admission:
    """Which blocks are worth a copy up from the pool. Pure."""

    def __init__(self, *, second_use: bool) -> None:
        self._second_use = second_use
        self._seen: OrderedDict[bytes, None] = OrderedDict()

    def admits(self, keys: Sequence[bytes]) -> int:
        """How many leading ones of `keys` may come up now; it remembers that all were wanted."""
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
    replicas: Sequence[Replica], entry_of: Callable[[bytes], Entry]
) -> list[tuple[Prefix, list[Replica]]]:
    """Blocks grouped into slices of prefixes: one reservation in the pool takes a whole slice.

    Neighbours of one prefix object make a run; the runs are in the order of their first blocks.
    """
    runs: list[tuple[Entry, list[Replica]]] = []
    last: dict[int, tuple[Entry, list[Replica]]] = {}  # the run of each prefix object that is open
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
