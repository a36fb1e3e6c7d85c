"""One node: the core, its tiers, and the threads that move bytes between them.

`submit(session, request, reply)` is the only door, used by an embedded client directly and by the
socket server for each frame. It answers at once, or parks the request and answers when a lease or
a move ends, or the deadline passes.

Ownership:
  constant after construction   options, dram, nvme, core (the reference)
  protected by `_lock`          everything inside the core, `_parked`, `_tickets`
Replies are called with the lock held; they must only hand the answer over.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ..arena import Extent
from ..errors import (
    Draining,
    InvalidInput,
    TierUnavailable,
    TiffinError,
)
from ..eviction import make_policy
from ..names import check_name
from ..tiers.base import TierName
from ..tiers.dram import DramTier
from ..tiers.nvme import NvmeTier
from . import messages
from .adoption import adopt
from .core import KEY_BYTES, CoreOptions, NodeCore, split_keys
from .following import Watch, publish
from .headers import intact, sealed, united
from .inspector import Inspector
from .mover import Mover, extent_of
from .numbers import numbers_of
from .onesided import confirm, not_offered
from .records import Erase, Move, MoveOutcome, Pin, Reason, Replica, Session, Ticket
from .shared import share_of
from .space import TierSpace
from .transfers import Transfer, Transfers

if TYPE_CHECKING:
    import contextlib
    from collections.abc import Callable, Iterable
    from pathlib import Path

    from tiffin.messenger.local import ByteArray

    from .events import Events

    ReplyTo = Callable[[messages.AnyReply], None]

log = logging.getLogger(__name__)

# How often reservations, pins and watermarks are looked at when nothing else happens. Deadlines of
# parked requests wake the ticker exactly.
TICK_S = 0.25

# Per client. A lease covers a whole prompt, so an engine holds one per running request, hundreds at
# most; one that waits is a request that nobody serves yet.
LEASES_MAX = 4096
WAITING_MAX = 256


@dataclass(frozen=True, slots=True)
class NodeOptions:
    """What an operator chooses when starting a node.

    `flush_s`: how long `close` may write back to NVMe what is only in DRAM; 0 leaves it.
    """

    dram_bytes: int
    nvme_path: Path | None = None
    nvme_bytes: int = 0
    policy: str = "lru"
    hugepages: bool = False
    prefault: bool = True
    nvme_queue_depth: int = 4
    flush_s: float = 30.0
    core: CoreOptions = field(default_factory=CoreOptions)


@dataclass(slots=True, eq=False)
class _Parked:
    """A request that waits for room. `attempt(final)` answers it and returns True, or returns False
    to wait on; with `final` it always answers."""

    session: Session
    deadline: float
    attempt: Callable[[bool], bool]


class Node:
    """A running node. Raises InvalidInput for a name and options that cannot work, TierUnavailable
    when a tier's memory or disk is not to be had."""

    def __init__(self, options: NodeOptions, *, name: str = "node") -> None:
        self.options = options
        self.name = check_name(name)
        self.started_at = time.time()
        self.draining = False
        # More for `statistics`, by whoever puts the node to use.
        self.extra_numbers: dict[str, Callable[[], Any]] = {}
        # Called, under the lock, with a key that a remote reader did not find here.
        self.on_remote_miss: Callable[[bytes], None] | None = None
        self._snapshot = (0, b"", b"")  # the inventory that is being read, page by page
        policy = make_policy(options.policy)
        self.dram = DramTier(
            options.dram_bytes, hugepages=options.hugepages, prefault=options.prefault
        )
        self.nvme = self._open_nvme(options)
        nvme_space = None
        if self.nvme is not None:
            nvme_space = TierSpace(TierName.NVME, self.nvme.arena, make_policy(options.policy))
        self.core = NodeCore(
            TierSpace(TierName.DRAM, self.dram.arena, policy),
            nvme_space,
            options.core,
            # Grows across restarts without having been written down anywhere.
            first_generation=time.time_ns(),
        )
        self._lock = threading.RLock()
        self._inspector = Inspector(self.core, self._lock, self._view, self._after, self.submit)
        self._transfers = Transfers(self.core, self._lock, self._view, self._after)
        self._handlers: dict[type, Callable[[Session, Any, ReplyTo], None]] = {
            messages.Match: self._match,
            messages.Exists: self._exists,
            messages.Reserve: self._reserve,
            messages.Commit: self._commit,
            messages.Abort: self._abort,
            messages.Lease: self._lease,
            messages.Publish: self._publish,
            messages.Await: self._await,
            messages.Release: self._release,
            messages.Report: self._inspector.report,
            messages.Pin: self._pin,
            messages.Remove: self._remove,
            messages.Statistics: self._statistics,
            messages.Inventory: self._inventory,
            messages.Events: self._events,
            messages.Drain: self._drain,
            messages.Describe: not_offered,
            messages.Confirm: confirm,
        }
        self._parked: deque[_Parked] = deque()
        self._tickets: dict[Ticket, tuple[float, int, ReplyTo]] = {}
        self._closed = threading.Event()
        self._still = threading.Event()  # set when the last move has ended
        self._hurry = threading.Event()
        self._mover: Mover | None = None
        if self.nvme is not None:
            adopt(self.core.residency, self.nvme)
            self._mover = Mover(self.dram, self.nvme, self._moved)
        self._ticker = threading.Thread(target=self._tick_forever, name="tiffin-tick", daemon=True)
        self._ticker.start()

    def _open_nvme(self, options: NodeOptions) -> NvmeTier | None:
        if options.nvme_path is None:
            return None
        try:
            return NvmeTier(
                options.nvme_path, options.nvme_bytes, queue_depth=options.nvme_queue_depth
            )
        except TiffinError:
            self.dram.close()
            raise

    # -- the door --------------------------------------------------------------------------------

    def handle(
        self, kind: type[messages.Request], handler: Callable[[Session, Any, ReplyTo], None]
    ) -> None:
        """Answer requests of this kind with `handler`, called under the lock: it must not wait."""
        self._handlers[kind] = handler

    def connect(self, name: str, pid: int, *, remote: bool = False) -> Session:
        """Open a session for a client. A `remote` one moves bytes by `transfer` only."""
        with self._lock:
            return self.core.connect(name, pid, remote=remote)

    def submit(self, session: Session, request: messages.Request, reply: ReplyTo) -> None:
        """Carry out one request of a session; thread-safe. Exactly one reply per request."""
        with self._lock:
            try:
                if self._inspector.postpones(session, request, reply):
                    return
                handler = self._handlers.get(type(request))
                if handler is None:
                    raise InvalidInput(f"{type(request).__name__} is not a request for a node")
                handler(session, request, reply)
            except TiffinError as error:
                reply(messages.refusal(request.id, error))
            self._after()

    def disconnect(self, session: Session, *, fenced: bool) -> bool:
        """The session's connection ended; `fenced` if it touches the region no more. Returns
        whether nothing is left of it; if not, `fence` is to follow."""
        with self._lock:
            session.gone = True  # so that settling its tickets grants nothing any more
            self._inspector.forget(session)
            self._parked = deque(p for p in self._parked if p.session is not session)
            for ticket in [t for t in self._tickets if t.session is session]:
                del self._tickets[ticket]
                self.core.settle(ticket, _now())
            ended = self.core.disconnect(session, fenced=fenced)
            self._after()
            return ended

    def transfer(
        self, session: Session, lease_id: int, *, writes: bool
    ) -> contextlib.AbstractContextManager[list[ByteArray]]:
        """The extents of a lease, in order, which stay what they are until the context ends, even
        if the lease does not; of one that follows writers, what it awaited last. Raises GrantError
        if the session holds no such lease."""
        return Transfer(self._transfers, session, lease_id, writes=writes)

    def give_back(self, session: Session, lease_ids: Iterable[int]) -> None:
        """End those of a remote session's leases that it still has."""
        with self._lock:
            self.core.give_back(session, lease_ids)
            self._after()

    def events_since(self, seq: int, limit: int) -> Events | None:
        """What was added and removed after event `seq`; None if that was forgotten. Thread-safe."""
        with self._lock:
            return self.core.residency.events.since(seq, limit)

    def inventory(self) -> tuple[int, bytes]:
        """The number of the last event, and the keys of all that is resident, joined."""
        with self._lock:
            return self.core.residency.events.seq, b"".join(self.core.index)

    def pinned_keys(self) -> list[bytes]:
        """The keys of all pinned blocks. Thread-safe."""
        with self._lock:
            return list(self.core.residency.pins)

    def held(self) -> contextlib.AbstractContextManager[object]:
        """A context in which nothing changes: keep it short, everybody waits."""
        return self._lock

    def match(self, keys: bytes) -> bytes:
        """One byte per leading resident block of the joined `keys`. Thread-safe."""
        with self._lock:
            return self.core.match(keys)

    def exists(self, keys: bytes) -> bytes:
        """One byte per key of the joined `keys`: 1 if the block is here. Thread-safe."""
        with self._lock:
            return self.core.exists(keys)

    def fence(self, session: Session) -> None:
        """The process behind a broken connection is dead."""
        with self._lock:
            self.core.fence(session)
            self._after()

    def close(self) -> None:
        """Write back to NVMe for up to `flush_s`, stop the threads, close the tiers.

        Parked requests are not answered.
        """
        if self._closed.is_set():
            return
        self._flush()
        self._closed.set()
        self._hurry.set()
        self._ticker.join()
        self._inspector.close()
        if self._mover is not None:
            self._mover.close()
        if self.nvme is not None:
            self.nvme.close()
        self.dram.close()

    def _flush(self) -> None:
        if self.nvme is None or self.options.flush_s <= 0:
            return
        with self._lock:
            blocks = self.core.flush()
            self._act()
            self._still.clear()
            if not self.core.residency.moves:
                return
        log.info("writing %d blocks back to NVMe", blocks)
        if not self._still.wait(self.options.flush_s):
            log.warning("not all blocks were written back within %.0f s", self.options.flush_s)

    def check(self) -> None:
        """Assert every invariant of the core; for tests."""
        with self._lock:
            self.core.check()

    # -- requests --------------------------------------------------------------------------------

    def _match(self, session: Session, request: messages.Match, reply: ReplyTo) -> None:
        reply(messages.Flags(request.id, self.core.match(request.keys)))

    def _exists(self, session: Session, request: messages.Exists, reply: ReplyTo) -> None:
        reply(messages.Flags(request.id, self.core.exists(request.keys)))

    def _reserve(self, session: Session, request: messages.Reserve, reply: ReplyTo) -> None:
        self._check_limits(session)
        if self.draining:
            raise Draining(f"node {self.name} is being drained; put to another")
        capacity = self.dram.arena.capacity_bytes
        if not 0 < request.extent_bytes <= capacity:
            raise InvalidInput(
                f"a block of {request.extent_bytes} bytes with its header does not fit a DRAM "
                f"tier of {capacity} bytes"
            )
        keys = split_keys(request.keys)
        share = share_of(request.rank, request.ranks, request.owned)

        def attempt(final: bool) -> bool:
            try:
                made = self.core.reserve(
                    session,
                    keys,
                    request.parent,
                    request.depth,
                    request.extent_bytes,
                    _now(),
                    share,
                )
            except InvalidInput as error:  # a parked one is tried in somebody else's call
                reply(messages.refusal(request.id, error))
                return True
            if made.reason is Reason.NO_ROOM and not made.statuses and not final:
                return False
            replicas = made.lease.replicas if made.lease else []
            reply(
                messages.Reserved(
                    request.id,
                    made.statuses,
                    int(made.reason),
                    made.lease.id if made.lease else 0,
                    [replica.offset for replica in replicas],
                    [replica.generation for replica in replicas],
                )
            )
            return True

        self._attempt(session, request.timeout_s, attempt)

    def _commit(self, session: Session, request: messages.Commit, reply: ReplyTo) -> None:
        lease = self.core.write_lease(session, request.lease)
        skip = set(request.skip)
        if lease.rank is None:
            good = [
                position not in skip and self._intact(replica)
                for position, replica in enumerate(lease.replicas)
            ]
        else:
            shared = self.core.residency.shared
            good = united(lease, skip, request.headers, shared, self._view)
        kept = self.core.commit(lease, good)
        self.core.residency.trim(self.options.core.high_watermark, self.options.core.low_watermark)
        reply(messages.Flags(request.id, kept))

    def _intact(self, replica: Replica) -> bool:
        return intact(replica, self._view)

    def _view(self, replica: Replica) -> ByteArray:
        return self.dram.view(extent_of(replica))

    def _abort(self, session: Session, request: messages.Abort, reply: ReplyTo) -> None:
        self.core.abort(session, request.lease)
        reply(messages.Done(request.id))

    def _lease(self, session: Session, request: messages.Lease, reply: ReplyTo) -> None:
        self._check_limits(session)
        ticket = self.core.lease(session, split_keys(request.keys), follows=request.follow)
        if ticket.ready or request.timeout_s <= 0:
            self._grant(ticket, request.id, reply)
        else:
            self._tickets[ticket] = _now() + request.timeout_s, request.id, reply
            self._hurry.set()

    def _settle(self, ticket: Ticket) -> None:
        """Answer a read request that waited with what is there now."""
        _, request_id, reply = self._tickets.pop(ticket)
        self._grant(ticket, request_id, reply)

    def _grant(self, ticket: Ticket, request_id: int, reply: ReplyTo) -> None:
        lease, reason = self.core.settle(ticket, _now())
        replicas = lease.replicas if lease else []
        reply(
            messages.Leased(
                request_id,
                int(reason),
                lease.id if lease else 0,
                [replica.offset for replica in replicas],
                [replica.generation for replica in replicas],
                [replica.length for replica in replicas] if ticket.session.remote else [],
            )
        )
        if ticket.session.remote and reason is Reason.MISS and self.on_remote_miss is not None:
            self.on_remote_miss(ticket.keys[len(replicas)])

    def _publish(self, session: Session, request: messages.Publish, reply: ReplyTo) -> None:
        reply(messages.Done(request.id, publish(self.core, session, request)))

    def _await(self, session: Session, request: messages.Await, reply: ReplyTo) -> None:
        self._check_waiting(session)
        watch = Watch(self.core, session, request)
        self.core.renew(session.leases[request.lease], _now() + request.timeout_s)

        def attempt(final: bool) -> bool:
            try:
                answer = watch.look(_now(), lambda r: sealed(r, self._view), final=final)
            except TiffinError as error:  # it may be tried in somebody else's call
                reply(messages.refusal(request.id, error))
                return True
            if answer is None:
                return False
            reply(answer)
            return True

        self._attempt(session, request.timeout_s, attempt)

    def _release(self, session: Session, request: messages.Release, reply: ReplyTo) -> None:
        self.core.release(session, request.lease)
        reply(messages.Done(request.id, 1))

    def _pin(self, session: Session, request: messages.Pin, reply: ReplyTo) -> None:
        until = _now() + request.ttl_s
        count = self.core.pin(split_keys(request.keys), Pin(request.level), until)
        reply(messages.Done(request.id, count))

    def _remove(self, session: Session, request: messages.Remove, reply: ReplyTo) -> None:
        reply(messages.Done(request.id, self.core.remove(split_keys(request.keys))))

    def _statistics(self, session: Session, request: messages.Statistics, reply: ReplyTo) -> None:
        reply(messages.Numbers(request.id, self.statistics()))

    def _inventory(self, session: Session, request: messages.Inventory, reply: ReplyTo) -> None:
        if request.after == 0:
            self._snapshot = *self.inventory(), self.core.tiers()
        seq, keys, tiers = self._snapshot
        begin = request.after * KEY_BYTES
        end = begin + messages.INVENTORY_KEYS * KEY_BYTES
        of_page = tiers[request.after : request.after + messages.INVENTORY_KEYS]
        reply(messages.KeyPage(request.id, seq, keys[begin:end], end < len(keys), of_page))

    def _events(self, session: Session, request: messages.Events, reply: ReplyTo) -> None:
        reply(self.core.residency.events.page(request))

    def _drain(self, session: Session, request: messages.Drain, reply: ReplyTo) -> None:
        self.draining = request.on
        reply(messages.Done(request.id))

    def _check_limits(self, session: Session) -> None:
        """One client must not fill the node's tables. Raises InvalidInput."""
        if len(session.leases) + len(session.zombies) >= LEASES_MAX:
            raise InvalidInput(f"this client holds {LEASES_MAX} leases; release some")
        self._check_waiting(session)

    def _check_waiting(self, session: Session) -> None:
        if not (self._parked or self._tickets):
            return
        waiting = sum(parked.session is session for parked in self._parked)
        waiting += sum(ticket.session is session for ticket in self._tickets)
        if waiting >= WAITING_MAX:
            raise InvalidInput(f"{WAITING_MAX} requests of this client wait already")

    # -- waiting ---------------------------------------------------------------------------------

    def _attempt(self, session: Session, timeout_s: float, attempt: Callable[[bool], bool]) -> None:
        """Try now; park if time could help.

        Whether time could help is asked after the try: a failed one may itself have begun the
        demotions that are worth waiting for. Those who wait are tried in the order they came, but
        one that cannot be served yet does not stop those behind it: what it waits for may take
        as long as somebody's lease.
        """
        if timeout_s <= 0:
            attempt(True)
        elif not attempt(False):
            if self.core.worth_waiting():
                self._park(session, timeout_s, attempt)
            else:
                attempt(True)

    def _park(self, session: Session, timeout_s: float, attempt: Callable[[bool], bool]) -> None:
        self._parked.append(_Parked(session, _now() + timeout_s, attempt))
        self._hurry.set()

    def _after(self) -> None:
        """Do what the core ordered, then let waiting requests go on: readers before writers."""
        if not (self.core.residency.actions or self._tickets or self._parked):
            return
        self._act()
        for ticket in [ticket for ticket in self._tickets if ticket.blocked]:
            self.core.advance(ticket)
            self._act()
            if ticket.ready or not self.core.worth_advancing(ticket):
                self._settle(ticket)
        for parked in list(self._parked):
            if parked.attempt(not self.core.worth_waiting()):
                self._parked.remove(parked)
            self._act()

    def _act(self) -> None:
        ordered = self.core.residency.actions
        batch = ordered.copy()
        ordered.clear()
        for action in batch:
            if isinstance(action, Erase):
                self._erase(action)
            else:
                assert self._mover is not None
                self._mover.submit(action)

    def _erase(self, action: Erase) -> None:
        assert self.nvme is not None
        try:
            self.nvme.erase(Extent(action.offset, action.length))
        except TierUnavailable as error:
            # Harmless: a restart may find the block again, and its bytes are still right.
            log.warning("could not mark an NVMe extent as free: %s", error)

    def _moved(self, move: Move, outcome: MoveOutcome) -> None:
        with self._lock:
            for ticket in self.core.moved(move, outcome):
                self._settle(ticket)
            self._after()
            if not self.core.residency.moves:
                self._still.set()

    def _tick_forever(self) -> None:
        while not self._closed.is_set():
            timeout_s = TICK_S
            try:
                with self._lock:
                    timeout_s = self._tick(_now())
            except Exception:
                log.exception("a tick failed unexpectedly")
            self._hurry.wait(timeout_s)
            self._hurry.clear()

    def _tick(self, now: float) -> float:
        """Expire what is due; returns seconds until the next deadline, at most TICK_S."""
        self.core.tick(now)
        for parked in [p for p in self._parked if p.deadline <= now]:
            self._parked.remove(parked)
            parked.attempt(True)
        for ticket in [t for t, waiting in self._tickets.items() if waiting[0] <= now]:
            self._settle(ticket)
        self._after()
        deadlines = [p.deadline for p in self._parked] + [t[0] for t in self._tickets.values()]
        return max(0.0, min(TICK_S, min(deadlines, default=math.inf) - now))

    # -- looking ---------------------------------------------------------------------------------

    def statistics(self) -> dict[str, Any]:
        """Plain nested numbers: tiers, counters, sessions. The shape of `tiffin status --json`."""
        with self._lock:
            return numbers_of(
                self,
                waiting_requests=len(self._parked) + len(self._tickets),
                queued_moves=self._mover.queued if self._mover else 0,
            )


def _now() -> float:
    return time.monotonic()


__all__ = ["Node", "NodeOptions"]
