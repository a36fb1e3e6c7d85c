"""What a node remembers of removals, so that nothing brings a removed block back. Pure.

A removal goes to all nodes of a pool, one after the other reaches it. A node that removed the block
early could be the target of a copy from one that has yet to remove it. So a node keeps the keys of
a removal barred to copies, and to copies alone, until the removal is over at all nodes or has
failed: for the removal's own timeout, from when it came, and SLACK_S.

A node that was away, with its NVMe, has missed removals. So each node keeps a log of removals, and
which slabs were in the pool when, and tells a node that returns. See docs/decisions/removals.md.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING

from . import messages
from .event_log import EventLog

if TYPE_CHECKING:
    from collections.abc import Iterable

# A client that is told that its removal succeeded is told `deadlines.OVERRUN_S` after its deadline
# at the latest. The rest is for clocks that do not run at the same rate.
SLACK_S = 5.0

# The most keys that are barred at a time: prompts of 33 million tokens, some 10 MiB.
BARRED_MAX = 65_536


class BarredKeys:
    """The keys that copies may not bring, each until a time of the node's clock. If there are more
    than `keys_max`, the oldest are forgotten, and until their times no copy may bring anything."""

    def __init__(self, keys_max: int = BARRED_MAX) -> None:
        self._keys_max = keys_max
        self._until: OrderedDict[bytes, float] = OrderedDict()  # the newest removal last
        self._all_until = 0.0

    def __len__(self) -> int:
        return len(self._until)

    def bar(self, keys: Iterable[bytes], now: float, until: float) -> None:
        """Bar these keys until then."""
        for key in keys:
            self._until[key] = max(until, self._until.pop(key, 0.0))
        while self._until:
            key, ends = next(iter(self._until.items()))
            if ends > now:
                if len(self._until) <= self._keys_max:
                    break
                self._all_until = max(self._all_until, ends)
            del self._until[key]

    def bars(self, key: bytes, now: float) -> bool:
        """Whether a copy may not bring this block now."""
        return now < self._all_until or now < self._until.get(key, 0.0)


# The most removals that are remembered, and the most slabs; as many keys as are barred. A node that
# has missed more starts with an empty NVMe tier.
REMEMBERED_MAX = 65_536
SLABS_MAX = 4096


class RemovalLog:
    """The keys of the latest removals, in their order, and up to which of them each slab's node was
    in the pool: all that came later it may have missed."""

    def __init__(self, remembered_max: int = REMEMBERED_MAX) -> None:
        self._log = EventLog(remembered_max)
        self._remembered_max = remembered_max
        self._seen: OrderedDict[bytes, int] = OrderedDict()  # seq by slab, seen last at the end
        self._began_at = 0  # what was removed up to here is not remembered

    @property
    def seq(self) -> int:
        """The number of the last removal of a key; the first is 1."""
        return self._log.seq

    @property
    def _forgotten(self) -> int:
        return max(self._began_at, self.seq - self._remembered_max)

    def note(self, keys: Iterable[bytes]) -> None:
        """Remember that these keys were removed."""
        for key in keys:
            self._log.removed(key)

    def keys(self) -> list[bytes]:
        """All keys that are remembered."""
        found = self._log.since(max(0, self.seq - self._remembered_max), self._remembered_max)
        assert found is not None
        return [found.keys[at : at + 16] for at in range(0, len(found.keys), 16)]

    def learn(self, keys: Iterable[bytes], *, whole: bool) -> None:
        """Remember what other nodes told. Unless that was `whole`, they had forgotten some."""
        known = set(self.keys())
        self.note(key for key in dict.fromkeys(keys) if key not in known)
        if not whole:
            self.note([bytes(16)])  # takes a number, for what is not known; no block has this key
            self._began_at = self.seq

    def saw(self, slabs: Iterable[bytes], seq: int) -> None:
        """Note that the nodes of these slabs were in the pool, and had missed nothing, when `seq`
        was the last removal."""
        for slab in slabs:
            self._seen[slab] = max(seq, self._seen.pop(slab, 0))
        while len(self._seen) > SLABS_MAX:
            self._seen.popitem(last=False)

    def page(self, request: messages.Events) -> messages.EventPage:
        """The reply to an `Events` request for removals: all that are remembered after
        `request.after`, those marked that `request.slab` may have missed."""
        missed_after = self._seen.get(request.slab, 0)
        oldest = max(0, self.seq - self._remembered_max)
        # From the oldest one also for a number that is of another life of this node.
        after = request.after if oldest <= request.after <= self.seq else oldest
        found = self._log.since(after, messages.EVENTS_MAX)
        assert found is not None
        numbers = range(found.first_seq, found.last_seq + 1)
        return messages.EventPage(
            request.id,
            found.first_seq,
            bytes(number > missed_after for number in numbers),
            found.keys,
            gap=self._forgotten > 0,
            removals=True,
            whole=missed_after >= self._forgotten,
        )
