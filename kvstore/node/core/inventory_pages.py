"""Inventories that clients read page by page: each reading covers one snapshot of the node.

Pure, and called under the node's lock. A snapshot (`State`) is kept while a session reads it, and
sessions that began at the same event number share it. When STATES_MAX snapshots are kept, a new
reader joins the newest and catches up by events: so memory is bounded, and no reader forces another
to begin again.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from ...format.header import KEY_BYTES
from . import messages

if TYPE_CHECKING:
    from collections.abc import Callable

    from .records import Session

# A state takes 17 bytes a block: with 500,000 blocks, 34 MB for all states.
STATES_MAX = 4
# Timeout of a reading whose session does not request the next page.
IDLE_S = 30.0


class State(NamedTuple):
    """A snapshot of the resident blocks after event `seq`: joined keys, and one byte per key for
    its tier."""

    seq: int
    keys: bytes
    tiers: bytes


@dataclass(slots=True)
class _Reading:
    state: State
    asked_at: float


class Inventories:
    """The in-progress inventory readings, at most one per session."""

    def __init__(self, take: Callable[[], State], newest_seq: Callable[[], int]) -> None:
        """`take` makes a snapshot; `newest_seq` returns the number of the newest event."""
        self._take = take
        self._newest_seq = newest_seq
        self._readings: dict[Session, _Reading] = {}

    def page(self, session: Session, request: messages.Inventory, now: float) -> messages.KeyPage:
        """The page of keys after the first `after` ones; with 0 the session starts a new reading.
        If the session's reading has expired, the reply is an empty page of `seq` 0, and the client
        must start again."""
        if request.after == 0:
            self._readings.pop(session, None)
            self._readings[session] = _Reading(self._begin(now), now)
        reading = self._readings.get(session)
        if reading is None:
            return messages.KeyPage(request.id, 0, b"", False)
        reading.asked_at = now
        state, first, last = reading.state, request.after, request.after + messages.INVENTORY_KEYS
        more = last < len(state.tiers)
        if not more:
            del self._readings[session]
        keys = state.keys[first * KEY_BYTES : last * KEY_BYTES]
        return messages.KeyPage(request.id, state.seq, keys, more, state.tiers[first:last])

    def forget(self, session: Session) -> None:
        """Drop the reading of a session that has ended."""
        self._readings.pop(session, None)

    def _begin(self, now: float) -> State:
        for session, reading in list(self._readings.items()):
            if reading.asked_at < now - IDLE_S:
                del self._readings[session]
        kept = {reading.state.seq: reading.state for reading in self._readings.values()}
        newest = max(kept, default=-1)
        if newest == self._newest_seq() or len(kept) >= STATES_MAX:
            return kept[newest]
        return self._take()
