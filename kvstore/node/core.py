"""The node's decisions: who may read, write, pin and remove what, and for how long.

Pure: no I/O, no clock, no threads. Every verb takes `now` where time matters, answers at once, and
leaves what the shell must do in `actions`. A verb that could succeed later answers with what it has
(`Reason.NO_ROOM`) and `worth_waiting` tells whether time can help; parking and retrying is the
shell's business.

A lease covers a whole call: one id for all the blocks of a prompt. Read leases hold their extents
until release or until the session's process is known to be dead. Write leases also end at
`expires_at`, so that a stopped writer does not lock its keys for ever; its extents then wait,
QUARANTINED, for its acknowledgement or its death, because nothing else can stop a process from
writing into memory that it has mapped.

A remote session has mapped nothing. All its leases end at `expires_at`, since nobody can tell
whether it is dead, and its extents are free at once, but for those that a transfer of ours still
touches: a transfer holds its replicas itself.
"""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass
from functools import lru_cache
from itertools import count
from operator import attrgetter
from typing import TYPE_CHECKING

from ..block import BlockState
from ..errors import InvalidInput, StaleLease
from .following import Followed
from .records import IN_DRAM, Block, Kept, Lease, MoveOutcome, Pin, Reason, Replica, Session, Ticket
from .residency import Residency

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from .records import Move
    from .shared import Share
    from .space import TierSpace

KEY_BYTES = 16


class Status:
    """One byte per key in the answer to a reservation."""

    GRANTED = 1
    RESIDENT = 2
    BUSY = 3


@dataclass(frozen=True, slots=True)
class CoreOptions:
    """What an operator may choose about a node's decisions.

    Watermarks are shares of the DRAM tier. `write_lease_s` bounds how long a stopped writer locks
    its keys: 60 s is ten times the longest prefill of 131,072 tokens that we know of on one GPU.
    `remote_lease_s` bounds how long a remote reader that vanished keeps blocks from eviction; a
    transfer that has begun goes on past it. 4 GiB take 30 s at 1 Gbit/s.
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
    """`statuses` covers the keys that were decided on; a shorter one ended for `reason`."""

    statuses: bytes
    lease: Lease | None
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
    """The truth about what is in a node's tiers."""

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
        # Lease ids start where generations do, so that an id from before a restart names nothing.
        self._ids = count(first_generation)
        self._generations = count(first_generation)
        self._expiring: dict[int, Lease] = {}
        self._next_unpin = math.inf

    # -- sessions --------------------------------------------------------------------------------

    def connect(self, name: str, pid: int, *, remote: bool = False) -> Session:
        """A client has connected."""
        session = Session(next(self._ids), name, pid, remote=remote)
        self.sessions[session.id] = session
        return session

    def disconnect(self, session: Session, *, fenced: bool) -> bool:
        """Its connection ended. `fenced`: it said goodbye, or its process is dead.

        Otherwise its reservations are cancelled and all its extents wait for `fence`. Returns
        whether the session has ended: one that held nothing has, whatever its process does.
        """
        session.gone = True
        for lease in [lease for lease in session.leases.values() if lease.writes]:
            self._cancel(lease)
        ended = fenced or not (session.leases or session.zombies)
        if ended:
            self.fence(session)
        return ended

    def fence(self, session: Session) -> None:
        """The session's process can't touch memory any more: all that it held is free."""
        for lease in [*session.leases.values(), *session.zombies.values()]:
            self._end(lease)
        session.leases.clear()
        session.zombies.clear()
        self.sessions.pop(session.id, None)

    # -- looking ---------------------------------------------------------------------------------

    def match(self, keys: bytes) -> bytes:
        """One byte per leading resident block: the tiers that have it (IN_DRAM | IN_NVME).

        The fast path of the whole node: a prompt of 131,072 tokens asks for 256 keys, so this runs
        at C speed per key (about 0.1 us).
        """
        found = list(map(self.index.get, split_keys(keys)))
        if None in found:
            del found[found.index(None) :]
        return bytes(map(_WHERE, found))

    def exists(self, keys: bytes) -> bytes:
        """One byte per key, 1 if it is resident, whatever its ancestors are."""
        index = self.index
        return bytes(key in index for key in split_keys(keys))

    def tiers(self) -> bytes:
        """One byte per resident block, in the order of `index`: the tier that it is read from."""
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
    ) -> Reservation:
        """Extents of `length` bytes for those of `keys` that are not here yet, in order.

        Stops at the first key for which no room could be made. Two writers of one key: the second
        is told BUSY and skips it; what it computed is the same by construction of the key. Ranks
        that write blocks together each reserve with their `share`, and get the same extents; a rank
        that is not of that party is told BUSY. Raises InvalidInput for a part that is another's.
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
                generation = next(self._generations)
                replica = residency.begin_write(key, parent, depth + position, length, generation)
                if replica is None:
                    reason = Reason.NO_ROOM
                    break
                if share is not None:
                    residency.shared.begin(replica, share, until)
                granted.append(replica)
                parent = replica.block
                statuses.append(Status.GRANTED)
                continue
            if parent is not None:
                residency.relink(block, parent)
            parent = block
            if share is not None and not block.where:
                replica = residency.writing[key]
                if residency.shared.join(replica, share, until):
                    granted.append(replica)
                    statuses.append(Status.GRANTED)
                    continue
            statuses.append(Status.RESIDENT if block.where else Status.BUSY)
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

    def _block(self, key: bytes) -> Block | None:
        block = self.index.get(key)
        if block is None and key in self.residency.writing:
            return self.residency.writing[key].block
        return block

    def write_lease(self, session: Session, lease_id: int) -> Lease:
        """The session's live write lease; raises `StaleLease` (and frees an expired one's extents:
        asking for its commit is the acknowledgement that the writer has stopped)."""
        lease = session.leases.get(lease_id)
        if lease is not None and lease.writes:
            if lease.transfers:
                # Of another of its connections: what is committed must not change any more.
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

    def commit(self, lease: Lease, good: Sequence[bool]) -> bytes:
        """End a write lease: `good[i]` tells whether replica i passed its checks and is published.
        Returns a `Kept` for each.

        The others are freed: the commit is also the writer's word that it has stopped writing.
        """
        assert len(good) == len(lease.replicas)
        self._forget(lease)
        # From the tail, here and in `_let_go`: the policies see a chain's head as used last.
        kept = [
            self._keep(lease, replica, is_good)
            for replica, is_good in zip(reversed(lease.replicas), reversed(good), strict=True)
        ]
        self.residency.touch_ancestors(lease.replicas[0].block)
        return bytes(reversed(kept))

    def _keep(self, lease: Lease, replica: Replica, is_good: bool) -> Kept:
        if not is_good or replica.state is not BlockState.RESERVED:  # another rank gave it up
            self.residency.cancel_write(replica, fenced=True)
            return Kept.REFUSED
        if lease.rank is not None:
            self.residency.unhold(replica)  # the shared write holds it as well
            if not self.residency.shared.arrive(replica, lease.rank):
                return Kept.PENDING
        self.residency.commit_write(replica)
        return Kept.STORED

    def abort(self, session: Session, lease_id: int) -> None:
        """The writer gave up and has stopped writing."""
        if session.remote and lease_id in session.leases and session.leases[lease_id].writes:
            self.give_back(session, [lease_id])  # a broken WRITE of it may still be under way
            return
        lease = self.write_lease(session, lease_id)
        self.commit(lease, [False] * len(lease.replicas))

    # -- reading ---------------------------------------------------------------------------------

    def lease(self, session: Session, keys: Sequence[bytes], *, follows: bool = False) -> Ticket:
        """Hold the leading resident blocks of `keys`, promoting those that are only in NVMe; if it
        `follows` writers, those that are being written as well (`following.py`).

        The ticket is `ready` at once if nothing had to move. Else it becomes so when its moves
        have ended (`moved`) and, if it was `blocked`, room was found (`advance`); `settle` makes a
        lease of it at any time.
        """
        ticket = Ticket(session, keys, follows=follows)
        self.advance(ticket)
        return ticket

    def advance(self, ticket: Ticket) -> None:
        """Go on with a ticket's keys until the first that is missing or finds no room."""
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
                writing.holds += 1  # as its writer's own hold: not in the eviction order
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
        """Hold the ticket's next blocks as far as they are in DRAM: nearly always all of them."""
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
    ) -> tuple[Lease | None, Reason]:
        """Make a lease of the ticket's leading blocks that are there now; let go of the rest.

        `reason` explains blocks that are still on their way. `now` matters to remote sessions.
        """
        ticket.abandoned = True
        if ticket.reason in (Reason.MISS, Reason.BUSY):  # the others are here, only not now
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

    def renew(self, lease: Lease, now: float) -> None:
        """Its reader is there at `now`: count `remote_lease_s` from then, if it is a remote one."""
        if lease.session.remote:
            self._expire_at(lease, now + self.options.remote_lease_s)

    def release(self, session: Session, lease_id: int) -> None:
        """End a read lease. Raises `StaleLease` if the session holds no such lease."""
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

        Raises StaleLease unless the session holds that lease, and it is of that kind; also for one
        that follows writers and has nothing exposed (`Followed.exposed`).
        """
        lease = session.leases.get(lease_id)
        if lease is None or lease.writes != writes:
            kind = "reservation" if writes else "lease"
            raise StaleLease(f"{kind} {lease_id} is not one that this client holds")
        if lease.followed is not None and not lease.followed.exposed:
            raise StaleLease(f"lease {lease_id} follows writers: await what is to be read first")
        lease.transfers += 1
        for replica in lease.replicas:
            replica.holds += 1  # held already, by the lease: not in the eviction order
        return lease.replicas.copy()

    def end_transfer(self, session: Session, lease_id: int, replicas: list[Replica]) -> None:
        """Our threads touch these replicas no more, whatever became of the lease meanwhile."""
        lease = session.leases.get(lease_id)
        if lease is not None:
            lease.transfers -= 1
        self._let_go(replicas)

    # -- wishes ----------------------------------------------------------------------------------

    def pin(self, keys: Sequence[bytes], pin: Pin, until: float) -> int:
        """Pin the resident ones of `keys` until the time `until`; returns how many there are."""
        pinned = 0
        for key in reversed(keys):
            block = self.index.get(key)
            if block is None:
                continue
            self._set_pin(block, pin)
            if pin is Pin.NONE:
                self.residency.pins.pop(key, None)
            else:
                self.residency.pins[key] = until
                self._next_unpin = min(self._next_unpin, until)
            pinned += 1
        return pinned

    def _set_pin(self, block: Block, pin: Pin) -> None:
        for replica in block.replicas():
            self.residency.space(replica.tier).withdraw(replica)
        block.pin = pin
        for replica in block.replicas():
            if replica.holds == 0:
                self.residency.space(replica.tier).offer(replica)

    def remove(self, keys: Sequence[bytes]) -> int:
        """Forget the resident ones of `keys`, pinned or not; returns how many there were.

        Readers that hold a lease keep their bytes; nobody finds the blocks any more.
        """
        removed = 0
        for key in keys:
            block = self.index.get(key)
            if block is not None:
                self.residency.drop(block)
                removed += 1
        self.residency.counters.removals += removed
        return removed

    def condemn(self, key: bytes, generation: int) -> None:
        """This generation of the block failed its checks: forget it (a newer one is untouched)."""
        block = self.index.get(key)
        if block is not None and any(r.generation == generation for r in block.replicas()):
            self.residency.drop(block)
            self.residency.counters.corrupt += 1

    # -- time and moves --------------------------------------------------------------------------

    def tick(self, now: float) -> None:
        """Expire reservations and pins; start demotions above the high watermark; tidy up."""
        for lease in [x for x in self._expiring.values() if x.expires_at <= now]:
            self._expire(lease)
            self.residency.counters.expired += 1
        for replica in self.residency.shared.due(now):
            self.residency.cancel_write(replica, fenced=False)
            self.residency.counters.expired += 1
        if now >= self._next_unpin:
            self._unpin_due(now)
        self.residency.trim(self.options.high_watermark, self.options.low_watermark)
        self.residency.compact()

    def _unpin_due(self, now: float) -> None:
        pins = self.residency.pins
        for key in [key for key, until in pins.items() if until <= now]:
            del pins[key]
            self._set_pin(self.index[key], Pin.NONE)
        self._next_unpin = min(pins.values(), default=math.inf)

    def flush(self) -> int:
        """Begin to write back all that is only in DRAM, heads of chains first; how many blocks."""
        blocks = sorted(self.index.values(), key=attrgetter("depth"))
        return sum(self.residency.write_back(block) for block in blocks)

    def moved(self, move: Move, outcome: MoveOutcome) -> list[Ticket]:
        """A move has ended; returns the tickets that became ready by it."""
        self.residency.moved(move, outcome)
        ready = []
        for ticket in move.tickets:
            ticket.pending -= 1
            if move.target.state is BlockState.QUARANTINED and not ticket.abandoned:
                ticket.reason = _WHY.get(outcome, Reason.MEDIUM)
                ticket.blocked = False  # what comes behind it would not help
            if ticket.ready and not ticket.abandoned:
                ready.append(ticket)
        return ready

    def worth_waiting(self) -> bool:
        """Whether room can appear without anybody's new wish: by a move's, lease's or pin's end."""
        return bool(
            self.residency.moves
            or self.residency.pins
            or self.residency.shared
            or any(session.leases or session.zombies for session in self.sessions.values())
        )

    def worth_advancing(self, ticket: Ticket) -> bool:
        """Whether a blocked reader should wait. For moves, yes: they end soon. For what others hold
        only while it holds nothing itself: readers that hold and wait would wait for each other."""
        if ticket.replicas:
            return bool(self.residency.moves)
        return self.worth_waiting()

    # -- leases ----------------------------------------------------------------------------------

    def _grant(self, session: Session, replicas: list[Replica], *, writes: bool) -> Lease:
        lease = Lease(next(self._ids), session, replicas, writes=writes)
        session.leases[lease.id] = lease
        return lease

    def _expire_at(self, lease: Lease, when: float) -> None:
        lease.expires_at = when
        self._expiring[lease.id] = lease

    def _expire(self, lease: Lease) -> None:
        if not lease.session.remote:
            self._cancel(lease)
            return
        self._end(lease)
        self._forget(lease)

    def _forget(self, lease: Lease) -> None:
        lease.session.leases.pop(lease.id, None)
        self._expiring.pop(lease.id, None)

    def _cancel(self, lease: Lease) -> None:
        """A write lease ends without its writer's word: others may write these keys, elsewhere."""
        self._forget(lease)
        lease.session.zombies[lease.id] = lease
        for replica in lease.replicas:
            self.residency.cancel_write(replica, fenced=False)

    def _end(self, lease: Lease) -> None:
        """Its holder is fenced: let go of every extent."""
        self._expiring.pop(lease.id, None)
        if lease.writes and lease.id in lease.session.leases:
            for replica in lease.replicas:
                self.residency.cancel_write(replica, fenced=True)
        else:
            self._let_go(lease.replicas)

    def give_back(self, session: Session, lease_ids: Iterable[int]) -> None:
        """End those of a remote session's leases that it still has, whatever their kind: transfers
        of them hold what they touch."""
        assert session.remote
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
# Why a reader did not get a block whose promotion ended so. DONE: removed while it was on its way.
_WHY = {MoveOutcome.CORRUPT: Reason.CORRUPT, MoveOutcome.DONE: Reason.MISS}
