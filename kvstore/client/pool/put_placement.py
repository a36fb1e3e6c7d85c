"""The placement of one put's replicas: the home node first, then other nodes that have room.

A full node may have room soon, when it has moved blocks to NVMe or a reader releases a lease. So
the put waits there for a moment, then asks other nodes; only if no node has room, it spends the
rest of its time waiting at the node that took most of the blocks. A node that was silent for that
moment may only have been suspended: if no other node takes the blocks, the put asks it again, and
then waits for it.
"""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING, TypeAlias

from ...deadlines import until_s
from ...errors import (
    ClientClosed,
    DeadlineExceeded,
    InvalidInput,
    NodeUnavailable,
    NoRoom,
    TiffinError,
)
from ..verbs.block_verbs import PutResult
from .pool_verbs import HOME
from .replica_choice import place

if TYPE_CHECKING:
    from .home.home import Home
    from .remote.block_write import BlockSeals
    from .verb_driver import VerbDriver

log = logging.getLogger(__name__)

# How long to wait for room at one candidate: long enough for a node to write some blocks to its
# NVMe; a get of the same prompt is not started before the put has ended.
ROOM_WAIT_S = 0.2
# The most nodes that one put asks for room. If that many have none, the pool is full.
TRIES_MAX = 6
# A reservation of this put that was given up blocks a retry until the node has seen the abort or
# the end of the connection: how many retries wait for that, and for how long each.
_OWN_TRIES_MAX = 3
_OWN_WAIT_S = 0.05

NO_ROOM = "no_room"
LATE = "deadline"  # the node has not confirmed all blocks

# The result of a put and the number of its node; candidates that have no room for all blocks.
_Taken: TypeAlias = tuple[PutResult, int | None]
_Full: TypeAlias = list[tuple[int, PutResult]]


class PutPlacement:
    """One put of `seals.prefix`, and the nodes that it has tried."""

    def __init__(
        self,
        driver: VerbDriver,
        seals: BlockSeals,
        deadline: float,
        home: Home | None,
    ) -> None:
        self._driver = driver
        self._seals = seals
        self._deadline = deadline
        self._home = home
        self._home_number = None if home is None else home.number
        self._failure: TiffinError | None = None
        self._tried: set[int] = set()
        # The tried candidates that were silent for a moment; the put has not waited for them.
        self._late: list[int] = []

    @property
    def done_with(self) -> set[int]:
        """The nodes that have the blocks, or can't take them."""
        silent = {self._home_number} if HOME in self._late else set()
        return self._tried.difference(self._late, silent)

    def one(self) -> _Taken:
        """Store one more replica: its result, and the number of its node.

        Raises InvalidInput, Draining or NodeUnavailable if no candidate answered, or each refused
        the blocks for another reason than room.
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
        """Try each candidate for a moment; the first that takes all blocks. Adds the candidates
        without room to `full`."""
        for candidate in candidates:
            left_s = until_s(self._deadline)
            if not left_s and isinstance(self._failure, DeadlineExceeded):
                break  # each further silent node would cost another GRACE_S
            room_s = left_s if len(candidates) == 1 else min(left_s, ROOM_WAIT_S)
            taken = self._settled(candidate, self._try(candidate, room_s), full)
            if taken is not None:
                return taken
        return None

    def _patiently(self, full: _Full) -> _Taken | None:
        """Retry the candidates that were late, each with its share of the time that is left; the
        first that takes all blocks."""
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
        """The result at this candidate and its number. None if it took nothing, or lacks room: then
        it is added to `full`."""
        if result is None:
            return None
        if result.reason in (NO_ROOM, LATE):
            full.append((candidate, result))
            return None
        return result, self._number(candidate)

    def _try_again(self, candidate: int, room_s: float) -> PutResult | None:
        """`_try` again with a candidate that was late. The first try's reservation may still block
        the blocks (busy), until the node has seen that the put gave it up."""
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
        return self._home_number if candidate == HOME else candidate

    def _candidates(self) -> list[int]:
        """The candidates, in the order in which to ask them."""
        home = [HOME] if self._home is not None and HOME not in self._tried else []
        if self._home_number is not None:
            self._tried.add(self._home_number)  # reached by its unix socket, not by its TCP port
        try:
            nodes = self._driver.nodes()
        except NodeUnavailable as error:
            self._failure = error
            return home
        prefix = self._seals.prefix
        size, dice = len(prefix) * prefix.schema.extent_bytes, self._driver.dice
        down = self._driver.links.down(time.monotonic())
        others = place(nodes, TRIES_MAX, size, dice, without=self._tried | down)
        return home + (others or place(nodes, TRIES_MAX, size, dice, without=self._tried))

    def _try(self, candidate: int, room_s: float, *, patient: bool = False) -> PutResult | None:
        """Put at this candidate; None if the node does not answer, or takes no blocks. `patient`:
        this is a retry."""
        self._tried.add(candidate)
        try:
            node = self._driver.node(candidate, self._home)
            return node.put(self._seals, room_s, self._deadline, patient=patient)
        except ClientClosed:
            raise
        except TiffinError as error:
            self._failure = error
            log.info("not put to node %d: %s", candidate, error)
            left_alone = candidate == HOME and isinstance(error, NodeUnavailable)
            if not patient and (left_alone or isinstance(error, DeadlineExceeded)):
                self._late.append(candidate)
            return None

    def _why_nobody(self) -> TiffinError:
        failure = self._failure
        if isinstance(failure, InvalidInput | NoRoom | NodeUnavailable):
            return failure
        error = NodeUnavailable("no node of the pool takes these blocks; look at `tiffin status`")
        error.__cause__ = failure
        return error


def _joined(first: PutResult, second: PutResult) -> PutResult:
    """The combined result of two puts to the same node."""
    stored = {*first.stored, *second.stored}
    resident = tuple(index for index in second.resident if index not in stored)
    return PutResult(tuple(sorted(stored)), resident, second.busy, second.refused, second.reason)
