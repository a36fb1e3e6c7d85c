"""Verifies blocks that readers report as damaged: one after the other, without the node's lock, and
from each client in turn, so that no client waits for all reports of another.

A large block takes milliseconds to hash, and a faulty reader (its own memory, its network card) may
report every block it reads. Requests of other clients do not wait for that: the extent is held as
for a reader, the lock is free during the verification, and the verdict counts only for the
generation that was verified. Further requests of the same client wait until its reports are
decided: it computes the block again and stores it, and the node must not answer that the damaged
block is resident already. Requests on a lease that the client has do not wait: a refused release
would leave the lease held for good.
"""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict, deque
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from ..errors import CorruptBlock, InvalidInput, NodeUnavailable, VersionMismatch
from ..format.header import BlockState
from .core import messages
from .mover import verify_block

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager

    from tiffin.messenger.shm.host_copy import ByteArray

    from .core.node_core import NodeCore
    from .core.records import Replica, Session

    ReplyTo = Callable[[messages.AnyReply], None]

log = logging.getLogger(__name__)

# Queued reports. Each keeps an extent from eviction. At 4 MiB a block and 5 GB/s the whole queue
# takes a fifth of a second.
WAITING_MAX = 256
# Queued reports of one client: its own requests wait for them. As many blocks as a prompt of 32,768
# tokens has.
CLIENT_REPORTS_MAX = 64
# Queued requests of one client behind its reports, as many as may wait for room
# (`node.WAITING_MAX`).
BEHIND_MAX = 256
# Requests that never wait behind reports: they end or continue an existing lease or reservation,
# and a client does not retry a refused release. All five, so that they keep their order.
_OF_A_LEASE = (
    messages.Release,
    messages.Abort,
    messages.Commit,
    messages.Publish,
    messages.Await,
)


class _Report(NamedTuple):
    """One block to verify, and the request that waits for the verdict."""

    replica: Replica
    session: Session
    request: messages.Report
    reply: ReplyTo


@dataclass(slots=True)
class _Behind:
    """A client's requests that wait until its `reports` are decided, in arrival order."""

    reports: int = 0
    requests: list[tuple[messages.Request, ReplyTo]] = field(default_factory=list)


class _Turns:
    """The queue of reports: round-robin over the clients, in arrival order for each client."""

    def __init__(self) -> None:
        self.waiting = 0
        self._queues: OrderedDict[Session, deque[_Report]] = OrderedDict()

    def add(self, report: _Report) -> None:
        """Queue a report. A client without queued reports takes its turn after all others."""
        self._queues.setdefault(report.session, deque()).append(report)
        self.waiting += 1

    def take(self) -> _Report:
        """Remove and return the next report. The queue must not be empty."""
        session, queue = self._queues.popitem(last=False)
        report = queue.popleft()
        if queue:
            self._queues[session] = queue
        self.waiting -= 1
        return report


class Inspector:
    """The thread that verifies reported blocks.

    `lock` is the node's, which protects `core` and the requests that wait here; `view` returns the
    bytes of a held replica; `settle` carries out the core's actions, under the lock; `submit` is
    the node's entry point.
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
        """Queue a report, called under the lock. The reply comes at once if that generation is not
        in DRAM, otherwise when the block was verified. Raises NodeUnavailable while too many
        reports wait."""
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
        """Whether this request must wait for reports of its client, called under the lock. If so,
        it is queued here and submitted again when the reports are decided. Requests on a lease that
        the client has do not wait. Raises InvalidInput while too many requests wait."""
        behind = self._behind.get(session)
        if behind is None or isinstance(request, (messages.Report, *_OF_A_LEASE)):
            return False
        if len(behind.requests) >= BEHIND_MAX:
            raise InvalidInput(f"{BEHIND_MAX} requests of this client wait for its reports already")
        behind.requests.append((request, reply))
        return True

    def forget(self, session: Session) -> None:
        """Drop the queued requests of a client that disconnected; called under the lock."""
        behind = self._behind.get(session)
        if behind is not None:
            behind.requests.clear()

    def close(self) -> None:
        """Wait for the verification in progress, and drop the queued reports."""
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
            # The callbacks run from the last to the first even if one fails: the client waits.
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
        # Readers no longer find a replica that was dropped meanwhile, perhaps by an earlier report.
        if replica.state is BlockState.QUARANTINED:
            return False
        try:
            verify_block(self._view(replica), replica)
        except (CorruptBlock, VersionMismatch) as error:
            # Log the text only: the error object would keep its frames, and so views of the region.
            log.warning("dropping a block that a reader found damaged: %s", str(error))
            return True
        except Exception:
            log.exception("looking at a block failed unexpectedly; it is dropped")
            return True
        return False
