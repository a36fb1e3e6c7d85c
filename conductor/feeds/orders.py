"""Carries orders out: copies, drops and evacuations, over connections to the nodes of a pool.

The core decides how much is copied (`replication.py`, `draining.py`); this shell does what it is
told, a few orders at a time, and says how it went. It never tries again by itself: an order that
failed is reported, and whoever ordered lets the node rest. So a pool that is in trouble is asked
for less, not for more.

A copy is made by the node that gets it (`kvstore/pool/copy.py`), two at a time beside its serving.
What was not there before is pinned softly for a while, or a node that is full might throw a copy
out before its first reader has come; from then on it lives by being used. Only pins that were set
here, and may still hold, are lifted by a drop. One pin that a user sets on such a copy meanwhile
looks the same to the node: it is lifted as well.
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

from tiffin.kvstore.errors import NodeUnavailable, TiffinError
from tiffin.kvstore.node import messages
from tiffin.kvstore.pool.engine import Engine

from ..orders import ORDER_TIMEOUT_S, Admit, Copy, Drop, Ended, Evacuate

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tiffin.kvstore.credentials import Credentials
    from tiffin.kvstore.pool.members import Members

    from ..orders import Order

log = logging.getLogger(__name__)

# Orders that wait or are carried out; as many as replication and some drains have at a time. What
# is beyond is refused at once, as failed.
ORDERS_MAX = 512
# Blocks whose pins are remembered, some 100 bytes each. Pins beyond end by themselves.
PINNED_MAX = 262_144
# For what is answered at once.
ASK_TIMEOUT_S = 5.0
_SOFT, _NONE = 1, 0


class CarrierSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """How orders are carried out."""

    threads: Annotated[int, Meta(ge=1, le=64)] = 4
    """Orders at a time. Each waits for a node; evacuations take long, and have threads besides."""

    pin_s: Annotated[float, Meta(ge=0, le=86_400)] = 60.0
    """How long a new copy is pinned softly, until its first readers come; 0 for not at all."""


class OrderCarrier:
    """Carries out orders in threads of its own. Thread-safe.

    `members` is a directory of the pool (closed with this). Nodes are named as there; of two that
    are called the same, the one that registered last is meant.
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
        self._engine = Engine(members, credentials, name)
        threads = self.settings.threads
        self._threads = ThreadPoolExecutor(threads, thread_name_prefix="tiffin-orders")
        # Apart: one evacuation may take ten minutes, and copies should not wait for four of them.
        self._slow = ThreadPoolExecutor(threads, thread_name_prefix="tiffin-evacuations")
        self._lock = threading.Lock()
        # Of who never asks, the latest: the others are taken for lost in the end.
        self._ended: deque[Ended] = deque(maxlen=2 * ORDERS_MAX)
        self._waiting = 0
        self._closed = False
        # When the pin of a copied block ends, by node's number and key; the oldest first.
        self._pins: OrderedDict[tuple[int, bytes], float] = OrderedDict()
        self._done: dict[str, int] = {}
        self._failures: dict[str, int] = {}

    def submit(self, orders: Sequence[Order]) -> None:
        """Carry these out; `finished` tells how. Does not wait, never raises."""
        for order in orders:
            with self._lock:
                why = "Closed" if self._closed else "QueueFull" if self._is_full() else ""
                if not why:
                    self._waiting += 1
            if why:
                self._report(Ended(order.number, error=why))
                continue
            threads = self._slow if isinstance(order, Evacuate) else self._threads
            try:
                threads.submit(self._run, order)
            except RuntimeError:  # closed just now
                self._end(order, Ended(order.number, error="Closed"))

    def finished(self) -> list[Ended]:
        """What has ended since the last call, in that order."""
        with self._lock:
            found = list(self._ended)
            self._ended.clear()
        return found

    def statistics(self) -> dict[str, Any]:
        """Plain numbers: orders `waiting` or under way, `done` by kind, `failures` by error, and
        `pinned_blocks`."""
        with self._lock:
            return {
                "waiting": self._waiting,
                "done": dict(self._done),
                "failures": dict(self._failures),
                "pinned_blocks": len(self._pins),
            }

    def close(self) -> None:
        """Hang up: nodes finish copies that they have begun, nobody waits for them. Returns when
        all threads have ended."""
        with self._lock:
            self._closed = True
        self._engine.close()
        self._threads.shutdown(wait=True, cancel_futures=True)
        self._slow.shutdown(wait=True, cancel_futures=True)

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
        before = self._engine.ask(target, messages.Exists(0, keys), ASK_TIMEOUT_S).flags
        pull = messages.Pull(0, keys, order.parent, order.depth, source, ORDER_TIMEOUT_S)
        blocks = int(self._engine.ask(target, pull, ORDER_TIMEOUT_S).count)
        new = [key for key, had in zip(order.keys[:blocks], before, strict=False) if not had]
        if new and self.settings.pin_s:
            self._pin(target, new)
        return blocks

    def _pin(self, node: int, keys: list[bytes]) -> None:
        until = time.monotonic() + self.settings.pin_s
        request = messages.Pin(0, b"".join(keys), _SOFT, self.settings.pin_s)
        try:
            self._engine.ask(node, request, ASK_TIMEOUT_S)
        except TiffinError as error:  # they are there all the same
            log.info("copies were not pinned: %s", error)
        with self._lock:
            for key in keys:
                self._pins[node, key] = until
                self._pins.move_to_end((node, key))
            self._forget_pins()

    def _drop(self, order: Drop) -> int:
        """Lift those pins that were set here and may still hold; how many blocks there are."""
        node = self._number(order.node)
        with self._lock:
            self._forget_pins()
            ours = [key for key in order.keys if self._pins.pop((node, key), None) is not None]
        if not ours:
            return 0
        # The time is not used for lifting, but has to be one.
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
        """What the directory calls a node now. Raises NodeUnavailable, DirectoryUnavailable."""
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
            self._ended.append(outcome)
