"""The HBM tier as an engine uses it: the hottest blocks, in block order, in this GPU's memory.

    with HbmStore(client, schema, 8 << 30, "cuda:0") as store:
        with store.reserve(prefix) as slots:          # what is not in HBM yet
            for slot in slots:
                gather(pages, into=slot.tensor)       # kernels, on the current stream
        with store.promote(prefix) as blocks:         # HBM first, then the pool
            for block in blocks:
                scatter(block.tensor, into=pages)

It belongs to one process and sits in front of any client. `docs/hbm.md` is the guide.
"""

from __future__ import annotations

import contextlib
import os
import random
import threading
import time
import weakref
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from tiffin.messenger.gate import Gate

from ..errors import ClientClosed, InvalidInput, SchemaError
from ..keys import Prefix
from ..node.core import Status
from ..node.records import Kept, Pin, Reason
from ..pinned import PinnedPool
from ..verbs import DEFAULT_TIMEOUT_S, Access, check_timeout, check_ttl, check_verify
from .background import Background
from .below import spans_of
from .bringing import AGAIN, Bringer, PoolDoor
from .core import Admission, Entry, HbmCore, HbmOptions, positions
from .desk import Desk, Held
from .exporting import export_blocks
from .held import HbmBlocks, HbmSlot, HbmSlots, blocks_of
from .memory import HbmMemory, Point, left_s

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ..client import Client
    from ..node.core import Reservation
    from ..node.records import Replica, Session
    from ..schema import KVSchema
    from ..verbs import Verify
    from .held import HbmBlock
    from .saving import Saved

# What `close` grants to copies that are under way, and to callers' streams.
CLOSE_TIMEOUT_S = 10.0


class HbmStore:
    """`nbytes` of `device` for blocks of `schema`, in front of `client`. A context manager.

    Threads: every verb may be called in any thread, also at once. What a verb returns is for one
    thread at a time. Close the store before its client.

    Raises InvalidInput for options or a device that cannot be, TierUnavailable when the device has
    not so much memory.
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
        """`verify`: how much of what is leased or brought up is verified: "always", "sampled" (one
        block in 16) or "off"; each `lease` and `promote` may choose another. `pin`: register the
        memory of a node on this host with CUDA, for as long as the store is open."""
        self.schema = schema
        self._access = Access(check_verify(verify), random.Random())
        options = options if options is not None else HbmOptions()
        if not isinstance(nbytes, int) or nbytes < schema.block_bytes:
            raise InvalidInput(f"{nbytes!r} bytes of HBM hold no block of {schema.block_bytes}")
        self._spans = spans_of(schema)
        self._memory = HbmMemory(nbytes, device)
        # Grows from one process to the next: what another process was told of ours goes stale.
        core = HbmCore(self._memory.tier.arena, options, first_generation=time.time_ns())
        self._gate = Gate(lambda: ClientClosed("this HBM store is closed; open another"))
        self._desk = Desk(core, lambda: self._background.kick(), self._gate.check)
        self._pinned: PinnedPool | None = None
        if pin:
            self._pinned = PinnedPool(client, str(self._memory.device), self._memory.while_idle)
            self._pinned.follow()
        door = PoolDoor()
        self._background = Background(
            client, self._memory, self._desk, door, self._pinned, schema.block_bytes
        )
        admission = Admission(second_use=options.admit_on_second_use)
        self._bringer = Bringer(client, self._memory, self._desk, door, admission)
        self._client = client
        self._forked = False
        _open_stores.add(self)
        self._background.start()

    @property
    def tensor(self) -> Any:
        """All of the tier's memory, uint8 [capacity_bytes]: what blocks' `offset` is counted in."""
        return self._memory.tensor

    # -- writing ---------------------------------------------------------------------------------

    def reserve(self, prefix: Prefix, *, timeout_s: float = 0.0) -> HbmSlots:
        """Slots on the device for the blocks that are not in HBM, to be filled by kernels on the
        caller's stream. Leaving the `with` block publishes them.

        Raises NoRoom when not even the first could be had within `timeout_s`; by default it does
        not wait.
        """
        with self._gate:
            part = self._part(prefix)
            deadline = time.monotonic() + check_timeout(timeout_s)
            use, made = self._desk.reserve(part, deadline)
            return self._slots(part, use, made)

    def _slots(self, part: Prefix, use: Session, made: Reservation) -> HbmSlots:
        granted, resident, busy = (
            positions(made, status) for status in (Status.GRANTED, Status.RESIDENT, Status.BUSY)
        )
        replicas = made.lease.replicas if made.lease is not None else []
        slots = [
            HbmSlot(self._view(replica), index, replica.offset, replica.generation)
            for index, replica in zip(granted, replicas, strict=True)
        ]
        return HbmSlots(part, slots, made, use, self, resident=resident, busy=busy)

    def commit(self, slots: HbmSlots, use: Session, lease: int, point: Point) -> tuple[int, ...]:
        """For `HbmSlots`: checksums of what was written, then the publication."""
        written = [slot for slot in slots.kept() if not slot.skipped]
        if not written:
            self._desk.end(use, point)
            return ()
        try:
            with self._gate:
                offsets = [slot.offset for slot in written]
                sums = self._memory.checksums(offsets, self._spans, after=point)
        except BaseException:
            self._desk.end(use, point)
            raise
        entries: dict[int, Entry] = {
            slot.index: Entry(slots.prefix, slot.index, found, dirty=True)
            for slot, found in zip(written, sums, strict=True)
        }
        # Of the skipped ones, too, nothing is under way: the checksums began behind the point.
        order = [entries.get(slot.index) for slot in slots.kept()]
        kept = self._desk.publish(use, lease, order)
        stored = tuple(
            slot.index for slot, flag in zip(slots.kept(), kept, strict=True) if flag == Kept.STORED
        )
        self._desk.count(published=len(stored))
        return stored

    # -- reading ---------------------------------------------------------------------------------

    def match(self, prefix: Prefix) -> int:
        """How many leading blocks are in HBM. Takes no lease and counts as no use."""
        with self._gate, self._desk.lock:
            return self._desk.core.resident(self._part(prefix).keys)

    def lease(self, prefix: Prefix, *, verify: Verify | None = None) -> HbmBlocks:
        """The leading blocks that are in HBM; does not ask the pool and does not wait."""
        with self._gate:
            part = self._part(prefix)
            held, damaged = self._hold(part, self._reading(verify), frozenset())
            return self._blocks(part, held, "corrupt" if damaged else None, len(held.replicas))

    def promote(
        self,
        prefix: Prefix,
        *,
        verify: Verify | None = None,
        timeout_s: float = DEFAULT_TIMEOUT_S,
    ) -> HbmBlocks:
        """The leading blocks, those that are not in HBM copied up from the pool, verified on the
        device. Waits up to `timeout_s` for the pool and the copy; what could not be had by then is
        a miss with its reason. A pool that does not answer is none either: HBM serves what it has.

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
                    fresh, why = self._bringer.bring(
                        part[count:], access.verify, deadline, join=join
                    )
                    trusted = fresh.union(replica.generation for replica in held.replicas)
                    held, damaged = self._hold(part, access, trusted)
                finally:
                    if before is not None:
                        self._desk.end(before)
                # Who waited for another in vain does not do so again.
                join = len(held.replicas) > count
            return self._blocks(part, held, "corrupt" if damaged else why, hits)

    def _blocks(self, part: Prefix, held: Held, why: str | None, hits: int) -> HbmBlocks:
        count = len(held.replicas)
        hits = min(hits, count)
        misses = len(part) - count
        self._desk.count(hbm_hits=hits, pool_hits=count - hits, misses=misses)
        reason = why or ("busy" if held.reason is Reason.BUSY else "miss")
        blocks = blocks_of(held.replicas, held.entries, self._view)
        ready = self._memory.passed_event
        return HbmBlocks(part, blocks, held.use, self, reason=reason, hits=hits, ready=ready)

    def _hold(self, part: Prefix, access: Access, trusted: frozenset[int]) -> tuple[Held, bool]:
        """Hold the leading blocks and verify those whose generation is not `trusted`; whether they
        end where one was damaged."""
        damaged = False
        while True:
            held = self._desk.hold(part)
            bad = self._first_bad(held, access, trusted)
            if bad is None:
                return held, damaged
            damaged = True
            self._desk.condemn(held.replicas[bad])
            # Again, and not cut short: a lease covers all that it was given.
            trusted |= {replica.generation for replica in held.replicas[:bad]}
            assert held.use is not None
            self._desk.end(held.use)
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
            self._desk.end(held.use)
            raise
        for i, found in zip(chosen, sums, strict=True):
            if not np.array_equal(found, held.entries[i].checksums):
                return i
        return None

    def point(self, stream: Any) -> Point:
        """For `HbmBlocks` and `HbmSlots`: this moment of the stream."""
        return Point(None) if self._forked else self._memory.point(stream)

    def let_go(self, use: Session, point: Point) -> None:
        """For `HbmBlocks` and `HbmSlots`: the use ends when the stream has passed `point`."""
        self._desk.end(use, point)

    # -- wishes ----------------------------------------------------------------------------------

    def demote(
        self, prefix: Prefix | None = None, *, timeout_s: float = DEFAULT_TIMEOUT_S
    ) -> Saved:
        """Copy blocks that the pool is not known to have down into it, with their ancestors; all of
        them without a `prefix`. They stay in HBM.

        Raises what the client and the device meet: NodeUnavailable, DeadlineExceeded, ...
        """
        with self._gate:
            keys = None if prefix is None else self._part(prefix).keys
            return self._background.save(keys, time.monotonic() + check_timeout(timeout_s))

    def pin(self, prefix: Prefix, *, ttl_s: float | None = None, hard: bool = False) -> int:
        """Keep the blocks in HBM: evicted last, or with `hard` never, until `ttl_s` is over.
        Returns how many are there. The pool is not told."""
        until = time.monotonic() + check_ttl(ttl_s)
        with self._gate, self._desk.lock:
            level = Pin.HARD if hard else Pin.SOFT
            return self._desk.core.pin(self._part(prefix).keys, level, until)

    def unpin(self, prefix: Prefix) -> int:
        """Take pins back; returns how many blocks are in HBM."""
        with self._gate, self._desk.lock:
            return self._desk.core.pin(self._part(prefix).keys, Pin.NONE, 0.0)

    def remove(
        self, prefix: Prefix, *, pool: bool = True, timeout_s: float = DEFAULT_TIMEOUT_S
    ) -> int:
        """Forget the blocks, here and in the `pool`; returns how many were in HBM. Leases keep
        their bytes. A copy down that is under way ends first, so that it does not undo this.

        Raises DeadlineExceeded, and what the client meets; HBM has forgotten them even then.
        """
        with self._gate:
            part = self._part(prefix)
            deadline = time.monotonic() + check_timeout(timeout_s)
            removed = self._desk.remove(part.keys)
            if pool:
                # What was under way when they were forgotten here may be there when it has ended.
                self._background.settle(deadline)
                self._client.remove(part, timeout_s=left_s(deadline))
                # And until now somebody may have brought them up again.
                self._desk.remove(part.keys)
            return removed

    # -- the rest --------------------------------------------------------------------------------

    def export(self, blocks: Sequence[HbmBlock]) -> bytes:
        """What another process on this host needs to read these blocks where they lie; see
        `attach`. Holds nothing: what it names may be gone when it is read. On a GPU the store must
        outlive everyone who attached (`DeviceRegion` says why).

        Raises TierUnavailable for memory that cannot be shared, InvalidInput for too many blocks.
        """
        with self._gate:
            return export_blocks(self._memory.tier.region, self.schema, blocks)

    @property
    def fds(self) -> tuple[int, ...]:
        """Descriptors that have to travel beside an export (SCM_RIGHTS, or inherited): one on
        `cpu`, none on a GPU. They stay the store's."""
        with self._gate:
            return self._memory.tier.region.fds

    def statistics(self) -> dict[str, Any]:
        """Bytes by state (free + reserved + committed + quarantined == capacity), blocks, hits and
        what was moved; `docs/hbm.md` explains each number."""
        self._desk.endings.look()
        return self._desk.statistics()

    def check(self) -> None:
        """Assert every invariant of the core; O(blocks). For tests."""
        with self._desk.lock:
            self._desk.core.check()

    def close(self, *, timeout_s: float = CLOSE_TIMEOUT_S) -> None:
        """Let go of the memory. Waits for verbs that are running, and up to `timeout_s` for copies
        and for callers' streams. What is dirty is lost: `demote` it before. A second call does
        nothing."""
        if self._gate.closed:
            return
        self._gate.close()
        self._background.close()
        deadline = time.monotonic() + timeout_s
        ended = self._desk.endings.wait(timeout_s)
        self._memory.close(left_s(deadline))
        if ended:
            self._unpin()
            return
        with contextlib.suppress(RuntimeError):  # the interpreter is ending
            threading.Thread(target=self._finish, name="tiffin-hbm-late", daemon=True).start()

    def _finish(self) -> None:
        """What goes on holds the pool's blocks and slots, and its client's `close`."""
        self._desk.endings.wait()
        self._unpin()

    def _unpin(self) -> None:
        if self._pinned is not None:
            self._pinned.close()

    def forget(self) -> None:
        """In a forked child: the memory, the thread and the client are the parent's."""
        self._forked = True
        self._gate = Gate(lambda: ClientClosed("a forked child opens an HBM store of its own"))
        self._gate.closed = True
        self._desk.forget()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _part(self, prefix: Prefix) -> Prefix:
        """A slice of our own: the caller's prefix may grow."""
        if not isinstance(prefix, Prefix):
            raise InvalidInput(f"pass a Prefix (schema.prefix(tokens)), not {type(prefix)}")
        if prefix.schema_fingerprint != self.schema.fingerprint:
            raise SchemaError("this prefix is of another schema than the HBM store's blocks")
        return prefix[:]

    def _reading(self, verify: Verify | None) -> Access:
        if verify is None:
            return self._access
        return Access(check_verify(verify), self._access.dice)

    def _view(self, replica: Replica) -> Any:
        return self._memory.view(replica.offset, self.schema.block_bytes)


_open_stores: weakref.WeakSet[HbmStore] = weakref.WeakSet()


def _forget_all() -> None:
    for store in list(_open_stores):
        store.forget()


os.register_at_fork(after_in_child=_forget_all)
