"""What the network cards of all nodes have to send, or to receive: one direction of each. Pure.

A card is modelled as a queue in order of promises, at a constant rate. What it has promised is in
flight (`begin`, `end`), or still to come (`plan`, `unplan`): the KV of a prompt leaves its node
when it has been computed. The waiting time at a moment is

    min(promised bytes / rate, time until the card can have done with them)

so a promise whose end is never reported counts less and less, and not at all once it can have been
kept. Cards share their bandwidth among transfers in truth; the sum of bytes is the same, so that
the last one of several ends at the same time. What is planned is behind what begins now, and shares
the card with it: a card with plans for a share u of the time until they can be carried out leaves
1 - u of its bandwidth to others, and not less than one half, the fair share beside one rival (an
instance computes one prompt at a time, so its hand-overs come one by one). A transfer that begins
later waits at its sender for all that is planned there, which leaves in the order of the prompts,
and at its receiver, whose plans have no order, for a share of it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterable

    from numpy.typing import NDArray

    Floats = NDArray[np.float64]
    Numbers = NDArray[np.int64] | NDArray[np.int32]

# Each array's value where nothing is promised.
_ARRAYS: dict[str, Any] = {
    "bytes": np.float64,
    "free_at": np.float64,
    "planned_bytes": np.float64,
    "planned_free_at": np.float64,
    "begun": np.int64,
    "in_flight": np.int64,
}


class CardQueue:
    """One direction of all cards. Arrays [nodes + 1] are by number of the node; the last place,
    which -1 selects, stands for unknown nodes and stays empty. `rate_bytes_s` is set by the owner.
    """

    bytes: Floats
    free_at: Floats
    planned_bytes: Floats
    planned_free_at: Floats
    begun: NDArray[np.int64]  # how many transfers have begun so far
    in_flight: NDArray[np.int64]  # how many of them have not ended
    rate_bytes_s: Floats

    def __init__(self) -> None:
        self._nodes = 0
        self._promises = self._plans = 0
        for name, dtype in _ARRAYS.items():
            setattr(self, name, np.zeros(1, dtype))
        self.rate_bytes_s = np.ones(1)

    @property
    def idle(self) -> bool:
        """Whether no card has promised anything."""
        return not self._promises and not self._plans

    @property
    def planning(self) -> bool:
        """Whether some card has plans."""
        return self._plans > 0

    def grow(self, nodes: int) -> None:
        """Make room for this many nodes. The owner sets the rates anew."""
        for name, dtype in _ARRAYS.items():
            array = np.zeros(nodes + 1, dtype)
            array[: self._nodes] = getattr(self, name)[: self._nodes]
            setattr(self, name, array)
        self._nodes = nodes

    def forget(self, numbers: Iterable[int]) -> None:
        """These nodes have promised nothing: their numbers are reused."""
        for number in numbers:
            self._promises -= int(self.in_flight[number])
            self._plans -= int(self.planned_bytes[number] > 0)
            for name in _ARRAYS:
                getattr(self, name)[number] = 0

    def begin(self, node: int, nbytes: int, now: float | None) -> None:
        """A transfer begins; without `now` it is waited for until its `end`."""
        self.bytes[node] += nbytes
        self.begun[node] += 1
        self.in_flight[node] += 1
        self._promises += 1
        begins_at = np.inf if now is None else max(float(self.free_at[node]), now)
        self.free_at[node] = begins_at + nbytes / float(self.rate_bytes_s[node])

    def end(self, node: int, nbytes: int) -> None:
        """A transfer has ended; no effect if none is in flight."""
        if not self.in_flight[node]:
            return
        self._promises -= 1
        self.in_flight[node] -= 1
        self.bytes[node] = max(self.bytes[node] - nbytes, 0.0)
        if not self.in_flight[node]:
            self.bytes[node] = self.free_at[node] = 0.0

    def plan(self, node: int, nbytes: int, ready_at: float) -> None:
        """A transfer will begin at `ready_at`, behind all that is promised by then."""
        if nbytes <= 0:
            return
        if not self.planned_bytes[node]:
            self._plans += 1
        self.planned_bytes[node] += nbytes
        free_at = max(float(self.planned_free_at[node]), float(self.free_at[node]), ready_at)
        self.planned_free_at[node] = free_at + nbytes / float(self.rate_bytes_s[node])

    def unplan(self, node: int, nbytes: int) -> None:
        """A planned transfer begins now, or will not take place."""
        left = max(float(self.planned_bytes[node]) - nbytes, 0.0)
        if not left and self.planned_bytes[node]:
            self._plans -= 1
            self.planned_free_at[node] = 0.0
        self.planned_bytes[node] = left

    def waits_s(self, now: float | None) -> Floats:
        """Seconds that a transfer would wait at each card if it began now. [nodes + 1]"""
        busy_s: Floats = self.bytes / self.rate_bytes_s
        if now is None:
            return busy_s
        return np.minimum(busy_s, np.maximum(self.free_at - now, 0.0))

    def wait_s(self, node: int, now: float) -> float:
        """The same of one card."""
        busy_s = self.bytes.item(node) / self.rate_bytes_s.item(node)
        return min(busy_s, max(self.free_at.item(node) - now, 0.0))

    def later_waits_s(self, nodes: Numbers, begins_at: Floats | float) -> Floats:
        """Seconds that a transfer would wait at each of `nodes` [n] if it began at `begins_at`
        [n], behind what is in flight and all that is planned."""
        promised = self.bytes.take(nodes) + self.planned_bytes.take(nodes)
        free_at = np.maximum(self.free_at.take(nodes), self.planned_free_at.take(nodes))
        busy_s: Floats = promised / self.rate_bytes_s.take(nodes)
        return np.minimum(busy_s, np.maximum(free_at - begins_at, 0.0))

    def shared_waits_s(self, nodes: Numbers, begins_at: float, now: float) -> Floats:
        """The same of cards whose plans come from many, in no order: what is planned for later than
        `begins_at` is not in the way. So plans count by the share of the time from `now` on in
        which they keep the card busy; of a card that they fill, whole."""
        in_flight_s = self.waits_s(begins_at).take(nodes)
        if not self.planning:
            return in_flight_s
        waits_s = self.planned_shares(now).take(nodes) * self.later_waits_s(nodes, begins_at)
        both: Floats = np.maximum(in_flight_s, waits_s)
        return both

    def planned_shares(self, now: float) -> Floats:
        """The share of the time until its plans can be carried out in which each card is busy with
        them. [nodes + 1]"""
        busy_s, until_s = self.planned_bytes / self.rate_bytes_s, self.planned_free_at - now
        shares = np.zeros(len(busy_s))
        np.divide(busy_s, until_s, out=shares, where=until_s > 0)
        return np.minimum(shares, 1.0)
