"""Publishes a node's blocks to the directory: the thread that carries out the steps which
`publisher_core.py` decides.

The node never waits for the publisher. It logs its changes in its `EventLog`; a publisher that
can't keep up gets a gap, and starts over with the inventory.
"""

from __future__ import annotations

import logging
import threading
import time
from typing import TYPE_CHECKING, Protocol

from msgspec.structs import replace

from ..deadlines import until_s
from ..directory.base import check_keys, unreadable
from ..errors import TiffinError
from .core.publisher_core import (
    DOUBTS_MAX,
    Check,
    Heartbeat,
    Poll,
    PublisherCore,
    PublisherOptions,
    PublishStep,
    Register,
    TakeInventory,
    Wait,
    Withdraw,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from ..directory.base import Directory, NodeRecord
    from .core.event_log import NodeEvents
    from .core.publisher_core import Step

log = logging.getLogger(__name__)

# How often a node compares itself with all others: each of them reads all.
_LOOK_S = 30.0


class NodeFeed(Protocol):
    """The interface of a node for its publisher. Thread-safe, and quick: each method takes the
    node's lock."""

    def events_since(self, seq: int, limit: int) -> NodeEvents | None:
        """See `EventLog.since`."""
        ...

    def inventory(self) -> tuple[int, bytes]:
        """The number of the last event, and the keys of all blocks at that moment, joined."""
        ...

    def exists(self, keys: bytes) -> bytes:
        """One byte per key of the joined `keys`: 1 if the block is resident."""
        ...


def name_taken(own: NodeRecord, nodes: Iterable[NodeRecord]) -> str:
    """Which other node has the name of this one, or "". The same address or socket is this node's
    last run, whose registration has not expired yet. Pure."""
    place = own.host, own.socket
    others = (node for node in nodes if node.name == own.name and (node.host, node.socket) != place)
    found = sorted(node.address for node in others if node.address != own.address)
    if not found:
        return ""
    return (
        f"another node of this pool is called {own.name} too, at {', '.join(found)}: "
        "give each its own --name"
    )


class Publisher:
    """A thread that publishes one node. `close` withdraws the node; the directory stays open.

    `make_record` returns the node's current record; the publisher fills in number and start time.
    Errors of the directory are never raised: `healthy` is False after a request that failed.
    """

    def __init__(
        self,
        feed: NodeFeed,
        directory: Directory,
        make_record: Callable[[], NodeRecord],
        options: PublisherOptions | None = None,
    ) -> None:
        self._feed = feed
        self._directory = directory
        self._make_record = make_record
        self._started_at = time.time()
        self._core = PublisherCore(options)
        self._lock = threading.Lock()  # protects `_doubts`
        self._doubts: list[bytes] = []
        self._complained = False
        self._reason = ""
        self._look_at = 0.0
        self._wake = threading.Event()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="tiffin-publisher", daemon=True)

    @property
    def number(self) -> int:
        """The node's current number in the directory; 0 while it is not registered."""
        return self._core.number

    @property
    def healthy(self) -> bool:
        """Whether the directory answered the last request."""
        return self._core.healthy

    @property
    def lag(self) -> int:
        """Events that are not yet published."""
        return self._core.lag

    @property
    def reason(self) -> str:
        """Why other nodes and clients can't tell this node as it is meant, or ""."""
        return self._reason

    def start(self) -> None:
        """Register and start to publish, in the background."""
        self._thread.start()

    def close(self) -> None:
        """Stop, and withdraw the node if the directory answers. Idempotent."""
        self._closing.set()
        self._wake.set()
        if self._thread.ident is not None:
            self._thread.join()

    def not_mine(self, keys: Sequence[bytes]) -> None:
        """Report `keys` that the directory lists for this node and that a reader did not find here.

        The publisher corrects the directory unless the node has the blocks by then. More than
        `DOUBTS_MAX` at once are dropped. Raises InvalidInput for malformed keys. Thread-safe.
        """
        check_keys(keys, len(keys))
        with self._lock:
            self._doubts.extend(keys[: max(0, DOUBTS_MAX - len(self._doubts))])
        self._wake.set()

    def _run(self) -> None:
        while not self._closing.is_set():
            self._take_doubts()
            if self._complained and self._core.healthy:
                self._complained = False
                log.warning("publishing again")
            step = self._core.next(time.monotonic())
            if isinstance(step, Wait):
                self._wake.wait(min(until_s(step.until), 1.0))
                self._wake.clear()
                continue
            try:
                self._carry_out(step)
            except TiffinError as error:
                if not self._complained:
                    log.warning("not publishing for now: %s", error)
                self._failed()
            except Exception:  # the thread must not end: the node would not be published any more
                if not self._complained:
                    log.exception("publishing failed unexpectedly")
                self._failed()
        self._leave()

    def _failed(self) -> None:
        self._complained = True  # once per outage
        self._core.failed(time.monotonic())

    def _carry_out(self, step: Step) -> None:
        core, directory = self._core, self._directory
        match step:
            case Register():
                number = directory.register(self._record(0))
                core.registered(number, time.monotonic())
                log.info("registered as number %d", number)
                self._look_around(self._record(number))
            case Heartbeat(number):
                record = self._record(number)
                core.heard(directory.heartbeat(record), time.monotonic())
                self._look_around(record)
            case Withdraw(number):
                directory.withdraw(number)
                core.withdrawn()
            case PublishStep(number, added, removed, first_seq):
                directory.publish(number, added, removed, first_seq)
                core.published(time.monotonic())
            case Poll(seq, limit):
                core.polled(self._feed.events_since(seq, limit), time.monotonic())
            case TakeInventory():
                core.inventoried(*self._feed.inventory(), time.monotonic())
            case Check(keys):
                core.checked(keys, self._feed.exists(keys))

    def _look_around(self, own: NodeRecord) -> None:
        """Compare this node with the others of the pool, and say once what does not fit."""
        now = time.monotonic()
        if now < self._look_at and not self._reason:
            return
        self._look_at = now + _LOOK_S
        nodes = self._directory.nodes().values()
        reason = name_taken(own, nodes) or unreadable(self._directory.statistics(), own=1)
        if reason and reason != self._reason:
            log.warning("%s", reason)
        elif self._reason and not reason:
            log.warning("the pool and this node fit together again")
        self._reason = reason

    def _record(self, number: int) -> NodeRecord:
        return replace(self._make_record(), number=number, started_at=self._started_at)

    def _take_doubts(self) -> None:
        with self._lock:
            doubts, self._doubts = self._doubts, []
        if doubts:
            self._core.doubt(doubts)

    def _leave(self) -> None:
        if not self._core.number:
            return
        try:
            self._directory.withdraw(self._core.number)
        except TiffinError as error:
            log.info("not withdrawn, the registration will expire: %s", error)


__all__ = ["NodeFeed", "Publisher", "PublisherCore", "PublisherOptions"]
