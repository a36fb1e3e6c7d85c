"""What is known of the instances from the conductor's last decisions, to place requests by when it
gives none: its admission and its prefixes, as they were. Pure.

*Admission*: an instance gets at most as many requests of this gateway at a time as the conductor
has had it run of late, and at least one. So a gateway without its conductor never admits more than
with it, and one whose load grows meanwhile refuses what is beyond. *Prefixes*: a prompt goes where
the longest prefix of it went last.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Sequence

    from .instance_cache import InstanceRoute

# Peaks are those of this and of the last interval of so long: one request that came just then does
# not stand for the load, nor does that of an hour ago.
INTERVAL_S = 60.0
# Prefixes that are remembered; each of some 200 bytes.
PREFIXES_MAX = 16_384


class LastKnown:
    """See the module. `now` is monotonic seconds. For one event loop."""

    def __init__(self) -> None:
        self._running: Counter[str] = Counter()
        self._peaks: Counter[str] = Counter()
        self._earlier: Counter[str] = Counter()
        self._since = float("-inf")
        self._prefixes: OrderedDict[bytes, str] = OrderedDict()

    def began(self, route: InstanceRoute, now: float, *, decided: bool) -> None:
        """A request begins to run on this route; `decided` by the conductor."""
        if decided and now - self._since >= INTERVAL_S:
            self._earlier, self._peaks = self._peaks, self._running.copy()
            self._since = now
        for name in set(route.names):
            self._running[name] += 1
            if decided:
                self._peaks[name] = max(self._peaks[name], self._running[name])

    def ended(self, route: InstanceRoute) -> None:
        """A request that had begun on this route has ended."""
        for name in set(route.names):
            self._running[name] -= 1
            if not self._running[name]:
                del self._running[name]

    def full(self, names: Iterable[str]) -> frozenset[str]:
        """Those of the instances that run as many requests as the conductor has last admitted."""
        return frozenset(name for name in names if self._running[name] >= self._limit(name))

    def learn(self, keys: Sequence[bytes], instance: str) -> None:
        """The conductor had this instance prefill a prompt with these block keys."""
        for depth in _depths(len(keys)):
            key = keys[depth - 1]
            self._prefixes[key] = instance
            self._prefixes.move_to_end(key)
        while len(self._prefixes) > PREFIXES_MAX:
            self._prefixes.popitem(last=False)

    def nearest(self, keys: Sequence[bytes], among: Collection[str]) -> str:
        """Which of these instances has prefilled the longest prefix of the prompt last; "" if
        that is not known."""
        for depth in reversed(_depths(len(keys))):
            found = self._prefixes.get(keys[depth - 1])
            if found is not None and found in among:
                return found
        return ""

    def _limit(self, name: str) -> int:
        return max(1, self._peaks[name], self._earlier[name])


def _depths(blocks: int) -> list[int]:
    """At which depths, in blocks, the prefixes of a prompt are remembered: at powers of two, and
    all of it. So a prompt takes few places, and half of what is shared is found at least."""
    found = []
    depth = 1
    while depth < blocks:
        found.append(depth)
        depth *= 2
    return [*found, blocks] if blocks else []
