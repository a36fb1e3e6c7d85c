"""One node: the core, its tiers, and the threads that move bytes between them.

`submit(session, request, reply)` is the only entry point: an embedded client calls it directly, the
socket servers call it for each frame. It answers at once, or parks the request and answers when a
lease or a move ends, or at the request's deadline. Callers whose thread may be interrupted by a
signal handler that raises use `hand_in` instead, which runs the core in a separate thread.

Ownership:
  constant after construction   options, dram, nvme, core (the reference)
  protected by `_lock`          everything inside the core, `_parked`, `_tickets`
The node calls reply callbacks with the lock held; a callback must only hand the answer over.
"""

from __future__ import annotations

import contextlib
import logging
import math
import threading
import time
import uuid
from collections import deque
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from tiffin.messenger.signal_safe import SerialThread, interruptible, uninterrupted

from ..after_fork import OfOneProcess
from ..errors import (
    ClientClosed,
    Draining,
    InvalidInput,
    TierUnavailable,
    TiffinError,
)
from ..memory.arena import Extent
from ..memory.eviction import make_policy
from ..sizes import format_bytes
from ..text import check_name
from ..tiers.base import TierName
from ..tiers.dram import DramTier
from ..tiers.nvme import NvmeTier
from .announcements import Announcements
from .core import messages
from .core.commit_headers import intact, sealed, united
from .core.inventory_pages import Inventories, State
from .core.node_core import NodeCore, split_keys
from .core.precommit_reads import Watch, publish
from .core.records import Erase, Move, MoveOutcome, PinLevel, Reason, Replica, Session, Ticket, Wipe
from .core.removal_memory import SLACK_S
from .core.sharded_writes import share_of
from .core.tier_ledger import TierSpace
from .eraser import Eraser, removed
from .inspector import Inspector
from .mover import Mover, extent_of
from .nixl_grants import confirm, not_offered
from .options import NodeOptions
from .recovery import adopt, survivors
from .remote_transfers import RemoteTransfer, RemoteTransfers
from .statistics import numbers_of

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Sequence

    from tiffin.messenger.shm.host_copy import ByteArray

    from .core.event_log import NodeEvents

    ReplyTo = Callable[[messages.AnyReply], None]

log = logging.getLogger(__name__)

# Interval at which the ticker thread checks reservations, pins and watermarks when nothing else
# happens. For deadlines of parked requests the ticker wakes exactly on time.
TICK_S = 0.25

# Limits per client. A lease covers a whole prompt, so an engine holds one per running request,
# hundreds at most; a waiting lease is a request that the engine does not serve yet.
LEASES_MAX = 4096
WAITING_MAX = 256


@dataclass(slots=True, eq=False)
class _Parked:
    """An in-flight request that waits, for free space for example. `attempt(final)` sends the
    reply and returns True, or returns False to keep waiting; with `final` it always replies.
    `for_others`: it waits for what another client may ask, not only for what is going on."""

    session: Session
    deadline: float
    attempt: Callable[[bool], bool]
    reply: ReplyTo
    for_others: bool = False


class Node(OfOneProcess):
    """A running node. Raises InvalidInput for a name and options that cannot work, TierUnavailable
    when the memory or disk of a tier is not available."""

    def __init__(
        self, options: NodeOptions, *, name: str = "node", awaits_peers: bool = False
    ) -> None:
        """`awaits_peers`: before `catch_up` tells what was removed from the pool while the node was
        away, it serves nothing from NVMe and takes no copies."""
        self.options = options
        self._awaits_peers, self._caught_up = awaits_peers, False
        self.name = check_name(name)
        self.started_at = time.time()
        self.draining = False
        # Further entries for `statistics`, added by the code that runs the node.
        self.extra_numbers: dict[str, Callable[[], Any]] = {}
        # Callback, called under the lock with a key that a remote reader did not find on this node.
        self.on_remote_miss: Callable[[bytes], None] | None = None
        self._lock = threading.RLock()
        self._parked: deque[_Parked] = deque()
        self._tickets: dict[Ticket, tuple[float, int, ReplyTo]] = {}
        # Runs requests for the main thread of a process that embeds the node; started on first use.
        self.core_thread = SerialThread("tiffin-core")
        self._closing = threading.Lock()
        self._closed = threading.Event()
        self._still = threading.Event()  # set when the last move has ended
        self._hurry = threading.Event()
        with contextlib.ExitStack() as opened:  # on any error, everything opened is closed again
            self._open(opened)
            self._opened = opened.pop_all()

    def _open(self, opened: contextlib.ExitStack) -> None:
        """Open the tiers, the core over them, and the threads; `opened` closes what was started."""
        options = self.options
        dram_policy, nvme_policy = (make_policy(options.policy) for _ in range(2))
        self.dram = DramTier(
            options.dram_bytes, hugepages=options.hugepages, prefault=options.prefault
        )
        opened.callback(self.dram.close)
        self.nvme = None
        nvme_space = None
        if options.nvme_path is not None:
            self.nvme = NvmeTier(
                options.nvme_path, options.nvme_bytes, queue_depth=options.nvme_queue_depth
            )
            opened.callback(self.nvme.close)
            nvme_space = TierSpace(TierName.NVME, self.nvme.arena, nvme_policy)
        self.core = NodeCore(
            TierSpace(TierName.DRAM, self.dram.arena, dram_policy),
            nvme_space,
            options.core,
            # Generations grow across restarts without being stored on disk.
            first_generation=time.time_ns(),
        )
        self._transfers = RemoteTransfers(self.core, self._lock, self._view, self._after)
        events = self.core.residency.events
        self._inventories = Inventories(
            lambda: State(*self.inventory(), self.core.tiers()), lambda: events.seq
        )
        self._mover = self._eraser = None
        self.slab = uuid.uuid4().bytes  # names what is on NVMe, or this life of a node without
        self.core.takes_copies = not self._awaits_peers
        if self.nvme is not None:
            self.slab = self.nvme.identity
            if self._awaits_peers:
                self.core.residency.space(TierName.NVME).writable = False
            else:
                adopt(self.core.residency, survivors(self.nvme))
            self._eraser = Eraser(self.nvme, self._wiped)
            opened.callback(self._eraser.close)
            self._mover = Mover(self.dram, self.nvme, self._moved)
            opened.callback(self._mover.close)
        self.announcements = Announcements()
        self._inspector = Inspector(self.core, self._lock, self._view, self._after, self.submit)
        opened.callback(self._inspector.close)
        self._handlers = self._handlers_of_requests()
        self._ticker = threading.Thread(target=self._tick_forever, name="tiffin-tick", daemon=True)
        self._ticker.start()
        opened.callback(self._stop_ticking)
        opened.callback(self.core_thread.close)

    def _handlers_of_requests(self) -> dict[type, Callable[[Session, Any, ReplyTo], None]]:
        return {
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
            messages.Announce: self.announcements.announce,
            messages.Spaces: self.announcements.page,
            messages.Describe: not_offered,
            messages.Confirm: confirm,
        }

    # -- the door --------------------------------------------------------------------------------

    def handle(
        self, kind: type[messages.Request], handler: Callable[[Session, Any, ReplyTo], None]
    ) -> None:
        """Register `handler` for requests of this kind. It is called under the lock and must not
        block."""
        self._handlers[kind] = handler

    def connect(self, name: str, pid: int, *, remote: bool = False) -> Session:
        """Open a session for a client. A `remote` session moves bytes by `transfer` only."""
        with self._lock:
            return self.core.connect(name, pid, remote=remote)

    def hand_in(
        self, session: Session, request: messages.Request, reply: ReplyTo, *, waits: bool = False
    ) -> None:
        """As `submit`, but safe in the main thread, where signal handlers may raise: there, the
        thread `core_thread` runs a request that changes anything, in submission order. With `waits`
        this call returns when `submit` has run; otherwise it returns at once. A caller that has the
        node's lock (`held`) runs the request in its own thread."""
        submit = partial(self.submit, session, request, reply)
        if not interruptible() or self._lock._is_owned():  # type: ignore[attr-defined]
            submit()
        elif _only_looks(request):
            self.submit(session, request, reply, only_looks=True)
        elif waits:
            uninterrupted(submit, within=self.core_thread)
        else:
            self.core_thread.put(submit)

    def submit(
        self,
        session: Session,
        request: messages.Request,
        reply: ReplyTo,
        *,
        only_looks: bool = False,
    ) -> None:
        """Carry out one request of a session; thread-safe. Exactly one reply per request.
        `only_looks`: it changes nothing, so nothing is done after it."""
        with self._lock:
            try:
                if session.gone:
                    raise ClientClosed("this session has ended")
                if self._inspector.postpones(session, request, reply):
                    return
                handler = self._handlers.get(type(request))
                if handler is None:
                    raise InvalidInput(f"{type(request).__name__} is not a request for a node")
                handler(session, request, reply)
            except TiffinError as error:
                reply(messages.refusal(request.id, error))
            if not only_looks:
                self._after()

    def disconnect(self, session: Session, *, fenced: bool) -> bool:
        """End a session whose connection ended; `fenced` if its client no longer accesses the
        region. Returns whether the session has ended; if not, the caller must call `fence` later.
        """
        with self._lock:
            session.gone = True  # so that settling its tickets grants nothing any more
            self._inspector.forget(session)
            self._inventories.forget(session)
            self.announcements.forget(session)
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
        """The extents of a lease, in order. They are neither evicted nor reused until the context
        ends, even if the lease ends earlier. For a lease that follows writers: the byte ranges
        that its last `Await` exposed. Raises GrantError if the session holds no such lease."""
        return RemoteTransfer(self._transfers, session, lease_id, writes=writes)

    def withdraw(self, session: Session, replies: Collection[ReplyTo]) -> None:
        """Forget the session's requests that wait and whose reply goes to one of `replies`: nobody
        waits for it any more."""
        with self._lock:
            self._parked = deque(
                p for p in self._parked if p.session is not session or p.reply not in replies
            )
            for ticket, (_, _, reply) in list(self._tickets.items()):
                if ticket.session is session and reply in replies:
                    del self._tickets[ticket]
                    lease, _ = self.core.settle(ticket, _now())
                    self.core.give_back(session, [lease.id] if lease else [])

    def give_back(self, session: Session, lease_ids: Iterable[int]) -> None:
        """Release those of `lease_ids` that a session still holds: its client touches none."""
        with self._lock:
            self.core.give_back(session, lease_ids)
            self._after()

    def events_since(self, seq: int, limit: int) -> NodeEvents | None:
        """Blocks added and removed after event `seq`; None if the log no longer has these events.
        Thread-safe."""
        with self._lock:
            return self.core.residency.events.since(seq, limit)

    def inventory(self) -> tuple[int, bytes]:
        """The number of the last event, and the joined keys of all resident blocks."""
        with self._lock:
            return self.core.residency.events.seq, b"".join(self.core.index)

    def catch_up(self, told: Sequence[bytes], missed: Sequence[bytes], *, whole: bool) -> None:
        """Hear from the other nodes of the pool what was removed from it (`told`), and what of that
        this node may have missed while it was not in the pool (`missed`). Unless that is the
        `whole`, it forgets all blocks that it had before.

        A node that `awaits_peers` serves what is on NVMe from then on, and takes copies.
        """
        found = None
        if self._awaits_peers and self.nvme is not None:
            found = survivors(self.nvme)  # reads the disk, and may take a while
        with self._lock:
            # What was put since the start was not there when it was removed.
            had = list(self.core.index) if self._caught_up else []
            gone = list(missed)
            if found is not None:
                had = adopt(self.core.residency, found)
                log.info("%d blocks found in NVMe", len(had))
                gone += self.core.removal_log.keys()  # removed here since the start
            returned = set(had)
            removal = self.core.forget([k for k in gone if k in returned] if whole else had)
            if removal.blocks:
                log.info("%d blocks may have been removed from the pool meanwhile", removal.blocks)
            self.core.removal_log.learn(told, whole=whole)
            self.core.takes_copies = True
            self._awaits_peers, self._caught_up = False, True
            self._after()

    def removals(self, seen: Sequence[bytes] = (), seq: int = 0) -> int:
        """The number of the last removal. `seen`: slabs whose nodes were in the pool when it was
        `seq`. Thread-safe."""
        with self._lock:
            self.core.removal_log.saw(seen, seq)
            return self.core.removal_log.seq

    def pinned_keys(self) -> list[bytes]:
        """The keys of all pinned blocks. Thread-safe."""
        with self._lock:
            return list(self.core.residency.pins)

    def held(self) -> contextlib.AbstractContextManager[object]:
        """A context that holds the node's lock, so that no state changes. Keep it short: all other
        requests wait for it."""
        return self._lock

    def match(self, keys: bytes) -> bytes:
        """One byte per leading resident block of the joined `keys`. Thread-safe."""
        with self._lock:
            return self.core.match(keys)

    def exists(self, keys: bytes) -> bytes:
        """One byte per key of the joined `keys`: 1 if the block is resident. Thread-safe."""
        with self._lock:
            return self.core.exists(keys)

    def fence(self, session: Session) -> None:
        """Free the extents of a session whose connection broke, now that its process is dead."""
        with self._lock:
            self.core.fence(session)
            self._after()

    def close(self) -> None:
        """Write back to NVMe for up to `flush_s`, stop the threads, close the tiers.

        Parked requests get no reply.
        """
        uninterrupted(self._close)

    def _close(self) -> None:
        with self._closing:
            self._close_once()

    def _close_once(self) -> None:
        if self._closed.is_set():
            return
        try:
            self._flush()
        finally:
            self._opened.close()

    def _stop_ticking(self) -> None:
        self._closed.set()
        self._hurry.set()
        self._ticker.join()

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
        seen: tuple[int, int] | None = None

        def attempt(final: bool) -> bool:
            nonlocal seen
            before, seen = seen, self.core.changes()
            if seen == before and not final:
                return False
            flags = self.core.match(request.keys, writing=request.writing)
            if len(flags) < request.at_least and not final:
                return False
            reply(messages.Flags(request.id, flags))
            return True

        if request.timeout_s <= 0 or not request.at_least:
            attempt(True)
            return
        self._check_waiting(session)
        if not attempt(False):
            self._park(session, request.timeout_s, attempt, reply, for_others=True)

    def _exists(self, session: Session, request: messages.Exists, reply: ReplyTo) -> None:
        reply(messages.Flags(request.id, self.core.exists(request.keys)))

    def _reserve(self, session: Session, request: messages.Reserve, reply: ReplyTo) -> None:
        self._check_limits(session)
        if self.draining:
            raise Draining(f"node {self.name} is being drained; put to another")
        capacity = self.dram.arena.capacity_bytes
        if not 0 < request.extent_bytes <= capacity:
            raise InvalidInput(
                f"a block of {format_bytes(request.extent_bytes)} with its header does not fit a "
                f"DRAM tier of {format_bytes(capacity)}"
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
                    copy=request.copy,
                )
            except InvalidInput as error:  # a parked request is retried in another request's call
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

        self._attempt(session, request.timeout_s, attempt, reply)

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
        """Reply to a waiting read request with the blocks that are in DRAM now."""
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
            except TiffinError as error:  # this may be a retry in another request's call
                reply(messages.refusal(request.id, error))
                return True
            if answer is None:
                return False
            reply(answer)
            return True

        self._attempt(session, request.timeout_s, attempt, reply)

    def _release(self, session: Session, request: messages.Release, reply: ReplyTo) -> None:
        self.core.release(session, request.lease)
        reply(messages.Done(request.id, 1))

    def _pin(self, session: Session, request: messages.Pin, reply: ReplyTo) -> None:
        until = _now() + request.ttl_s
        count = self.core.pin(split_keys(request.keys), PinLevel(request.level), until)
        reply(messages.Done(request.id, count))

    def _remove(self, session: Session, request: messages.Remove, reply: ReplyTo) -> None:
        now = _now()
        over_at = now + request.timeout_s + SLACK_S
        removal = self.core.remove(split_keys(request.keys), now, over_at)

        def attempt(final: bool) -> bool:
            durable = self.core.residency.has_ended(removal)
            if durable or final:
                reply(removed(request.id, removal, durable=durable))
            return durable or final

        self._attempt(session, request.timeout_s, attempt, reply)

    def _statistics(self, session: Session, request: messages.Statistics, reply: ReplyTo) -> None:
        reply(messages.Numbers(request.id, self.statistics()))

    def _inventory(self, session: Session, request: messages.Inventory, reply: ReplyTo) -> None:
        reply(self._inventories.page(session, request, _now()))

    def _events(self, session: Session, request: messages.Events, reply: ReplyTo) -> None:
        log_of = self.core.removal_log if request.removals else self.core.residency.events
        reply(log_of.page(request))

    def _drain(self, session: Session, request: messages.Drain, reply: ReplyTo) -> None:
        self.draining = request.on
        reply(messages.Done(request.id))

    def _check_limits(self, session: Session) -> None:
        """Keep one client from filling the node's tables. Raises InvalidInput."""
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

    def _attempt(
        self,
        session: Session,
        timeout_s: float,
        attempt: Callable[[bool], bool],
        reply: ReplyTo,
    ) -> None:
        """Try now; park the request for later retries if waiting could help.

        The check whether waiting could help comes after the attempt: a failed attempt may itself
        have started the demotions that are worth waiting for. Parked requests are retried in
        arrival order, but a request that cannot be served yet does not block those behind it: it
        may wait as long as another client's lease lasts.
        """
        if timeout_s <= 0:
            attempt(True)
        elif not attempt(False):
            if self.core.worth_waiting():
                self._park(session, timeout_s, attempt, reply)
            else:
                attempt(True)

    def _park(
        self,
        session: Session,
        timeout_s: float,
        attempt: Callable[[bool], bool],
        reply: ReplyTo,
        *,
        for_others: bool = False,
    ) -> None:
        self._parked.append(_Parked(session, _now() + timeout_s, attempt, reply, for_others))
        self._hurry.set()

    def _after(self) -> None:
        """Carry out the core's actions, then retry waiting requests: readers before writers."""
        if not (self.core.residency.actions or self._tickets or self._parked):
            return
        self._act()
        for ticket in [ticket for ticket in self._tickets if ticket.blocked]:
            self.core.advance(ticket)
            self._act()
            if ticket.ready or not self.core.worth_advancing(ticket):
                self._settle(ticket)
        for parked in list(self._parked):
            if parked.attempt(not (parked.for_others or self.core.worth_waiting())):
                self._parked.remove(parked)
            self._act()

    def _act(self) -> None:
        ordered = self.core.residency.actions
        batch = ordered.copy()
        ordered.clear()
        for action in batch:
            if isinstance(action, Erase):
                self._erase(action)
            elif isinstance(action, Wipe):
                assert self._eraser is not None
                self._eraser.submit(action)
            else:
                assert self._mover is not None
                self._mover.submit(action)

    def _erase(self, action: Erase) -> None:
        assert self.nvme is not None
        try:
            self.nvme.erase(Extent(action.offset, action.length))
        except TierUnavailable as error:
            # A restarted node may find the block again, and its bytes are still correct.
            log.warning("could not mark an NVMe extent as free: %s", error)
            self.core.residency.erasing_failed()

    def _moved(self, move: Move, outcome: MoveOutcome) -> None:
        with self._lock:
            for ticket in self.core.moved(move, outcome):
                self._settle(ticket)
            self._after()
            if not self.core.residency.moves:
                self._still.set()

    def _wiped(self, wipes: Sequence[Wipe], failed: bool) -> None:
        with self._lock:
            self.core.residency.wiped(wipes, failed=failed)
            self._after()

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
        """Expire leases, pins and waiting requests that are due. Returns seconds until the next
        deadline, at most TICK_S; 0 if an eviction sweep for a waiting request was cut short."""
        self.core.tick(now)
        for parked in [p for p in self._parked if p.deadline <= now]:
            self._parked.remove(parked)
            parked.attempt(True)
        for ticket in [t for t, waiting in self._tickets.items() if waiting[0] <= now]:
            self._settle(ticket)
        cut_sweeps = self.core.residency.cut_sweeps
        self._after()
        if self.core.residency.cut_sweeps > cut_sweeps:
            return 0.0
        deadlines = [p.deadline for p in self._parked] + [t[0] for t in self._tickets.values()]
        return max(0.0, min(TICK_S, min(deadlines, default=math.inf) - now))

    # -- looking ---------------------------------------------------------------------------------

    def statistics(self) -> dict[str, Any]:
        """Nested plain values: tiers, counters, sessions. The shape of `tiffin status --json`."""
        with self._lock:
            return numbers_of(self.core, self.dram, self.nvme, self.started_at) | {
                "node": self.name,
                "policy": self.options.policy,
                "draining": self.draining,
                "key_spaces": self.announcements.numbers(),
                "waiting_requests": len(self._parked) + len(self._tickets),
                "queued_moves": self._mover.queued if self._mover else 0,
                **{name: numbers() for name, numbers in self.extra_numbers.items()},
            }


def _only_looks(request: messages.Request) -> bool:
    """Whether a request changes nothing, and is answered at once."""
    if isinstance(request, messages.Match):
        return not request.at_least
    return isinstance(request, messages.Exists)


def _now() -> float:
    return time.monotonic()


__all__ = ["Node", "NodeOptions"]
