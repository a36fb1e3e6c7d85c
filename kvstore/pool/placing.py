"""Where the replicas of one put go: home first, then other nodes, whoever has room.

A node that is full may have room soon, when it has moved blocks to NVMe or a reader lets go. So it
is given a moment; then others are asked; and only if nobody has room, what is left of the time is
spent waiting at the one that took most. A node that was silent for that moment may only have stood
still: if nobody else takes the blocks, it is asked again, and then waited for.
"""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING, TypeAlias

from ..errors import (
    ClientClosed,
    DeadlineExceeded,
    DirectoryUnavailable,
    InvalidInput,
    NodeUnavailable,
    NoRoom,
    TiffinError,
)
from ..link import GRACE_S
from ..verbs import PutResult
from .plan import place
from .store import store

if TYPE_CHECKING:
    from collections.abc import Callable

    from .engine import Engine
    from .store import Seals

log = logging.getLogger(__name__)

# Long enough for a node to write some blocks to its NVMe; a get of the same prompt is not started
# before the put has ended.
ROOM_WAIT_S = 0.2
# Nodes that are asked for room by one put. If that many have none, the pool is full.
TRIES_MAX = 6
# A reservation that was given up is gone when the node has seen that: a connection that ends, or a
# message. So often, and so long, that is waited for.
_OWN_TRIES_MAX = 3
_OWN_WAIT_S = 0.05
# More copies of one prompt are a mistake: each costs its bytes.
REPLICAS_MAX = 16

HOME = 0  # in place of a number: home may have none, while the directory does not know it
NO_ROOM = "no_room"

# What became of a put, and the number of its node; candidates that have no room for all of it.
_Taken: TypeAlias = tuple[PutResult, int | None]
_Full: TypeAlias = list[tuple[int, PutResult]]


class Placing:
    """One put of `seals.prefix`, and the nodes that took it. `put_home(room_s, patient=)` puts at
    home, as `Home.put`; it is None for a client without a home."""

    def __init__(
        self,
        engine: Engine,
        seals: Seals,
        deadline: float,
        put_home: Callable[..., PutResult] | None,
        home_number: int | None,
    ) -> None:
        self._engine = engine
        self._seals = seals
        self._deadline = deadline
        self._put_home = put_home
        self._home_number = home_number
        self._failure: TiffinError | None = None
        self._tried: set[int] = set()
        # Of these, who was silent for a moment, and was not waited for.
        self._late: list[int] = []

    @property
    def done_with(self) -> set[int]:
        """Nodes that have the blocks, or can't take them."""
        silent = {self._home_number or HOME} if HOME in self._late else set()
        return self._tried.difference(self._late, silent)

    def one(self) -> _Taken:
        """Store one more replica; what became of it, and the number of its node.

        Raises InvalidInput, Draining, NodeUnavailable or DirectoryUnavailable if no node could
        even be asked.
        """
        full: _Full = []
        candidates = self._candidates()
        taken = self._hastily(candidates, full) or self._patiently(full)
        if taken is not None:
            return taken
        if not full:
            raise self._why_nobody()
        best, result = max(full, key=lambda pair: len(pair[1].stored) + len(pair[1].resident))
        left_s = self._deadline - time.monotonic()
        if left_s > 0 and len(candidates) > 1:
            again = self._try(best, left_s)
            result = result if again is None else _joined(result, again)
        return result, self._number(best)

    def _hastily(self, candidates: list[int], full: _Full) -> _Taken | None:
        """Who takes it within a moment. Who has no room is noted in `full`."""
        for candidate in candidates:
            left_s = max(0.0, self._deadline - time.monotonic())
            if not left_s and isinstance(self._failure, DeadlineExceeded):
                break  # each further one that is silent would cost its own grace
            room_s = left_s if len(candidates) == 1 else min(left_s, ROOM_WAIT_S)
            taken = self._settled(candidate, self._try(candidate, room_s), full)
            if taken is not None:
                return taken
        return None

    def _patiently(self, full: _Full) -> _Taken | None:
        """Who takes it of those that were late, each with its share of the time that is left."""
        late, self._late = self._late, []
        for position, candidate in enumerate(late):
            left_s = self._deadline - time.monotonic()
            if left_s <= 0:
                break
            room_s = left_s / (len(late) - position + bool(full))
            taken = self._settled(candidate, self._try_again(candidate, room_s), full)
            if taken is not None:
                return taken
        return None

    def _settled(self, candidate: int, result: PutResult | None, full: _Full) -> _Taken | None:
        """What it took. None if it took nothing, or lacks room: then it is noted in `full`."""
        if result is None:
            return None
        if result.reason == NO_ROOM:
            full.append((candidate, result))
            return None
        return result, self._number(candidate)

    def _try_again(self, candidate: int, room_s: float) -> PutResult | None:
        """`_try` with one who was late. Our own first reservation may be in our way, until the node
        has seen that we had given it up."""
        until = time.monotonic() + room_s
        result = self._try(candidate, room_s, patient=True)
        for _ in range(_OWN_TRIES_MAX):
            if result is None or not result.busy or time.monotonic() + _OWN_WAIT_S > until:
                break
            time.sleep(_OWN_WAIT_S)
            again = self._try(candidate, until - time.monotonic(), patient=True)
            result = result if again is None else _joined(result, again)
        return result

    def _number(self, candidate: int) -> int | None:
        return candidate or self._home_number

    def _candidates(self) -> list[int]:
        """Nodes to ask, in this order."""
        home = [HOME] if self._put_home is not None and HOME not in self._tried else []
        if self._home_number is not None and self._put_home is not None:
            self._tried.add(self._home_number)  # by its socket, not by its port
        try:
            nodes = self._engine.nodes()
        except DirectoryUnavailable as error:
            self._failure = error
            return home
        prefix = self._seals.prefix
        size, dice = len(prefix) * prefix.schema.extent_bytes, self._engine.dice
        down = self._engine.links.down(time.monotonic())
        others = place(nodes, TRIES_MAX, size, dice, without=self._tried | down)
        return home + (others or place(nodes, TRIES_MAX, size, dice, without=self._tried))

    def _try(self, candidate: int, room_s: float, *, patient: bool = False) -> PutResult | None:
        """What became of it there; None if the node does not answer, or takes nothing. `patient`:
        this is not the first time."""
        self._tried.add(candidate)
        try:
            if candidate == HOME:
                assert self._put_home is not None
                return self._put_home(room_s, patient=patient)
            return self._store(candidate, room_s)
        except ClientClosed:
            raise
        except TiffinError as error:
            self._failure = error
            log.info("not put to node %d: %s", candidate, error)
            left_alone = candidate == HOME and isinstance(error, NodeUnavailable)
            late = not patient and (left_alone or isinstance(error, DeadlineExceeded))
            if late:
                self._late.append(candidate)
            if isinstance(error, NodeUnavailable | DeadlineExceeded) and candidate != HOME:
                self._engine.links.failed(candidate, time.monotonic(), late=late)
            return None

    def _store(self, number: int, room_s: float) -> PutResult:
        peer, prefix = self._engine.peer(number), self._seals.prefix
        now = time.monotonic()
        late = max(self._deadline, now) + GRACE_S
        stored = store(peer, self._seals, 0, deadline=late, room_until=now + room_s)
        return self._engine.noted(number, prefix, stored)

    def _why_nobody(self) -> TiffinError:
        failure = self._failure
        if isinstance(failure, InvalidInput | NoRoom | DirectoryUnavailable | NodeUnavailable):
            return failure
        error = NodeUnavailable("no node of the pool takes these blocks; look at `tiffin status`")
        error.__cause__ = failure
        return error


def check_replicas(replicas: int) -> None:
    """Raise InvalidInput unless it can be a number of copies."""
    if not (isinstance(replicas, int) and 1 <= replicas <= REPLICAS_MAX):
        raise InvalidInput(f"replicas={replicas!r}; it is a number from 1 to {REPLICAS_MAX}")


def _joined(first: PutResult, second: PutResult) -> PutResult:
    """What two puts to the same node came to."""
    stored = {*first.stored, *second.stored}
    resident = tuple(index for index in second.resident if index not in stored)
    return PutResult(tuple(sorted(stored)), resident, second.busy, second.refused, second.reason)
