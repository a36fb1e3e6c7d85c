"""Carries out orders to the nodes of a pool: copies, drops, admissions and evacuations.

The core decides how much is copied (`replication.py`, `draining.py`); this shell carries out a few
orders at a time and reports their outcomes. It never retries: it reports a failed order, and the
core backs off from the node. So a pool in trouble gets fewer orders, not more.

The target node makes a copy itself (`kvstore/client/pool/replication/node_copy.py`), two at a time
beside serving its readers. A copied block that the target did not have before gets a soft pin for a
while: otherwise a full node might evict the copy before its first reader; after that, its use keeps
it in the cache. A drop lifts only pins that the carrier has set itself and that may still hold. A
pin that a user sets on such a copy meanwhile looks the same to the node, so a drop lifts it as
well.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import OrderedDict, deque
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
from msgspec import Meta

from tiffin.kvstore.client.pool.verb_driver import VerbDriver
from tiffin.kvstore.errors import Draining, NodeUnavailable, NoRoom, TiffinError
from tiffin.kvstore.node.core import messages

from ..pool.orders import ORDER_TIMEOUT_S, UNWATCHED, Admit, Copy, Drop, Ended, Evacuate

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tiffin.kvstore.client.pool.members import Members
    from tiffin.kvstore.credentials import Credentials

    from ..pool.orders import Order

log = logging.getLogger(__name__)

# Orders that are queued, in progress, or ended but not yet fetched by `finished`; as many as
# replication and some drains have at a time. Further orders fail at once.
ORDERS_MAX = 512
# Blocks whose pins the carrier keeps track of, some 100 bytes each. Further pins expire by
# themselves.
PINNED_MAX = 262_144
# Timeout for requests that a node answers at once.
ASK_TIMEOUT_S = 5.0
# A fetch for a request that has not ended by then is given up: its engine did without.
FETCH_TIMEOUT_S = 10.0
_SOFT, _NONE = 1, 0


class CarrierSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Settings of an `OrderCarrier`."""

    threads: Annotated[int, Meta(ge=1, le=64)] = 4
    """Orders at a time. Each waits for a node; evacuations take long, and have threads besides."""

    pin_s: Annotated[float, Meta(ge=0, le=86_400)] = 60.0
    """How long a new copy is pinned softly, until its first readers come; 0 for not at all."""


class OrderCarrier:
    """Carries out orders in threads of its own. Thread-safe.

    `members` is a directory of the pool; `close` closes it. Orders name nodes as the directory
    does; of two nodes with the same name, the one that registered last is meant.
    """

    def __init__(
        self,
        members: Members,
        credentials: Credentials,
        settings: CarrierSettings | None = None,
        *,
        name: str = "conductor",
    ) -> None:
        self.settings = settings or CarrierSettings()
        self._engine = VerbDriver(members, credentials, name)
        threads = self.settings.threads
        self._threads = ThreadPoolExecutor(threads, thread_name_prefix="tiffin-orders")
        # A thread pool of their own: one evacuation may take ten minutes, and copies should not
        # wait for four of them.
        self._slow = ThreadPoolExecutor(threads, thread_name_prefix="tiffin-evacuations")
        # So have fetches: an engine waits for them, and not for long.
        self._quick = ThreadPoolExecutor(threads, thread_name_prefix="tiffin-fetches")
        self._lock = threading.Lock()
        # Outcomes for `finished`. If the caller does not fetch them, only the latest are kept, and
        # it takes the other orders for lost after a timeout.
        self._ended: deque[Ended] = deque(maxlen=2 * ORDERS_MAX)
        self._waiting = 0
        self._closed = False
        # When the pin of a copied block expires, by the node's number and key; the oldest first.
        self._pins: OrderedDict[tuple[int, bytes], float] = OrderedDict()
        self._done: dict[str, int] = {}
        self._failures: dict[str, int] = {}

    def submit(self, orders: Sequence[Order]) -> None:
        """Queue orders; `finished` returns their outcomes. Does not wait, never raises."""
        for order in orders:
            with self._lock:
                why = "Closed" if self._closed else "QueueFull" if self._is_full() else ""
                if not why:
                    self._waiting += 1
            if why:
                self._report(Ended(order.number, error=why))
                continue
            threads = self._slow if isinstance(order, Evacuate) else self._threads
            threads = self._quick if order.number == UNWATCHED else threads
            try:
                threads.submit(self._run, order)
            except RuntimeError:  # another thread has just called `close`
                self._end(order, Ended(order.number, error="Closed"))

    def finished(self) -> list[Ended]:
        """The outcomes of orders that have ended since the last call, in that order."""
        with self._lock:
            found = list(self._ended)
            self._ended.clear()
        return found

    def statistics(self) -> dict[str, Any]:
        """Counters: orders `waiting` or in progress, `done` by kind, `failures` by error, and
        `pinned_blocks`."""
        with self._lock:
            return {
                "waiting": self._waiting,
                "done": dict(self._done),
                "failures": dict(self._failures),
                "pinned_blocks": len(self._pins),
            }

    def close(self) -> None:
        """Close the connections: nodes finish copies that they have begun, without a thread that
        waits for them. Returns when all threads have ended."""
        with self._lock:
            self._closed = True
        self._engine.close()
        self._threads.shutdown(wait=True, cancel_futures=True)
        self._slow.shutdown(wait=True, cancel_futures=True)
        self._quick.shutdown(wait=True, cancel_futures=True)

    # -- in threads --------------------------------------------------------------------------------

    def _run(self, order: Order) -> None:
        outcome = Ended(order.number, error="Unexpected")
        try:
            outcome = self._carry_out(order)
        except TiffinError as error:
            log.info("%s failed: %s", type(order).__name__.lower(), error)
            outcome = Ended(order.number, error=type(error).__name__)
        except Exception:
            log.exception("%s failed unexpectedly", type(order).__name__.lower())
        finally:
            self._end(order, outcome)

    def _carry_out(self, order: Order) -> Ended:
        if isinstance(order, Copy):
            return Ended(order.number, self._copy(order))
        if isinstance(order, Drop):
            return Ended(order.number, self._drop(order))
        if isinstance(order, Admit):
            request: messages.Request = messages.Drain(0, not order.on)
            return Ended(order.number, self._ask(order.node, request, ASK_TIMEOUT_S))
        return self._evacuate(order)

    def _evacuate(self, order: Evacuate) -> Ended:
        node = self._number(order.node)
        timeout_s = min(order.timeout_s, messages.TIMEOUT_S_MAX)
        elsewhere = int(self._engine.ask(node, messages.Evacuate(0, timeout_s), timeout_s).count)
        numbers = self._engine.ask(node, messages.Statistics(0), ASK_TIMEOUT_S).numbers
        return Ended(order.number, elsewhere, left=max(0, numbers["blocks"] - elsewhere))

    def _copy(self, order: Copy) -> int:
        target, source = self._number(order.target), self._number(order.source)
        keys = b"".join(order.keys)
        if order.number == UNWATCHED:  # its reader comes at once, and waits for no answer
            ask = (keys, order.parent, order.depth, source, FETCH_TIMEOUT_S)
            self._engine.ask(target, messages.Pull(0, *ask, wait=False), ASK_TIMEOUT_S)
            return 0
        before = self._engine.ask(target, messages.Exists(0, keys), ASK_TIMEOUT_S).flags
        pull = messages.Pull(0, keys, order.parent, order.depth, source, ORDER_TIMEOUT_S)
        try:
            blocks = int(self._engine.ask(target, pull, ORDER_TIMEOUT_S).count)
        except Draining:
            raise
        except NoRoom:  # an answer, and no failure
            blocks = 0
        new = [key for key, had in zip(order.keys[:blocks], before, strict=False) if not had]
        if new and self.settings.pin_s:
            self._pin(target, new)
        return blocks

    def _pin(self, node: int, keys: list[bytes]) -> None:
        until = time.monotonic() + self.settings.pin_s
        request = messages.Pin(0, b"".join(keys), _SOFT, self.settings.pin_s)
        try:
            self._engine.ask(node, request, ASK_TIMEOUT_S)
        except TiffinError as error:  # the copies exist nevertheless
            log.info("copies were not pinned: %s", error)
        with self._lock:
            for key in keys:
                self._pins[node, key] = until
                self._pins.move_to_end((node, key))
            self._forget_pins()

    def _drop(self, order: Drop) -> int:
        """Lift the pins of these blocks that the carrier has set and that may still hold. Returns
        how many of these blocks the node has."""
        node = self._number(order.node)
        with self._lock:
            self._forget_pins()
            ours = [key for key in order.keys if self._pins.pop((node, key), None) is not None]
        if not ours:
            return 0
        # The node ignores the duration when it lifts a pin, but the message needs a valid one.
        return self._ask(order.node, messages.Pin(0, b"".join(ours), _NONE, 1.0), ASK_TIMEOUT_S)

    def _forget_pins(self) -> None:
        now = time.monotonic()
        while self._pins and (
            len(self._pins) > PINNED_MAX or next(iter(self._pins.values())) <= now
        ):
            self._pins.popitem(last=False)

    def _ask(self, node: str, request: messages.Request, timeout_s: float) -> int:
        return int(getattr(self._engine.ask(self._number(node), request, timeout_s), "count", 0))

    def _number(self, name: str) -> int:
        """The number under which the directory lists a node now. Raises NodeUnavailable."""
        records = self._engine.nodes()
        number = max((n for n, record in records.items() if record.name == name), default=None)
        if number is None:
            raise NodeUnavailable(f"no node {name!r} is in the pool now")
        return number

    # -- outcomes ----------------------------------------------------------------------------------

    def _is_full(self) -> bool:
        return self._waiting + len(self._ended) >= ORDERS_MAX

    def _end(self, order: Order, outcome: Ended) -> None:
        with self._lock:
            self._waiting -= 1
            if not outcome.error:
                kind = type(order).__name__.lower()
                self._done[kind] = self._done.get(kind, 0) + 1
        self._report(outcome)

    def _report(self, outcome: Ended) -> None:
        with self._lock:
            if outcome.error:
                self._failures[outcome.error] = self._failures.get(outcome.error, 0) + 1
            if outcome.number != UNWATCHED:
                self._ended.append(outcome)
