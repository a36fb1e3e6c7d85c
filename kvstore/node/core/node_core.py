"""The node's decisions: which session may read, write, pin and remove which blocks, and for how
long.

Pure: no I/O, no clock, no threads. Every verb takes `now` where time matters, answers at once, and
queues the I/O that the shell (`Node`) must do in `actions`. A verb that could succeed later returns
a partial result (`Reason.NO_ROOM`), and `worth_waiting` returns whether a retry can help; the shell
parks and retries requests.

A lease covers a whole call: one id for all the blocks of a prompt. Read leases hold their extents
until release or until the session's process is known to be dead. Write leases also end at
`expires_at`, so that a stopped writer does not lock its keys for ever. The extents of an expired
write lease stay QUARANTINED until the writer acknowledges or its process dies, because nothing else
can stop a process from writing into memory that it has mapped.

A remote session maps no memory. All its leases end at `expires_at`, since the node cannot find out
whether the remote process is dead. The extents of an expired lease are free at once, except those
that a transfer of this node still accesses: a transfer holds its replicas itself.
"""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass
from functools import lru_cache
from heapq import heappop, heappush
from itertools import count, takewhile
from operator import attrgetter
from typing import TYPE_CHECKING

from ...errors import InvalidInput, StaleLease
from ...format.header import BlockState
from .placement import Residency
from .records import (
    BEING_WRITTEN,
    IN_DRAM,
    BlockRecord,
    Followed,
    Kept,
    LeaseRecord,
    MoveOutcome,
    PinLevel,
    Reason,
    Replica,
    Session,
    Ticket,
)
from .removal_memory import BarredKeys, RemovalLog

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from .records import Move, Removal
    from .sharded_writes import Share
    from .tier_ledger import TierSpace

KEY_BYTES = 16
STALE_UNPINS = 1024  # slack of the `_unpins` heap, so that a few pins do not cause constant sorting


class ReserveStatus:
    """The values of a reservation's `statuses`: one byte per key."""

    GRANTED = 1
    RESIDENT = 2
    BUSY = 3


@dataclass(frozen=True, slots=True)
class CoreOptions:
    """Options of a node's decisions, set by the operator.

    Watermarks are fractions of the DRAM tier. `write_lease_s` bounds how long a stopped writer
    locks its keys: 60 s is ten times the longest prefill of 131,072 tokens that we know of on one
    GPU. `remote_lease_s` bounds how long the lease of a vanished remote reader keeps blocks from
    eviction; an in-flight transfer continues past it. 4 GiB take 30 s at 1 Gbit/s.
    """

    high_watermark: float = 0.90
    low_watermark: float = 0.80
    write_lease_s: float = 60.0
    demote_on_second_use: bool = False
    remote_lease_s: float = 30.0

    def __post_init__(self) -> None:
        if not 0.0 < self.low_watermark <= self.high_watermark <= 1.0:
            raise InvalidInput(
                "watermarks must satisfy 0 < low <= high <= 1, not "
                f"low={self.low_watermark}, high={self.high_watermark}"
            )
        if not self.write_lease_s > 0:
            raise InvalidInput(f"write_lease_s must be positive, not {self.write_lease_s}")
        if not self.remote_lease_s > 0:
            raise InvalidInput(f"remote_lease_s must be positive, not {self.remote_lease_s}")


@dataclass(frozen=True, slots=True)
class Reservation:
    """The result of `reserve`: `statuses` covers the leading keys that were processed; if it is
    shorter than the request's keys, `reason` says why."""

    statuses: bytes
    lease: LeaseRecord | None
    reason: Reason


@lru_cache(maxsize=1024)
def _splitter(keys: int) -> struct.Struct:
    return struct.Struct(f"{KEY_BYTES}s" * keys)


def split_keys(joined: bytes) -> tuple[bytes, ...]:
    """`joined` 16-byte keys -> a tuple of them. Raises `InvalidInput` for a broken length."""
    if len(joined) % KEY_BYTES:
        raise InvalidInput(f"{len(joined)} bytes are not a whole number of {KEY_BYTES}-byte keys")
    return _splitter(len(joined) // KEY_BYTES).unpack(joined)


class NodeCore:
    """The authoritative state of a node: its sessions, leases and pins, and the blocks in its
    tiers."""

    def __init__(
        self,
        dram: TierSpace,
        nvme: TierSpace | None,
        options: CoreOptions,
        *,
        first_generation: int = 1,
    ) -> None:
        self.options = options
        self.residency = Residency(dram, nvme, demote_on_second_use=options.demote_on_second_use)
        self.index = self.residency.index
        self.sessions: dict[int, Session] = {}
        # Lease ids start where generations do, so that an id from before a restart is not reused.
        self._ids = count(first_generation)
        self._generations = count(first_generation)
        self._barred = BarredKeys()
        self.removal_log = RemovalLog()
        self.takes_copies = True  # not before a node that returns has heard of removals
        self._expiring: dict[int, LeaseRecord] = {}
        # A heap of (end time, key) of pins. Entries of pins that were renewed or removed since are
        # stale; `_unpin_due` skips them.
        self._unpins: list[tuple[float, bytes]] = []

    # -- sessions --------------------------------------------------------------------------------

    def connect(self, name: str, pid: int, *, remote: bool = False) -> Session:
        """Open a session for a client that connected."""
        session = Session(next(self._ids), name, pid, remote=remote)
        self.sessions[session.id] = session
        return session

    def disconnect(self, session: Session, *, fenced: bool) -> bool:
        """End a session whose connection ended. `fenced`: the client sent a goodbye, or its process
        is dead.

        If not `fenced`, its reservations are cancelled and all its extents stay held until `fence`.
        Returns whether the session has ended: a session without leases always has, even if its
        process still runs.
        """
        session.gone = True
        for lease in [lease for lease in session.leases.values() if lease.writes]:
            self._cancel(lease)
        ended = fenced or not (session.leases or session.zombies)
        if ended:
            self.fence(session)
        return ended

    def fence(self, session: Session) -> None:
        """Free all extents of a session whose process can no longer access the node's memory."""
        for lease in [*session.leases.values(), *session.zombies.values()]:
            self._end(lease)
        session.leases.clear()
        session.zombies.clear()
        self.sessions.pop(session.id, None)

    # -- looking ---------------------------------------------------------------------------------

    def match(self, keys: bytes, *, writing: bool = False) -> bytes:
        """One byte per leading resident block: the tiers with a replica of it (IN_DRAM | IN_NVME).
        With `writing`, blocks that a writer has reserved count too, as BEING_WRITTEN.

        The hot path of the whole node: a prompt of 131,072 tokens has 256 keys, so this runs at C
        speed per key (about 0.1 us).
        """
        found = list(map(self.index.get, split_keys(keys)))
        if None in found:
            if writing:
                return self._match_writing(split_keys(keys))
            del found[found.index(None) :]
        return bytes(map(_WHERE, found))

    def _match_writing(self, keys: Sequence[bytes]) -> bytes:
        found = takewhile(lambda block: block is not None, map(self._block, keys))
        return bytes(block.where or BEING_WRITTEN for block in found if block is not None)

    def changes(self) -> tuple[int, int]:
        """Counters of the events that can make a match longer: additions, and reservations."""
        return self.residency.events.seq, self.residency.begun_writes

    def exists(self, keys: bytes) -> bytes:
        """One byte per key: 1 if its block is resident, whether or not its ancestors are."""
        index = self.index
        return bytes(key in index for key in split_keys(keys))

    def tiers(self) -> bytes:
        """One byte per resident block, in the order of `index`: the tier that serves its reads."""
        return bytes(map(_WHERE, self.index.values())).translate(_FASTEST)

    # -- writing ---------------------------------------------------------------------------------

    def reserve(
        self,
        session: Session,
        keys: Sequence[bytes],
        parent_key: bytes,
        depth: int,
        length: int,
        now: float,
        share: Share | None = None,
        *,
        copy: bool = False,
    ) -> Reservation:
        """Reserve extents of `length` bytes for those of `keys` that are not resident, in order.

        Stops at the first key for which no room could be made. If two writers reserve one key, the
        second gets BUSY and skips the block; both computed the same content, by construction of the
        key. Ranks that write blocks together each reserve with their `share` and get the same
        extents; a rank that cannot join a block's shared write gets BUSY. A `copy` stops at the
        first block whose removal may not have reached all nodes. Raises InvalidInput for a share
        that claims segments of another rank.
        """
        residency = self.residency
        statuses, granted, resident = bytearray(), [], []
        parent = self._block(parent_key)
        reason = Reason.NONE
        until = now + self.options.write_lease_s
        if share is not None:
            size = residency.dram.arena.round_up(length)
            residency.shared.check([residency.writing.get(key) for key in keys], share, size)
        for position, key in enumerate(keys):
            block = self._block(key)
            if block is None:
                if copy and (not self.takes_copies or self._barred.bars(key, now)):
                    reason = Reason.MISS
                    break
                generation = next(self._generations)
                replica = residency.begin_write(key, parent, depth + position, length, generation)
                if replica is None:
                    reason = Reason.NO_ROOM
                    break
                if share is not None:
                    residency.shared.begin(replica, share, until)
                if copy:
                    residency.copies.add(replica)
                granted.append(replica)
                parent = replica.block
                statuses.append(ReserveStatus.GRANTED)
                continue
            if parent is not None:
                residency.relink(block, parent)
            parent = block
            if share is not None and not block.where:
                replica = residency.writing[key]
                if residency.shared.join(replica, share, until):
                    granted.append(replica)
                    statuses.append(ReserveStatus.GRANTED)
                    continue
            statuses.append(ReserveStatus.RESIDENT if block.where else ReserveStatus.BUSY)
            resident.append(block)
        for block in reversed(resident):
            residency.touch(block)
        if resident:
            residency.touch_ancestors(resident[0])
        lease = self._grant(session, granted, writes=True) if granted else None
        if lease is not None:
            lease.rank = share.rank if share is not None else None
            self._expire_at(lease, until)
        return Reservation(bytes(statuses), lease, reason)

    def _block(self, key: bytes) -> BlockRecord | None:
        block = self.index.get(key)
        if block is None and key in self.residency.writing:
            return self.residency.writing[key].block
        return block

    def write_lease(self, session: Session, lease_id: int) -> LeaseRecord:
        """The session's live write lease. Raises `StaleLease` if it has none with this id, or if a
        transfer still writes to it. If the lease expired, this frees its extents: with its commit
        or abort request the writer acknowledges that it has stopped writing."""
        lease = session.leases.get(lease_id)
        if lease is not None and lease.writes:
            if lease.transfers:
                # A transfer on another connection of the session: committed bytes must not change.
                raise StaleLease(f"reservation {lease_id} is still being written to")
            return lease
        zombie = session.zombies.pop(lease_id, None)
        if zombie is not None:
            self._end(zombie)
            raise StaleLease(
                f"reservation {lease_id} expired after {self.options.write_lease_s} s; "
                "its blocks were not stored"
            )
        raise StaleLease(f"reservation {lease_id} is not one that this client holds")

    def commit(self, lease: LeaseRecord, good: Sequence[bool]) -> bytes:
        """End a write lease: replica i is committed if `good[i]`, that is, if it passed its checks.
        Returns a `Kept` for each.

        The other replicas are freed: with its commit the writer also acknowledges that it has
        stopped writing.
        """
        assert len(good) == len(lease.replicas)
        self._forget(lease)
        # From the tail, here and in `_let_go`: eviction policies see a chain's head as used last.
        kept = [
            self._keep(lease, replica, is_good)
            for replica, is_good in zip(reversed(lease.replicas), reversed(good), strict=True)
        ]
        self.residency.touch_ancestors(lease.replicas[0].block)
        return bytes(reversed(kept))

    def _keep(self, lease: LeaseRecord, replica: Replica, is_good: bool) -> Kept:
        if not is_good or replica.state is not BlockState.RESERVED:  # another rank cancelled it
            self.residency.cancel_write(replica, fenced=True)
            return Kept.REFUSED
        if lease.rank is not None:
            self.residency.unhold(replica)  # the shared write has a hold of its own
            if not self.residency.shared.arrive(replica, lease.rank):
                return Kept.PENDING
        self.residency.commit_write(replica)
        return Kept.STORED

    def abort(self, session: Session, lease_id: int) -> None:
        """Cancel a reservation whose writer gave up and has stopped writing."""
        if session.remote and lease_id in session.leases and session.leases[lease_id].writes:
            self.give_back(session, [lease_id])  # an interrupted WRITE may still be in flight
            return
        lease = self.write_lease(session, lease_id)
        self.commit(lease, [False] * len(lease.replicas))

    # -- reading ---------------------------------------------------------------------------------

    def lease(self, session: Session, keys: Sequence[bytes], *, follows: bool = False) -> Ticket:
        """Hold the leading resident blocks of `keys`, promoting those that are only in NVMe. If the
        lease `follows` writers, also hold blocks that are still being written
        (`precommit_reads.py`).

        The ticket is `ready` at once if no block had to move. Otherwise it becomes ready when its
        moves have ended (`moved`) and, if it was `blocked`, DRAM space was found (`advance`).
        `settle` turns it into a lease at any time.
        """
        ticket = Ticket(session, keys, follows=follows)
        self.advance(ticket)
        return ticket

    def advance(self, ticket: Ticket) -> None:
        """Hold or promote a ticket's further blocks, up to the first that is missing or for which
        DRAM has no room."""
        residency, counters = self.residency, self.residency.counters
        ticket.blocked = False
        self._hold_leading(ticket)
        for key in ticket.keys[len(ticket.replicas) :]:
            block = self.index.get(key)
            if block is None:
                writing = residency.writing.get(key)
                if writing is None or not ticket.follows:
                    ticket.reason = Reason.MISS if writing is None else Reason.BUSY
                    return
                writing.holds += 1  # it is not in the eviction order, because its writer holds it
                ticket.replicas.append(writing)
                continue
            replica = block.dram
            if replica is not None:
                residency.hold(replica)
                counters.dram_hits += 1
                counters.dram_hit_bytes += replica.length
            else:
                move = residency.promote(block)
                if move is None:
                    ticket.reason = Reason.NO_ROOM
                    ticket.blocked = True
                    return
                replica = move.target
                replica.holds += 1
                move.tickets.append(ticket)
                ticket.pending += 1
                counters.nvme_hits += 1
                counters.nvme_hit_bytes += replica.length
            block.uses += 1
            ticket.replicas.append(replica)
        ticket.reason = Reason.NONE

    def _hold_leading(self, ticket: Ticket) -> None:
        """Hold the ticket's next blocks up to the first that is not in DRAM: nearly always all."""
        held = []
        for block in map(self.index.get, ticket.keys[len(ticket.replicas) :]):
            if block is None or block.dram is None:
                break
            block.uses += 1
            held.append(block.dram)
        self.residency.hold_all(held)
        self.residency.counters.dram_hits += len(held)
        self.residency.counters.dram_hit_bytes += sum(map(_LENGTH, held))
        ticket.replicas += held

    def settle(
        self, ticket: Ticket, now: float = 0.0, reason: Reason = Reason.DEADLINE
    ) -> tuple[LeaseRecord | None, Reason]:
        """Turn the ticket's leading blocks that are readable now into a lease; unhold the rest.

        `reason` is the reason to return if a block's promotion is still in flight. `now` matters
        for remote sessions only.
        """
        ticket.abandoned = True
        if ticket.reason in (Reason.MISS, Reason.BUSY):  # other reasons: resident, not readable now
            self.residency.counters.misses += len(ticket.keys) - len(ticket.replicas)
        ready = 0
        for replica in ticket.replicas:
            followed = ticket.follows and self.residency.writing.get(replica.key) is replica
            if not followed and replica.state not in _READABLE:
                break
            ready += 1
        rest = ticket.replicas[ready:]
        if rest:
            if rest[0].state is BlockState.RESERVED:
                ticket.reason = reason
            self._let_go(rest)
        if ticket.session.gone:
            self._let_go(ticket.replicas[:ready])
            ready = 0
        if ready == 0:
            return None, ticket.reason
        lease = self._grant(ticket.session, ticket.replicas[:ready], writes=False)
        lease.followed = Followed() if ticket.follows else None
        self.renew(lease, now)
        return lease, ticket.reason

    def renew(self, lease: LeaseRecord, now: float) -> None:
        """Renew a remote session's lease: it expires `remote_lease_s` after `now`."""
        if lease.session.remote:
            self._expire_at(lease, now + self.options.remote_lease_s)

    def release(self, session: Session, lease_id: int) -> None:
        """End a read lease. Raises `StaleLease` if the session has no such lease."""
        lease = session.leases.get(lease_id)
        if lease is None or lease.writes:
            raise StaleLease(f"lease {lease_id} is not held (released before, or never granted)")
        self._forget(lease)
        self._let_go(lease.replicas)

    def _let_go(self, replicas: list[Replica]) -> None:
        self.residency.unhold_all(replicas)
        if replicas:
            self.residency.touch_ancestors(replicas[0].block)

    # -- moving bytes for others -------------------------------------------------------------------

    def begin_transfer(self, session: Session, lease_id: int, *, writes: bool) -> list[Replica]:
        """The replicas of a lease, each held once more until `end_transfer`.

        Raises StaleLease if the session has no lease of that id and kind (`writes`), and for a
        lease that follows writers and has nothing exposed (`Followed.exposed`).
        """
        lease = session.leases.get(lease_id)
        if lease is None or lease.writes != writes:
            kind = "reservation" if writes else "lease"
            raise StaleLease(f"{kind} {lease_id} is not one that this client holds")
        if lease.followed is not None and not lease.followed.exposed:
            raise StaleLease(f"lease {lease_id} follows writers: await what is to be read first")
        lease.transfers += 1
        for replica in lease.replicas:
            replica.holds += 1  # it is not in the eviction order, because the lease holds it
        return lease.replicas.copy()

    def end_transfer(self, session: Session, lease_id: int, replicas: list[Replica]) -> None:
        """Unhold a transfer's replicas: the node's threads no longer access them. The lease may
        have ended meanwhile."""
        lease = session.leases.get(lease_id)
        if lease is not None:
            lease.transfers -= 1
        self._let_go(replicas)

    # -- wishes ----------------------------------------------------------------------------------

    def pin(self, keys: Sequence[bytes], pin: PinLevel, until: float) -> int:
        """Pin the resident blocks among `keys` until the time `until`; returns their number."""
        pinned = 0
        for key in reversed(keys):
            block = self.index.get(key)
            if block is None:
                continue
            self._set_pin(block, pin)
            if pin is PinLevel.NONE:
                self.residency.pins.pop(key, None)
            else:
                self.residency.pins[key] = until
                if until < math.inf:
                    heappush(self._unpins, (until, key))
            pinned += 1
        if len(self._unpins) > 2 * len(self.residency.pins) + STALE_UNPINS:
            pins = self.residency.pins.items()
            self._unpins = sorted((until, key) for key, until in pins if until < math.inf)
        return pinned

    def _set_pin(self, block: BlockRecord, pin: PinLevel) -> None:
        for replica in block.replicas():
            self.residency.space(replica.tier).withdraw(replica)
        block.pin = pin
        for replica in block.replicas():
            if replica.holds == 0:
                self.residency.space(replica.tier).offer(replica)

    def remove(self, keys: Sequence[bytes], now: float = 0.0, barred_until: float = 0.0) -> Removal:
        """Remove the resident blocks among `keys`, pinned or not.

        Readers that hold a lease can still read the bytes; no new request finds the blocks. Copies
        of them that are under way are not stored, and no copy begins before `barred_until`: by then
        the removal has reached all nodes, or failed. Writers go on.
        """
        self._barred.bar(keys, now, barred_until)
        self.removal_log.note(keys)
        return self.forget(keys)

    def forget(self, keys: Sequence[bytes]) -> Removal:
        """As `remove`, but it is not remembered, nor told to other nodes."""
        for replica in [self.residency.writing.get(key) for key in keys]:
            if replica in self.residency.copies:
                self.residency.cancel_write(replica, fenced=False)
        blocks = map(self.index.get, dict.fromkeys(keys))
        return self.residency.remove([block for block in blocks if block is not None])

    def condemn(self, key: bytes, generation: int) -> None:
        """Drop a block whose replica of this `generation` failed its checks; a newer generation is
        left alone."""
        block = self.index.get(key)
        if block is not None and any(r.generation == generation for r in block.replicas()):
            self.residency.drop(block)
            self.residency.counters.corrupt += 1

    # -- time and moves --------------------------------------------------------------------------

    def tick(self, now: float) -> None:
        """Expire leases and pins; start demotions above the high watermark; compact tables."""
        for lease in [x for x in self._expiring.values() if x.expires_at <= now]:
            self._expire(lease)
            self.residency.counters.expired += 1
        for replica in self.residency.shared.due(now):
            self.residency.cancel_write(replica, fenced=False)
            self.residency.counters.expired += 1
        self._unpin_due(now)
        self.residency.trim(self.options.high_watermark, self.options.low_watermark)
        self.residency.compact()

    def _unpin_due(self, now: float) -> None:
        pins = self.residency.pins
        while self._unpins and self._unpins[0][0] <= now:
            until, key = heappop(self._unpins)
            if pins.get(key) == until:
                del pins[key]
                self._set_pin(self.index[key], PinLevel.NONE)

    def flush(self) -> int:
        """Start to write back all blocks that are only in DRAM, heads of chains first; returns the
        number of write-backs started."""
        blocks = sorted(self.index.values(), key=attrgetter("depth"))
        return sum(self.residency.write_back(block) for block in blocks)

    def moved(self, move: Move, outcome: MoveOutcome) -> list[Ticket]:
        """Record that a move has ended; returns the tickets that became ready by it."""
        self.residency.moved(move, outcome)
        ready = []
        for ticket in move.tickets:
            ticket.pending -= 1
            if move.target.state is BlockState.QUARANTINED and not ticket.abandoned:
                ticket.reason = _WHY.get(outcome, Reason.MEDIUM)
                ticket.blocked = False  # blocks after a missing one are of no use to the reader
            if ticket.ready and not ticket.abandoned:
                ready.append(ticket)
        return ready

    def worth_waiting(self) -> bool:
        """Whether room can appear without a new request: when a move, wipe, lease or pin ends, or
        when an eviction sweep that was cut short continues."""
        return bool(
            self.residency.moves
            or self.residency.removals
            or self.residency.swept_in_part
            or self.residency.pins
            or self.residency.shared
            or any(session.leases or session.zombies for session in self.sessions.values())
        )

    def worth_advancing(self, ticket: Ticket) -> bool:
        """Whether a blocked reader should wait. For moves, yes: they end soon. For the leases and
        pins of other sessions only while the reader holds no blocks itself: readers that hold
        blocks and wait could deadlock."""
        if ticket.replicas:
            return bool(self.residency.moves) or self.residency.swept_in_part
        return self.worth_waiting()

    # -- leases ----------------------------------------------------------------------------------

    def _grant(self, session: Session, replicas: list[Replica], *, writes: bool) -> LeaseRecord:
        lease = LeaseRecord(next(self._ids), session, replicas, writes=writes)
        session.leases[lease.id] = lease
        return lease

    def _expire_at(self, lease: LeaseRecord, when: float) -> None:
        lease.expires_at = when
        self._expiring[lease.id] = lease

    def _expire(self, lease: LeaseRecord) -> None:
        if not lease.session.remote:
            self._cancel(lease)
            return
        self._end(lease)
        self._forget(lease)

    def _forget(self, lease: LeaseRecord) -> None:
        lease.session.leases.pop(lease.id, None)
        self._expiring.pop(lease.id, None)

    def _cancel(self, lease: LeaseRecord) -> None:
        """End a write lease without the writer's acknowledgement: it becomes a zombie, and other
        writers may reserve these keys, in other extents."""
        self._forget(lease)
        lease.session.zombies[lease.id] = lease
        for replica in lease.replicas:
            self.residency.cancel_write(replica, fenced=False)

    def _end(self, lease: LeaseRecord) -> None:
        """End a lease whose session is fenced: unhold every extent."""
        self._expiring.pop(lease.id, None)
        if lease.writes and lease.id in lease.session.leases:
            for replica in lease.replicas:
                self.residency.cancel_write(replica, fenced=True)
        else:
            self._let_go(lease.replicas)

    def give_back(self, session: Session, lease_ids: Iterable[int]) -> None:
        """End those of `lease_ids` that a session still has, read and write leases alike, whose
        memory its client does not touch; in-flight transfers hold their replicas themselves."""
        for lease in [session.leases[i] for i in lease_ids if i in session.leases]:
            self._end(lease)
            self._forget(lease)

    def check(self) -> None:
        """Assert every invariant; O(blocks). For tests, at every quiet moment."""
        self.residency.check()
        for session in self.sessions.values():
            for lease in [*session.leases.values(), *session.zombies.values()]:
                assert all(replica.holds > 0 for replica in lease.replicas), lease


_WHERE = attrgetter("where")
_FASTEST = bytes(where & IN_DRAM or where for where in range(256))
_LENGTH = attrgetter("length")
_READABLE = (BlockState.COMMITTED, BlockState.EVICTING)
# The reason that a reader gets for a block whose promotion ended with this outcome. DONE: the block
# was removed during its promotion.
_WHY = {MoveOutcome.CORRUPT: Reason.CORRUPT, MoveOutcome.DONE: Reason.MISS}
