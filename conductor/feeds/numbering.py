"""A publisher's numbered batches, in order and each once, though some may be lost. Pure.

A PUB socket drops what a slow subscriber does not take, and an engine that was restarted counts
from 0 again. The publisher keeps its last batches for a replay, if it was told to:

    following   number as expected: apply it
                higher: something was lost; ask for a replay, and hold what comes live
                lower: the publisher was restarted; forget all, ask for its beginning
    asking      what is replayed is applied; then what was held, without what was replayed
                no answer in time: the same, and what was lost stays lost

Every replay begins with the last batch that was applied, and shows that it is still the same
publisher: one that was restarted and has said nothing since has no batches, or others under their
numbers. Numbers are all there is: a publisher that restarts between two batches, and whose first
ones are lost until just the expected number comes, is taken for its earlier self. An engine takes
seconds to start, and is asked when it was quiet for PROBE_S.

What stays lost may have been removals: what is known is in doubt then (`Doubt`). Without a replay
port only the last part applies.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import TypeAlias

# While a replay is under way: at a batch per step and 100 steps a second, 40 s.
HELD_MAX = 4096
# For the answer to a replay to begin, and from one message of it to the next.
PATIENCE_S = 2.0
# A publisher that is quiet for so long is asked whether there is anything new; one that was never
# seen to replay anything is asked so often.
PROBE_S = 5.0


@dataclass(frozen=True, slots=True)
class Apply:
    """Take this batch in."""

    seq: int
    payload: bytes


@dataclass(frozen=True, slots=True)
class Ask:
    """Ask for a replay of all batches from this number on."""

    seq: int


@dataclass(frozen=True, slots=True)
class Doubt:
    """Batches are lost: what is known may be no longer true."""


@dataclass(frozen=True, slots=True)
class Restarted:
    """The publisher has begun anew, with nothing: forget what is known."""


@dataclass(frozen=True, slots=True)
class Current:
    """Nothing was missed."""


Step: TypeAlias = Apply | Ask | Doubt | Restarted | Current


class Numbering:
    """Where one publisher is. Every method returns what is to be done, in order."""

    def __init__(self, *, replays: bool, now: float) -> None:
        self.expected = 0  # the number of the next batch
        self._replays = replays
        self._knows = False  # whether anything of this publisher was applied
        self._asking = False
        self._floor = 0  # held ones below this are of a restarted publisher
        self._held: deque[tuple[int, bytes]] = deque()
        self._heard_at = self._asked_at = now
        self._last: int | None = None  # a hash of what was applied last
        self._keeps = False  # whether it was ever seen to replay anything
        self._came = False  # whether the replay that is under way has brought anything
        self._another = False  # it is of another life of the publisher: to be asked for anew

    @property
    def asking(self) -> bool:
        """Whether a replay is under way."""
        return self._asking

    def begin(self, now: float) -> list[Step]:
        """The subscription begins: there may be batches of before."""
        return self._ask(now) if self._replays else []

    def live(self, seq: int, payload: bytes, now: float) -> list[Step]:
        """A batch was published."""
        if not self._asking:
            self._heard_at = now
            return self._follow(seq, payload, now)
        newest = self._held[-1][0] if self._held else self._floor - 1
        if seq <= newest:
            return self._restart(seq, payload, now)
        self._held.append((seq, payload))
        if len(self._held) > HELD_MAX:
            return self._resume(now)
        return []

    def replayed(self, seq: int, payload: bytes, now: float) -> list[Step]:
        """A batch of a replay."""
        if not self._asking or seq < self.expected - 1:
            return []
        self._heard_at = now
        self._keeps = self._came = True
        if self._another:
            return []
        if seq < self.expected:
            if hash(payload) == self._last:
                return []
            self._another = True
            return [self._forget()]
        steps: list[Step] = []
        if seq > self.expected and self._knows:
            steps.append(Doubt())  # the publisher has forgotten what lies between
        return steps + self._apply(seq, payload)

    def replay_ended(self, now: float) -> list[Step]:
        """The last one of a replay has come."""
        if not self._asking:
            return []
        if self._another:
            self._held.clear()  # the next replay has those of this life
            return self._ask(now)
        steps: list[Step] = []
        if self._last is not None and self._keeps and not self._came:
            self._held.clear()
            steps.append(self._forget())
        return [*steps, *self._resume(now), Current()]

    def look(self, now: float) -> list[Step]:
        """Time has passed: a replay may be overdue, or a quiet publisher asked."""
        if self._asking and now >= self._heard_at + PATIENCE_S:
            return self._resume(now)
        since = self._heard_at if self._keeps else self._asked_at
        if self._replays and not self._asking and now >= since + PROBE_S:
            return self._ask(now)
        return []

    # -- inside ----------------------------------------------------------------------------------

    def _follow(self, seq: int, payload: bytes, now: float, *, may_ask: bool = True) -> list[Step]:
        if seq < self.expected:
            return self._restart(seq, payload, now)
        if seq > self.expected and self._replays and may_ask:
            self._held.append((seq, payload))
            return self._ask(now)
        if seq > self.expected and self._knows:
            return [Doubt(), *self._apply(seq, payload)]
        return self._apply(seq, payload)

    def _apply(self, seq: int, payload: bytes) -> list[Step]:
        self.expected, self._knows, self._last = seq + 1, True, hash(payload)
        return [Apply(seq, payload)]

    def _ask(self, now: float) -> list[Step]:
        self._asking, self._floor = True, self.expected
        self._came = self._another = False
        self._heard_at = self._asked_at = now
        return [Ask(max(0, self.expected - 1))]

    def _restart(self, seq: int, payload: bytes, now: float) -> list[Step]:
        self._held.clear()
        self._asking = False
        return [self._forget(), *self._follow(seq, payload, now)]

    def _forget(self) -> Step:
        self.expected, self._knows, self._last = 0, False, None
        return Restarted()

    def _resume(self, now: float) -> list[Step]:
        """The replay is over, one way or another: go on with what was held."""
        steps: list[Step] = []
        held, self._held = self._held, deque()
        self._asking, self._another, self._heard_at = False, False, now
        for seq, payload in held:
            if seq >= self.expected:
                steps += self._follow(seq, payload, now, may_ask=False)
        return steps
