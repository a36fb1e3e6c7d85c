"""Planted bugs (mutations): each removes one rule from the product, and names the invariants that
detect it.

A simulation that finds nothing proves nothing unless it finds these. Each is a patch of the running
product, such as an engineer might write by mistake.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tiffin.kvstore import deadlines
from tiffin.kvstore.client.pool import pool_verbs
from tiffin.kvstore.client.pool.remote import block_read as fetch_module
from tiffin.kvstore.client.pool.remote.block_read import ArrivedSegments
from tiffin.kvstore.errors import StaleLease
from tiffin.kvstore.format.header import BlockState
from tiffin.kvstore.node import mover
from tiffin.kvstore.node.core import node_core as core_module
from tiffin.kvstore.node.core.node_core import NodeCore
from tiffin.kvstore.node.core.placement import Residency
from tiffin.kvstore.node.core.publisher_core import PublisherCore
from tiffin.kvstore.node.core.records import BlockRecord, MoveOutcome
from tiffin.kvstore.node.core.removal_memory import BarredKeys
from tiffin.kvstore.node.node import Node

from .cluster import simulate
from .world import Violation, patched

if TYPE_CHECKING:
    from collections.abc import Callable

Patches = list[tuple[Any, str, Any]]


@dataclass(frozen=True, slots=True)
class Mutation:
    """One planted bug. `caught_by`: the kinds of violation that may detect it. `first_seed`: the
    first seed to try, for a bug that few seeds trigger."""

    name: str
    patches: Callable[[], Patches]
    caught_by: tuple[str, ...]
    first_seed: int = 0


@dataclass(frozen=True, slots=True)
class Catch:
    """The seed that detected a bug, and the violation."""

    seed: int
    kind: str
    message: str


def hunt(mutation: Mutation, seeds: range) -> Catch | None:
    """Simulate with the planted bug until a seed detects it."""
    with patched(mutation.patches()):
        for seed in seeds:
            try:
                simulate(seed)
            except Violation as error:
                return Catch(seed, error.kind, str(error))
    return None


def _no_fence(*, writes: bool) -> Patches:
    """A transfer relies on its lease alone: its memory is reused when the lease has ended."""

    def begin(self: NodeCore, session: Any, lease_id: int, **kind: bool) -> Any:
        replicas = original_begin(self, session, lease_id, **kind)
        if kind["writes"] == writes:
            session.leases[lease_id].transfers -= 1
            self._let_go(replicas)
            bare.append(replicas)
        return replicas

    def end(self: NodeCore, session: Any, lease_id: int, replicas: Any) -> None:
        for position, one in enumerate(bare):
            if one is replicas:
                del bare[position]
                return
        original_end(self, session, lease_id, replicas)

    bare: list[Any] = []
    original_begin, original_end = NodeCore.begin_transfer, NodeCore.end_transfer
    return [(NodeCore, "begin_transfer", begin), (NodeCore, "end_transfer", end)]


def _no_fence_for_reads() -> Patches:
    """A block that a node sends is held only by the reader's lease, which expires."""
    return _no_fence(writes=False)


def _no_fence_for_writes() -> Patches:
    """A block that a node receives is held only by its lease: a late writer writes into another
    block."""
    return _no_fence(writes=True)


def _early_reuse() -> Patches:
    """The extent of a dropped block is free at once, even if it is still read."""

    def detach(self: Residency, replica: Any) -> None:
        held, replica.holds = replica.holds, 0
        original(self, replica)
        # The remaining holders release a replica that is already detached.
        replica.holds = held + 1_000_000

    original = Residency._detach
    return [(Residency, "_detach", detach)]


def _commit_while_writing() -> Patches:
    """A commit does not check whether another stream of the client still writes."""
    original = NodeCore.write_lease

    def write_lease(self: NodeCore, session: Any, lease_id: int) -> Any:
        lease = session.leases.get(lease_id)
        return lease if lease is not None and lease.writes else original(self, session, lease_id)

    return [(NodeCore, "write_lease", write_lease)]


def _commit_unseen() -> Patches:
    """A node publishes a committed block without checking its header."""
    return [(Node, "_intact", lambda self, replica: True)]


def _any_generation() -> Patches:
    """A commit does not compare the generation: an old header is accepted."""

    def intact(self: Node, replica: Any) -> bool:
        generation = replica.generation
        view = self.dram.view(mover.extent_of(replica))
        with contextlib.suppress(Exception):
            found = mover.read_header(view, offset_expected=replica.offset)
            replica.generation = found.generation
        try:
            return bool(original(self, replica))
        finally:
            replica.generation = generation

    original = Node._intact
    return [(Node, "_intact", intact)]


def _release_twice() -> Patches:
    """A released lease stays registered, and can be released again."""

    def release(self: NodeCore, session: Any, lease_id: int) -> None:
        lease = session.leases.get(lease_id)
        if lease is None or lease.writes:
            raise StaleLease("not held")
        self._expiring.pop(lease_id, None)
        if any(replica.holds == 0 for replica in lease.replicas):
            return
        self._let_go(lease.replicas)

    return [(NodeCore, "release", release)]


def _removed_stays() -> Patches:
    """A dropped block is still in the index."""

    def forget(self: Residency, block: BlockRecord) -> None:
        if block.parent is not None:
            block.parent.children -= 1
            block.parent = None

    return [(Residency, "_forget", forget)]


def _copies_go_on() -> Patches:
    """A removal does not end the copies of its blocks that are under way."""

    def forget(self: NodeCore, keys: Any) -> Any:
        self.residency.copies.clear()
        return original(self, keys)

    original = NodeCore.forget
    return [(NodeCore, "forget", forget)]


def _copies_at_any_time() -> Patches:
    """A copy may begin at a node that has removed the block, while others have it still."""
    return [(BarredKeys, "bars", lambda self, key, now: False)]


def _absence_unsaid() -> Patches:
    """A node that returns is not told what was removed while it was away."""
    original = Node.catch_up
    return [
        (Node, "catch_up", lambda self, told, missed, whole: original(self, [], [], whole=True))
    ]


def _publish_before_commit() -> Patches:
    """A block is published when its room is reserved, and not withdrawn after an abort."""

    def begin_write(self: Residency, key: bytes, *rest: Any) -> Any:
        replica = original(self, key, *rest)
        if replica is not None:
            self.events.added(key)
        return replica

    original = Residency.begin_write
    return [(Residency, "begin_write", begin_write)]


def _visible_before_commit() -> Patches:
    """A block can be leased from the moment its room is reserved."""

    def begin_write(self: Residency, key: bytes, *rest: Any) -> Any:
        replica = original(self, key, *rest)
        if replica is not None:
            self.dram.set_state(replica, BlockState.COMMITTED)
            self._attach(replica)
            self.index[key] = replica.block
        return replica

    def commit_write(self: Residency, replica: Any) -> None:
        self.index.pop(replica.block.key, None)
        self.dram.set_state(replica, BlockState.RESERVED)
        replica.block.where = 0
        commit(self, replica)

    original, commit = Residency.begin_write, Residency.commit_write
    return [(Residency, "begin_write", begin_write), (Residency, "commit_write", commit_write)]


def _overwrite_in_place() -> Patches:
    """A put of a resident block overwrites it in place."""

    def reserve(self: NodeCore, session: Any, keys: Any, *rest: Any, copy: bool = False) -> Any:
        made = original(self, session, keys, *rest, copy=copy)
        if made.lease is not None or not made.statuses:
            return made
        replicas = [self.index[k].dram for k in keys if k in self.index and self.index[k].dram]
        if len(replicas) != len(keys):
            return made
        for replica in replicas:
            self.residency.hold(replica)
            replica.generation = next(self._generations)
        lease = self._grant(session, replicas, writes=True)
        self._expire_at(lease, rest[3] + self.options.write_lease_s)
        return core_module.Reservation(b"\1" * len(keys), lease, made.reason)

    def commit(self: NodeCore, lease: Any, good: Any) -> Any:
        if lease.replicas[0].block.key in self.residency.writing:
            return original_commit(self, lease, good)
        self._forget(lease)
        self._let_go(lease.replicas)
        return bytes(good)

    original, original_commit = NodeCore.reserve, NodeCore.commit
    return [(NodeCore, "reserve", reserve), (NodeCore, "commit", commit)]


def _leases_for_ever() -> Patches:
    """A remote client's lease never expires, even if the client is dead."""
    return [(NodeCore, "_expire_at", lambda self, lease, when: None)]


def _abort_leaks() -> Patches:
    """An aborted reservation keeps its extents in quarantine for ever."""

    def cancel_write(self: Residency, replica: Any, *, fenced: bool) -> None:
        original(self, replica, fenced=False)

    original = Residency.cancel_write
    return [(Residency, "cancel_write", cancel_write)]


def _outage_forgets() -> Patches:
    """A batch that the directory did not acknowledge is not sent again."""

    def failed(self: PublisherCore, now: float) -> None:
        original(self, now)
        self._batch = None

    original = PublisherCore.failed
    return [(PublisherCore, "failed", failed)]


def _removals_unsaid() -> Patches:
    """Additions are published to the directory, removals are not."""

    def take(self: PublisherCore) -> Any:
        batch = original(self)
        return type(batch)(batch.number, batch.added, [], batch.first_seq)

    original = PublisherCore._take_pending
    return [(PublisherCore, "_take_pending", take)]


def _deaf_to_flushes() -> Patches:
    """A node does not register again with a directory that lost its data."""
    original = PublisherCore.heard
    return [(PublisherCore, "heard", lambda self, alive, now: original(self, True, now))]


def _disk_believed() -> Patches:
    """A block from NVMe is not verified on its way to DRAM."""

    def verify(view: Any, replica: Any) -> Any:
        return mover.read_header(view)

    return [(mover, "verify_block", verify)]


def _checksums_unread() -> Patches:
    """A client that verifies does not compare the checksums of what it read from a peer."""

    def check(self: ArrivedSegments, block: int) -> None:
        self._verified[block] = False
        original(self, block)

    original = ArrivedSegments._check
    return [
        (ArrivedSegments, "_check", check),
        (ArrivedSegments, "_verify", lambda self, blocks, headers: None),
    ]


def _promotion_too_early() -> Patches:
    """A block counts as promoted before its bytes have come from the disk."""
    return [(mover.Mover, "_promote", lambda self, move: MoveOutcome.DONE)]


def _patience() -> Patches:
    """A read waits for its node without a limit."""

    def at_once(peer: Any, prefix: Any, arrivals: Any, deadline: float, stall_s: Any) -> None:
        original(peer, prefix, arrivals, deadline + 60.0, None)

    original = fetch_module._at_once
    return [(fetch_module, "_at_once", at_once)]


def _home_forgotten() -> Patches:
    """Blocks of the home node are not counted if none had to be read elsewhere (a bug that a seed
    once found)."""

    def at_home(outcome: Any, prefix: Any, deadline: float) -> Any:
        here = yield from original(outcome, prefix, deadline)
        outcome.blocks = 0
        return here

    original = pool_verbs._at_home
    return [(pool_verbs, "_at_home", at_home)]


def _no_end() -> Patches:
    """Each wait of a call has the full timeout, not the time that is left of it."""
    return [(deadlines, "OVERRUN_S", 60.0)]


MUTATIONS = [
    Mutation("no_fence_for_reads", _no_fence_for_reads, ("bytes",)),
    Mutation("no_fence_for_writes", _no_fence_for_writes, ("bytes", "findable", "conservation")),
    Mutation("early_reuse", _early_reuse, ("bytes", "findable")),
    Mutation("commit_while_writing", _commit_while_writing, ("bytes", "findable")),
    Mutation("commit_unseen", _commit_unseen, ("commit", "findable")),
    Mutation("any_generation", _any_generation, ("commit", "findable")),
    Mutation("release_twice", _release_twice, ("lease", "conservation", "exception")),
    Mutation("removed_stays", _removed_stays, ("conservation", "exception")),
    Mutation("copies_go_on", _copies_go_on, ("removed",)),
    Mutation("copies_at_any_time", _copies_at_any_time, ("removed",)),
    Mutation("absence_unsaid", _absence_unsaid, ("removed",)),
    Mutation("publish_before_commit", _publish_before_commit, ("convergence",)),
    Mutation(
        "visible_before_commit", _visible_before_commit, ("bytes", "findable", "conservation")
    ),
    Mutation("overwrite_in_place", _overwrite_in_place, ("bytes", "findable", "conservation")),
    Mutation("leases_for_ever", _leases_for_ever, ("leak",)),
    Mutation("abort_leaks", _abort_leaks, ("leak",)),
    Mutation("outage_forgets", _outage_forgets, ("convergence",)),
    Mutation("removals_unsaid", _removals_unsaid, ("convergence",)),
    Mutation("deaf_to_flushes", _deaf_to_flushes, ("convergence",)),
    Mutation("disk_believed", _disk_believed, ("bytes", "findable")),
    Mutation("checksums_unread", _checksums_unread, ("bytes",)),
    Mutation("promotion_too_early", _promotion_too_early, ("bytes", "findable")),
    Mutation("patience", _patience, ("deadline",)),
    Mutation("no_end", _no_end, ("deadline",), first_seed=400),
    Mutation("home_forgotten", _home_forgotten, ("reason",)),
]
