"""The network: transfers between nodes, each with one network card.

A card's bandwidth is shared equally by what it sends, and by what it receives; a transfer goes at
the lesser of both shares. So several senders to one receiver (incast) slow down each other, and a
node that many read from is slow for all of them.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable

    from ..clock import ScheduledEvent, VirtualClock

# What is left of a transfer is rounding, from so many bytes on down.
_NOTHING_BYTES = 1e-3


class CompletedTransfer(NamedTuple):
    """A transfer that has arrived, after `seconds`, latency included."""

    source: str
    target: str
    nbytes: float
    seconds: float


class Transfer:
    """Bytes on their way from `source` to `target`, sent at `sent_s`."""

    __slots__ = (
        *("done", "event", "left_bytes", "nbytes", "rate_bytes_s", "sent_s", "since_s"),
        *("source", "target"),
    )

    def __init__(
        self, source: str, target: str, nbytes: float, sent_s: float, done: Callable[[], None]
    ) -> None:
        self.source, self.target, self.done = source, target, done
        self.nbytes, self.left_bytes, self.sent_s = nbytes, nbytes, sent_s
        self.rate_bytes_s, self.since_s = 0.0, 0.0
        self.event: ScheduledEvent | None = None


class Network:
    """All cards, of `bandwidth_bytes_s` each way. Within a node nothing takes time."""

    def __init__(self, clock: VirtualClock, bandwidth_bytes_s: float, latency_s: float) -> None:
        self._clock, self._bandwidth, self._latency_s = clock, bandwidth_bytes_s, latency_s
        self._sent: dict[str, dict[Transfer, None]] = {}
        self._received: dict[str, dict[Transfer, None]] = {}
        self.moved_bytes: Counter[tuple[str, str]] = Counter()
        self.completed: list[CompletedTransfer] = []

    def send(self, source: str, target: str, nbytes: float, done: Callable[[], None]) -> None:
        """Send bytes, and call `done` when they have arrived."""
        if source == target or nbytes <= 0:
            self._clock.after(0.0, done)
            return
        transfer = Transfer(source, target, nbytes, self._clock.now_s, done)
        self.moved_bytes[source, target] += round(nbytes)
        self._clock.after(self._latency_s, lambda: self._begin(transfer))

    def next_rate_bytes_s(self, source: str, target: str) -> float:
        """At which one more transfer would go, if it began now."""
        sent, received = self._sent.get(source, ()), self._received.get(target, ())
        return self._bandwidth / (1 + max(len(sent), len(received)))

    def sending(self, source: str) -> int:
        """How many transfers share a node's card to send."""
        return len(self._sent.get(source, ()))

    def left_s(self, source: str, target: str) -> float:
        """Until all has arrived that is on its way between the two, at the rates of now."""
        left_s, now = 0.0, self._clock.now_s
        for one in self._sent.get(source, ()):
            if one.target == target:
                end_s = one.since_s + one.left_bytes / one.rate_bytes_s
                left_s = max(left_s, end_s - now)
        return left_s

    def _begin(self, transfer: Transfer) -> None:
        transfer.since_s = self._clock.now_s
        self._sent.setdefault(transfer.source, {})[transfer] = None
        self._received.setdefault(transfer.target, {})[transfer] = None
        self._share(transfer)

    def _end(self, transfer: Transfer) -> None:
        del self._sent[transfer.source][transfer]
        del self._received[transfer.target][transfer]
        self._share(transfer)
        seconds = self._clock.now_s - transfer.sent_s
        self.completed.append(
            CompletedTransfer(transfer.source, transfer.target, transfer.nbytes, seconds)
        )
        transfer.done()

    def _share(self, changed: Transfer) -> None:
        """Set the rates of all that shares a card with one that has begun or ended."""
        sent, received = self._sent[changed.source], self._received[changed.target]
        for transfer in [*sent, *(one for one in received if one.source != changed.source)]:
            rivals = max(len(self._sent[transfer.source]), len(self._received[transfer.target]))
            self._set_rate(transfer, self._bandwidth / rivals)

    def _set_rate(self, transfer: Transfer, rate_bytes_s: float) -> None:
        if transfer.rate_bytes_s == rate_bytes_s:
            return
        now = self._clock.now_s
        transfer.left_bytes -= transfer.rate_bytes_s * (now - transfer.since_s)
        transfer.since_s, transfer.rate_bytes_s = now, rate_bytes_s
        if transfer.event is not None:
            transfer.event.cancel()
        left_s = max(0.0, transfer.left_bytes - _NOTHING_BYTES) / rate_bytes_s
        transfer.event = self._clock.after(left_s, lambda: self._end(transfer))
