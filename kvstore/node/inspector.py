"""Looks at blocks that readers say are damaged: one after the other, without the node's lock, and
of each client in turn, so that nobody waits for all that another one reports.

A large block takes milliseconds to hash, and a reader that is wrong (its own memory, its network
card) may report every block it reads. Nobody else waits for that: the extent is held as for a
reader, the lock is let go of meanwhile, and the verdict counts only for the generation that was
looked at. What the same client asks for next waits until its reports are decided: it computes the
block again and puts it, and must not be told that the damaged one is here already. What is about a
lease that it has does not wait: a release that was refused would leave the lease held for good.
"""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict, deque
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from ..block import BlockState
from ..errors import CorruptBlock, InvalidInput, NodeUnavailable, VersionMismatch
from . import messages
from .mover import verify_block

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager

    from tiffin.messenger.local import ByteArray

    from .core import NodeCore
    from .records import Replica, Session

    ReplyTo = Callable[[messages.AnyReply], None]

log = logging.getLogger(__name__)

# Each keeps an extent from eviction. At 4 MiB a block and 5 GB/s they are a fifth of a second.
WAITING_MAX = 256
# Of these, of one client: its own requests wait for them. As many blocks as a prompt of 32,768
# tokens has.
CLIENT_REPORTS_MAX = 64
# Requests of one client behind its reports, as many as may wait for room (`node.WAITING_MAX`).
BEHIND_MAX = 256
# Never behind reports: these give back, or go on with, what was granted before, and nobody repeats
# a release that was refused. All five, so that they keep their order.
_OF_A_LEASE = (
    messages.Release,
    messages.Abort,
    messages.Commit,
    messages.Publish,
    messages.Await,
)


class _Report(NamedTuple):
    """One block to look at, and who waits for the verdict."""

    replica: Replica
    session: Session
    request: messages.Report
    reply: ReplyTo


@dataclass(slots=True)
class _Behind:
    """What waits for a client's `reports` to be decided, in the order it came."""

    reports: int = 0
    requests: list[tuple[messages.Request, ReplyTo]] = field(default_factory=list)


class _Turns:
    """Reports that wait: of each client in the order they came, one in its turn."""

    def __init__(self) -> None:
        self.waiting = 0
        self._queues: OrderedDict[Session, deque[_Report]] = OrderedDict()

    def add(self, report: _Report) -> None:
        """A client that has none yet comes after those that have."""
        self._queues.setdefault(report.session, deque()).append(report)
        self.waiting += 1

    def take(self) -> _Report:
        """The next one. There must be one."""
        session, queue = self._queues.popitem(last=False)
        report = queue.popleft()
        if queue:
            self._queues[session] = queue
        self.waiting -= 1
        return report


class Inspector:
    """A thread over the clients' reports.

    `lock` is the node's, which protects `core` and what waits here; `view` gives the bytes of a
    replica that is held; `settle` does, under the lock, what the core ordered; `submit` is the
    node's door.
    """

    def __init__(
        self,
        core: NodeCore,
        lock: AbstractContextManager[object],
        view: Callable[[Replica], ByteArray],
        settle: Callable[[], None],
        submit: Callable[[Session, messages.Request, ReplyTo], None],
    ) -> None:
        self._core = core
        self._lock = lock
        self._view = view
        self._settle = settle
        self._submit = submit
        self._behind: dict[Session, _Behind] = {}
        self._turns = _Turns()
        self._wake = threading.Condition()
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="tiffin-inspector", daemon=True)
        self._thread.start()

    def report(self, session: Session, request: messages.Report, reply: ReplyTo) -> None:
        """Answer a report, called under the lock: at once if that generation is not in DRAM, else
        when the block was looked at. Raises NodeUnavailable while too many reports wait."""
        block = self._core.index.get(request.key)
        replica = block.dram if block is not None else None
        if replica is None or replica.generation != request.generation:
            reply(messages.Done(request.id, 0))
            return
        behind = self._behind.get(session, _Behind())
        if self._turns.waiting >= WAITING_MAX or behind.reports >= CLIENT_REPORTS_MAX:
            raise NodeUnavailable(
                f"{self._turns.waiting} reports of damage wait already; report it when it is read "
                "again"
            )
        behind.reports += 1
        self._behind[session] = behind
        self._core.residency.hold(replica)
        with self._wake:
            self._turns.add(_Report(replica, session, request, reply))
            self._wake.notify()

    def postpones(self, session: Session, request: messages.Request, reply: ReplyTo) -> bool:
        """Whether this request waits for reports of its client, called under the lock; it is
        submitted again behind them. What is about a lease that the client has does not wait.
        Raises InvalidInput while too many wait."""
        behind = self._behind.get(session)
        if behind is None or isinstance(request, (messages.Report, *_OF_A_LEASE)):
            return False
        if len(behind.requests) >= BEHIND_MAX:
            raise InvalidInput(f"{BEHIND_MAX} requests of this client wait for its reports already")
        behind.requests.append((request, reply))
        return True

    def forget(self, session: Session) -> None:
        """The client has gone, called under the lock: what it asked for is not done any more."""
        behind = self._behind.get(session)
        if behind is not None:
            behind.requests.clear()

    def close(self) -> None:
        """Let the look under way end, and forget the other reports."""
        with self._wake:
            self._closed = True
            self._wake.notify_all()
        self._thread.join()

    def _run(self) -> None:
        while (report := self._next()) is not None:
            damaged = self._is_damaged(report.replica)
            try:
                self._decide(report, damaged)
            except Exception:
                log.exception("a report of damage failed unexpectedly")

    def _decide(self, report: _Report, damaged: bool) -> None:
        with self._lock, ExitStack() as at_last:
            # Done from the last to the first, whatever fails: the client waits for it.
            at_last.callback(self._go_on, report.session)
            at_last.callback(self._settle)
            at_last.callback(self._core.residency.unhold, report.replica)
            report.reply(self._verdict(report.request, damaged))

    def _verdict(self, request: messages.Report, damaged: bool) -> messages.AnyReply:
        try:
            if damaged:
                self._core.condemn(request.key, request.generation)
        except Exception:
            log.exception("dropping a damaged block failed unexpectedly")
            error = NodeUnavailable("the block could not be dropped; the node's log says why")
            return messages.refusal(request.id, error)
        return messages.Done(request.id, int(damaged))

    def _go_on(self, session: Session) -> None:
        behind = self._behind[session]
        behind.reports -= 1
        if not behind.reports:
            del self._behind[session]
            for request, reply in behind.requests:
                try:
                    self._submit(session, request, reply)
                except Exception:
                    log.exception("a request behind a report of damage failed unexpectedly")

    def _next(self) -> _Report | None:
        with self._wake:
            self._wake.wait_for(lambda: self._turns.waiting or self._closed)
            return None if self._closed else self._turns.take()

    def _is_damaged(self, replica: Replica) -> bool:
        # One that has left meanwhile, perhaps for an earlier report, is not found by readers.
        if replica.state is BlockState.QUARANTINED:
            return False
        try:
            verify_block(self._view(replica), replica)
        except (CorruptBlock, VersionMismatch) as error:
            # Its text alone: the error would keep its frames, and with them views of the region.
            log.warning("dropping a block that a reader found damaged: %s", str(error))
            return True
        except Exception:
            log.exception("looking at a block failed unexpectedly; it is dropped")
            return True
        return False
