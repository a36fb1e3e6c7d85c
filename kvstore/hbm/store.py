"""The HBM tier for engines: a cache of the hottest blocks, in block order, in this GPU's memory.

    with HbmStore(client, schema, 8 << 30, "cuda:0") as store:
        with store.reserve(prefix) as slots:          # what is not in HBM yet
            for slot in slots:
                gather(pages, into=slot.tensor)       # kernels, on the current stream
        with store.promote(prefix) as blocks:         # HBM first, then the pool
            for block in blocks:
                scatter(block.tensor, into=pages)

A store is private to its process, and works in front of any client. `docs/hbm.md` is the guide.
"""

from __future__ import annotations

import os
import random
import threading
import time
import weakref
from functools import partial
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from tiffin.messenger.signal_safe import Forsaken, uninterrupted
from tiffin.messenger.usage_gate import UsageGate

from ..client.verbs.arguments import check_prefix, check_timeout, check_ttl, check_verify
from ..client.verbs.block_verbs import DEFAULT_TIMEOUT_S, Access
from ..deadlines import until_s
from ..errors import ClientClosed, InvalidInput, SchemaError
from ..node.core.node_core import ReserveStatus
from ..node.core.records import Kept, PinLevel, Reason
from .background import Background
from .core.hbm_core import Admission, HbmCore, HbmEntry, HbmOptions, positions
from .device.device_memory import HbmMemory, Point, on_current_stream
from .device.host_pinning import PinnedPool
from .handles import HbmBlocks, HbmSlot, HbmSlots, blocks_of
from .lease_claims import Claim
from .locked_core import Held, LockedCore
from .main_thread_verbs import in_one_piece
from .pool_access import spans_of
from .promotion import AGAIN, PoolHealth, Promoter
from .store_lifetime import CLOSE_TIMEOUT_S, Closing

if TYPE_CHECKING:
    from collections.abc import Callable

    from ..client.client import Client
    from ..client.verbs.arguments import Verify
    from ..format.keys import Prefix
    from ..format.schema import KVSchema
    from ..node.core.node_core import Reservation
    from ..node.core.records import Replica, Session
    from .writeback import Saved


class HbmStore:
    """A cache of `nbytes` of `device` for blocks of `schema`, in front of `client`. A context
    manager; a store that is garbage-collected closes itself.

    The verbs are thread-safe; their results are not. Close the store before its client.

    Raises InvalidInput for invalid options or an invalid device, TierUnavailable when the device
    does not have that much memory.
    """

    def __init__(
        self,
        client: Client,
        schema: KVSchema,
        nbytes: int,
        device: str = "cuda:0",
        *,
        verify: Verify = "always",
        options: HbmOptions | None = None,
        pin: bool = True,
    ) -> None:
        """`verify`: which leased or promoted blocks to verify: "always" (all), "sampled" (one block
        in 16) or "off"; each `lease` and `promote` may choose another policy. `pin`: register the
        memory of a node on this host with CUDA, for as long as the store is open."""
        begin = partial(self._begin, client, schema, nbytes, device, verify, options, pin=pin)
        uninterrupted(on_current_stream(device, begin))

    def _begin(
        self,
        client: Client,
        schema: KVSchema,
        nbytes: int,
        device: str,
        verify: Verify,
        options: HbmOptions | None,
        *,
        pin: bool,
    ) -> None:
        self.schema = schema
        self._access = Access(check_verify(verify), random.Random())
        options = options if options is not None else HbmOptions()
        if not isinstance(nbytes, int) or nbytes < schema.block_bytes:
            raise InvalidInput(f"{nbytes!r} bytes of HBM hold no block of {schema.block_bytes}")
        self._spans = spans_of(schema)
        self._memory = HbmMemory(nbytes, device)
        # Later processes start at a higher generation: another process's records of ours go stale.
        core = HbmCore(self._memory.tier.arena, options, first_generation=time.time_ns())
        self._gate = UsageGate(lambda: ClientClosed("this HBM store is closed; open another"))
        wake = threading.Event()
        self._locked_core = LockedCore(core, wake.set, self._gate.check)
        self._pinned: PinnedPool | None = None
        if pin:
            self._pinned = PinnedPool(client, str(self._memory.device), self._memory.while_idle)
            self._pinned.follow()
        pool_health = PoolHealth()
        self._background = Background(
            client,
            self._memory,
            self._locked_core,
            pool_health,
            self._pinned,
            schema.block_bytes,
            wake,
        )
        admission = Admission(second_use=options.admit_on_second_use)
        self._promoter = Promoter(client, self._memory, self._locked_core, pool_health, admission)
        self._client = client
        self._forked = False
        self._forsaken = partial(_end_forsaken, self._locked_core, self._memory)
        self._closing = Closing(
            self._gate, self._background, self._locked_core, self._memory, self._pinned
        )
        _open_stores.add(self)
        # The objects above have no reference to the store, so that a dropped store is collected.
        Forsaken.when(self, self._closing.close)
        self._background.start()

    @property
    def tensor(self) -> Any:
        """The tier's whole memory, uint8 [capacity_bytes], in which blocks have their `offset`."""
        return self._memory.tensor

    # -- writing ---------------------------------------------------------------------------------

    @in_one_piece
    def reserve(self, prefix: Prefix, *, timeout_s: float = 0.0) -> HbmSlots:
        """Reserve slots on the device for the blocks that are not in HBM, to be filled by kernels
        on the caller's stream. Leaving the `with` block commits them.

        Raises NoRoom when there is room for no block within `timeout_s`; by default it does not
        wait.
        """
        with self._gate:
            part = self._part(prefix)
            deadline = time.monotonic() + check_timeout(timeout_s)
            use, made = self._locked_core.reserve(part, deadline)
            return self._slots(part, use, made)

    def _slots(self, part: Prefix, use: Session, made: Reservation) -> HbmSlots:
        granted, resident, busy = (
            positions(made, status)
            for status in (ReserveStatus.GRANTED, ReserveStatus.RESIDENT, ReserveStatus.BUSY)
        )
        replicas = made.lease.replicas if made.lease is not None else []
        claim, view = self._lend(use if replicas else None)
        slots = [
            HbmSlot(view(replica), index, replica.offset, replica.generation)
            for index, replica in zip(granted, replicas, strict=True)
        ]
        return HbmSlots(part, slots, made, claim, self, resident=resident, busy=busy)

    @in_one_piece
    def commit(self, slots: HbmSlots, stream: Any) -> bool:
        """For `HbmSlots`: compute the checksums of the written slots, then publish them."""
        point = self._point(slots.claim, stream)
        if point is None or not slots.claim.take():
            return False
        if slots.claim.use is not None:
            slots.stored = self._publish(slots, slots.claim.use, point)
        return True

    def _publish(self, slots: HbmSlots, use: Session, point: Point) -> tuple[int, ...]:
        written = [slot for slot in slots.kept() if not slot.skipped]
        if not written:
            self._locked_core.end(use, point)
            return ()
        try:
            with self._gate:
                offsets = [slot.offset for slot in written]
                sums = self._memory.checksums(offsets, self._spans, after=point)
        except BaseException:
            self._locked_core.end(use, point)
            raise
        entries: dict[int, HbmEntry] = {
            slot.index: HbmEntry(slots.prefix, slot.index, found, dirty=True)
            for slot, found in zip(written, sums, strict=True)
        }
        # The caller's work on skipped slots has ended too: the checksums began after the point.
        order = [entries.get(slot.index) for slot in slots.kept()]
        kept = self._locked_core.publish(use, slots.lease, order)
        stored = tuple(
            slot.index for slot, flag in zip(slots.kept(), kept, strict=True) if flag == Kept.STORED
        )
        self._locked_core.count(published=len(stored))
        return stored

    # -- reading ---------------------------------------------------------------------------------

    @in_one_piece
    def match(self, prefix: Prefix) -> int:
        """Count the leading blocks that are in HBM. Takes no lease and does not count as a use."""
        with self._gate, self._locked_core.lock:
            return self._locked_core.core.resident(self._part(prefix).keys)

    @in_one_piece
    def lease(self, prefix: Prefix, *, verify: Verify | None = None) -> HbmBlocks:
        """Lease the leading blocks that are in HBM. Does not query the pool; waits only for the
        device to verify them."""
        with self._gate:
            part = self._part(prefix)
            held, damaged = self._hold(part, self._reading(verify), frozenset())
            return self._blocks(part, held, "corrupt" if damaged else None, len(held.replicas))

    @in_one_piece
    def promote(
        self,
        prefix: Prefix,
        *,
        verify: Verify | None = None,
        timeout_s: float = DEFAULT_TIMEOUT_S,
    ) -> HbmBlocks:
        """Lease the leading blocks; copies those that are not in HBM from the pool and verifies
        them on the device. Waits up to `timeout_s` for the pool and the copy; blocks that have not
        come by then are misses with the reason. A pool that does not answer is no error: HBM serves
        its own blocks.

        Raises TierUnavailable when the device refuses.
        """
        with self._gate:
            part, access = self._part(prefix), self._reading(verify)
            deadline = time.monotonic() + check_timeout(timeout_s)
            held, damaged = self._hold(part, access, frozenset())
            hits = len(held.replicas)
            why: str | None = AGAIN
            join = True
            while why == AGAIN and len(held.replicas) < len(part):
                count, before = len(held.replicas), held.use
                try:
                    fresh, why = self._promoter.bring(
                        part[count:], access.verify, deadline, join=join
                    )
                    trusted = fresh.union(replica.generation for replica in held.replicas)
                    held, damaged = self._hold(part, access, trusted)
                finally:
                    if before is not None:
                        self._locked_core.end(before)
                # After a wait for another caller that brought nothing, do not wait again.
                join = len(held.replicas) > count
            return self._blocks(part, held, "corrupt" if damaged else why, hits)

    def _blocks(self, part: Prefix, held: Held, why: str | None, hits: int) -> HbmBlocks:
        count = len(held.replicas)
        hits = min(hits, count)
        misses = len(part) - count
        self._locked_core.count(hbm_hits=hits, pool_hits=count - hits, misses=misses)
        reason = why or ("busy" if held.reason is Reason.BUSY else "miss")
        claim, view = self._lend(held.use)
        blocks = blocks_of(held.replicas, held.entries, view)
        ready = self._memory.passed_event
        return HbmBlocks(part, blocks, claim, self, reason=reason, hits=hits, ready=ready)

    def _hold(self, part: Prefix, access: Access, trusted: frozenset[int]) -> tuple[Held, bool]:
        """Lease the leading blocks and verify those whose generation is not `trusted`. Also returns
        whether they end before a block that was damaged."""
        damaged = False
        while True:
            held = self._locked_core.hold(part)
            bad = self._first_bad(held, access, trusted)
            if bad is None:
                return held, damaged
            damaged = True
            self._locked_core.condemn(held.replicas[bad])
            # Take a new lease on the shorter prefix, as a lease cannot be shortened.
            trusted |= {replica.generation for replica in held.replicas[:bad]}
            assert held.use is not None
            self._locked_core.end(held.use)
            part = part[:bad]

    def _first_bad(self, held: Held, access: Access, trusted: frozenset[int]) -> int | None:
        chosen = [
            i
            for i, replica in enumerate(held.replicas)
            if replica.generation not in trusted and access.checks_payload()
        ]
        if not chosen:
            return None
        try:
            offsets = [held.replicas[i].offset for i in chosen]
            sums = self._memory.checksums(offsets, self._spans)
        except BaseException:
            assert held.use is not None
            self._locked_core.end(held.use)
            raise
        for i, found in zip(chosen, sums, strict=True):
            if not np.array_equal(found, held.entries[i].checksums):
                return i
        return None

    @in_one_piece
    def let_go(self, claim: Claim, stream: Any) -> bool:
        """For `HbmBlocks` and `HbmSlots`: end the use once the stream has passed this point."""
        point = self._point(claim, stream)
        if point is None or not claim.take():
            return False
        if claim.use is not None:
            self._locked_core.end(claim.use, point)
        return True

    def _point(self, claim: Claim, stream: Any) -> Point | None:
        """An event in the stream, recorded now; None if the use was ended before."""
        if claim.taken:
            return None
        return Point(None) if self._forked or claim.use is None else self._memory.point(stream)

    # -- wishes ----------------------------------------------------------------------------------

    @in_one_piece
    def demote(
        self, prefix: Prefix | None = None, *, timeout_s: float = DEFAULT_TIMEOUT_S
    ) -> Saved:
        """Write the dirty blocks of `prefix` and their dirty ancestors back to the pool; all dirty
        blocks without a `prefix`. Dirty blocks are those that the pool is not known to have had.
        They stay in HBM.

        Raises the errors of the client and the device: NodeUnavailable, DeadlineExceeded, ...
        """
        with self._gate:
            keys = None if prefix is None else self._part(prefix).keys
            return self._background.save(keys, time.monotonic() + check_timeout(timeout_s))

    @in_one_piece
    def pin(self, prefix: Prefix, *, ttl_s: float | None = None, hard: bool = False) -> int:
        """Pin the blocks in HBM for `ttl_s`: evicted last, or with `hard` never. Returns how many
        are there. Does not pin them in the pool."""
        until = time.monotonic() + check_ttl(ttl_s)
        with self._gate, self._locked_core.lock:
            level = PinLevel.HARD if hard else PinLevel.SOFT
            return self._locked_core.core.pin(self._part(prefix).keys, level, until)

    @in_one_piece
    def unpin(self, prefix: Prefix) -> int:
        """Remove the pins; returns how many blocks are in HBM."""
        with self._gate, self._locked_core.lock:
            return self._locked_core.core.pin(self._part(prefix).keys, PinLevel.NONE, 0.0)

    @in_one_piece
    def remove(
        self, prefix: Prefix, *, pool: bool = True, timeout_s: float = DEFAULT_TIMEOUT_S
    ) -> int:
        """Remove the blocks, from HBM and from the `pool`; returns how many were in HBM. Leases
        keep their bytes. A write-back in flight ends first, so that it does not undo the removal.

        Raises DeadlineExceeded, and the errors of the client; even then the blocks are removed from
        HBM.
        """
        with self._gate:
            part = self._part(prefix)
            deadline = time.monotonic() + check_timeout(timeout_s)
            removed = self._locked_core.remove(part.keys)
            if pool:
                # A write-back in flight may still store the blocks in the pool: wait for its end.
                self._background.settle(deadline)
                self._client.remove(part, timeout_s=until_s(deadline))
                # Another caller may have promoted them again in the meantime.
                self._locked_core.remove(part.keys)
            return removed

    # -- the rest --------------------------------------------------------------------------------

    @in_one_piece
    def statistics(self) -> dict[str, Any]:
        """Bytes by state (free + reserved + committed + quarantined == capacity), blocks, hits,
        promotions and write-backs; `docs/hbm.md` explains each number."""
        self._locked_core.releases.look()
        return self._locked_core.statistics()

    def check(self) -> None:
        """Assert every invariant of the core; O(blocks). For tests."""
        with self._locked_core.lock:
            self._locked_core.core.check()

    @in_one_piece
    def close(self, *, timeout_s: float = CLOSE_TIMEOUT_S) -> None:
        """Release the memory. Waits for running verbs, and up to `timeout_s` for copies and for
        callers' streams. Dirty blocks are lost: `demote` them before. Idempotent."""
        self._closing.close(timeout_s)

    def forget(self) -> None:
        """In a forked child: refuse further use, as the memory, the thread and the client are the
        parent's."""
        self._forked = True
        self._gate = UsageGate(lambda: ClientClosed("a forked child opens an HBM store of its own"))
        self._gate.closed = True
        self._closing.forget()
        self._locked_core.forget()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _part(self, prefix: Prefix) -> Prefix:
        """A copy of `prefix`, which the caller may extend later. Raises SchemaError for a prefix of
        another schema."""
        if check_prefix(prefix).schema_fingerprint != self.schema.fingerprint:
            raise SchemaError("this prefix is of another schema than the HBM store's blocks")
        return prefix[:]

    def _reading(self, verify: Verify | None) -> Access:
        if verify is None:
            return self._access
        return Access(check_verify(verify), self._access.dice)

    def _lend(self, use: Session | None) -> tuple[Claim, Callable[[Replica], Any]]:
        """A claim on `use`, which also ends when the last view of its memory is garbage; and a
        function that makes such views."""
        try:
            memory, kept = self._memory.lent()
        except BaseException:
            if use is not None:
                self._locked_core.end(use)
            raise
        nbytes = self.schema.block_bytes
        claim = Claim(use, kept, self._forsaken)
        return claim, lambda replica: memory[replica.offset : replica.offset + nbytes]


def _end_forsaken(locked_core: LockedCore, memory: HbmMemory, use: Session) -> None:
    """End a use whose handle and views are garbage. Synchronises the device: no stream is known."""
    locked_core.end(use, memory.all_passed())


_open_stores: weakref.WeakSet[HbmStore] = weakref.WeakSet()


def _forget_all() -> None:
    for store in list(_open_stores):
        store.forget()


os.register_at_fork(after_in_child=_forget_all)
