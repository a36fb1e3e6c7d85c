"""What a node remembers of removals, so that no copy brings a removed block back. Pure.

A removal goes to all nodes of a pool, one after the other reaches it. A node that removed the block
early could be the target of a copy from one that has yet to remove it. So a node keeps the keys of
a removal barred to copies, and to copies alone, until the removal is over at all nodes or has
failed: for the removal's own timeout, from when it came, and SLACK_S. See
docs/decisions/removals.md.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING

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
