"""Sequence numbers: applies a publisher's batches in order, each once, and detects lost ones. Pure.

A PUB socket drops batches when a subscriber is slow, and a restarted engine counts from 0 again.
The publisher keeps its last batches for a replay, if it is configured to:

    following   number as expected: apply the batch
                higher: batches were lost; request a replay, and hold the live batches
                lower: the publisher has restarted; forget all, request its batches from the start;
                but the live copy of a replayed batch, which comes by another connection, is late
    asking      apply the replayed batches; then the held ones, without those already replayed
                timeout: apply the held ones; the lost batches stay lost

Every replay begins with the last batch that was applied, which shows whether it is still the same
publisher: a publisher that has restarted and published nothing since has no batches, or has other
batches under these numbers. A restart is detected by the numbers alone: if a publisher restarts
between two batches, and its first batches are lost until exactly the expected number arrives, the
restart goes unnoticed. An engine takes seconds to start, and a publisher that is quiet for PROBE_S
is probed.

The batches that stay lost may have contained removals: then all known blocks are in doubt
(`Doubt`). Without a replay port there is no `asking`: a higher number puts all blocks in doubt.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import TypeAlias

# The most live batches that are held during a replay: at a batch per step and 100 steps a second,
# 40 s.
HELD_MAX = 4096
# Timeout for the first message of a replay, and from each of its messages to the next.
PATIENCE_S = 2.0
# A publisher that is quiet for this long is probed by a replay request; a publisher that has never
# replayed anything is probed at this interval, quiet or not.
PROBE_S = 5.0


@dataclass(frozen=True, slots=True)
class Apply:
    """Apply this batch."""

    seq: int
    payload: bytes


@dataclass(frozen=True, slots=True)
class ReplayRequest:
    """Request a replay of all batches from this number on."""

    seq: int


@dataclass(frozen=True, slots=True)
class Doubt:
    """Batches are lost: known blocks may be gone."""


@dataclass(frozen=True, slots=True)
class Restarted:
    """The publisher has restarted with an empty cache: forget its blocks."""


@dataclass(frozen=True, slots=True)
class Current:
    """No batch was missed up to now."""


Step: TypeAlias = Apply | ReplayRequest | Doubt | Restarted | Current


class Numbering:
    """The sequence state of one publisher. Every method returns the steps to take, in order."""

    def __init__(self, *, replays: bool, now: float) -> None:
        self.expected = 0  # the number of the next batch
        self._replays = replays
        self._knows = False  # whether anything of this publisher was applied
        self._asking = False
        self._floor = 0  # a live batch below this, during a replay, is of a restarted publisher
        self._held: deque[tuple[int, bytes]] = deque()
        # The hashes of replayed batches whose live copies may still come, at most HELD_MAX.
        self._replayed: dict[int, int] = {}
        self._heard_at = self._asked_at = now
        self._last: int | None = None  # a hash of the last applied batch
        self._keeps = False  # whether the publisher has ever replayed anything
        self._came = False  # whether the replay under way has brought a batch
        self._another = False  # the replay shows a restarted publisher: request it again

    @property
    def asking(self) -> bool:
        """Whether a replay is under way."""
        return self._asking

    def begin(self, now: float) -> list[Step]:
        """Start the subscription: earlier batches may exist, so a replay is requested."""
        return self._ask(now) if self._replays else []

    def live(self, seq: int, payload: bytes, now: float) -> list[Step]:
        """Handle a live batch."""
        if self._is_late_copy(seq, payload):
            return []
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
        """Handle a batch of a replay."""
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
            steps.append(Doubt())  # the publisher no longer keeps the batches in between
        self._replayed[seq] = hash(payload)
        if len(self._replayed) > HELD_MAX:
            del self._replayed[next(iter(self._replayed))]
        return steps + self._apply(seq, payload)

    def replay_ended(self, now: float) -> list[Step]:
        """Handle the end of a replay."""
        if not self._asking:
            return []
        if self._another:
            self._held.clear()  # the next replay includes the batches since the restart
            return self._ask(now)
        steps: list[Step] = []
        if self._last is not None and self._keeps and not self._came:
            self._held.clear()
            steps.append(self._forget())
        return [*steps, *self._resume(now), Current()]

    def look(self, now: float) -> list[Step]:
        """Check the timeouts: give up an overdue replay, or probe a quiet publisher."""
        if self._asking and now >= self._heard_at + PATIENCE_S:
            return self._resume(now)
        since = self._heard_at if self._keeps else self._asked_at
        if self._replays and not self._asking and now >= since + PROBE_S:
            return self._ask(now)
        return []

    # -- inside ----------------------------------------------------------------------------------

    def _is_late_copy(self, seq: int, payload: bytes) -> bool:
        """Whether a live batch is the copy of a replayed one. Live batches come in order, so the
        copies up to this one are awaited no more."""
        is_copy = self._replayed.get(seq) == hash(payload)
        while self._replayed and (first := next(iter(self._replayed))) <= seq:
            del self._replayed[first]
        return is_copy

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
        return [ReplayRequest(max(0, self.expected - 1))]

    def _restart(self, seq: int, payload: bytes, now: float) -> list[Step]:
        self._held.clear()
        self._asking = False
        return [self._forget(), *self._follow(seq, payload, now)]

    def _forget(self) -> Step:
        self.expected, self._knows, self._last = 0, False, None
        self._replayed.clear()
        return Restarted()

    def _resume(self, now: float) -> list[Step]:
        """End the replay, complete or not, and apply the held batches."""
        steps: list[Step] = []
        held, self._held = self._held, deque()
        self._asking, self._another, self._heard_at = False, False, now
        for seq, payload in held:
            if seq >= self.expected:
                steps += self._follow(seq, payload, now, may_ask=False)
        return steps
