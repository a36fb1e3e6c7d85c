"""How a node that returns to its pool hears of the removals that it missed.

It was away because it had stopped, and comes back with its NVMe; or the directory has lost it, or
had no answer from it for too long, and it has registered anew. Then it asks all nodes that are
registered, after it has registered itself. Who removes blocks asks for the registered nodes when
all that were asked have answered (`pool/removal.py`): so either this node was asked, or those that
were know of the removal when this node asks them. See docs/decisions/removals.md.
"""

from __future__ import annotations

import logging
import math
import threading
from typing import TYPE_CHECKING, NamedTuple

from ....errors import TiffinError
from ....node.core import messages
from ....node.core.node_core import split_keys
from ..pool_verbs import AskNode

if TYPE_CHECKING:
    from collections.abc import Callable

    from ....directory.base import Directory, NodeRecord
    from ....node.node import Node
    from ..verb_driver import VerbDriver

log = logging.getLogger(__name__)

ASK_S = 2.0
# How long to wait for a registered node that does not answer, if another has told everything: one
# that is gone has left the directory by then.
PATIENCE_S = 30.0


class _Told(NamedTuple):
    """What one node remembers: all keys, those that this node may have missed, whether that is all
    that it may have missed, and whether the other node has forgotten some."""

    keys: list[bytes]
    missed: list[bytes]
    whole: bool
    forgot: bool


class Returning:
    """Keeps one node up to date about removals. `step` is called again and again, by one thread."""

    def __init__(
        self, node: Node, directory: Directory, driver: VerbDriver, number: Callable[[], int]
    ) -> None:
        self._node = node
        self._directory = directory
        self._driver = driver
        self._number = number
        self._returned_as = 0
        self._since = math.inf
        # Set once the node takes copies, or when it closes.
        self.returned = threading.Event()

    @property
    def current(self) -> bool:
        """Whether the node has heard of all removals since it has its number."""
        return self._number() == self._returned_as != 0

    def step(self, now: float) -> None:
        """Ask the other nodes, if this one has registered anew; else note who is in the pool.
        Raises DirectoryUnavailable."""
        number = self._number()
        if not number:
            return
        seq = self._node.removals()
        nodes = self._directory.nodes(fresh=True)
        mine = nodes.get(number)
        if mine is None:
            return
        others = {n: r for n, r in nodes.items() if r.address != mine.address}
        if number == self._returned_as:
            seen = [bytes.fromhex(record.slab) for record in others.values() if record.slab]
            self._node.removals(seen, seq)
            return
        self._since = min(self._since, now)
        if self._ask(others, late=now >= self._since + PATIENCE_S):
            self._returned_as, self._since = number, math.inf
            self.returned.set()

    def _ask(self, others: dict[int, NodeRecord], *, late: bool) -> bool:
        """Ask these nodes, and tell this one; False if it is to be done again."""
        told = [self._told_by(number, record) for number, record in others.items()]
        answers = [answer for answer in told if answer is not None]
        if len(answers) < len(told) and not (late and any(answer.whole for answer in answers)):
            return False
        self._node.catch_up(
            [key for answer in answers for key in answer.keys],
            [key for answer in answers for key in answer.missed],
            whole=not any(a.forgot for a in answers) or any(a.whole for a in answers),
        )
        return True

    def _told_by(self, number: int, record: NodeRecord) -> _Told | None:
        """What this node remembers; None if it does not answer."""
        keys: list[bytes] = []
        missed: list[bytes] = []
        after = 0
        while True:
            request = messages.Events(0, after, removals=True, slab=self._node.slab)
            (page,) = self._driver.together([AskNode(number, request, ASK_S, record)])
            if isinstance(page, TiffinError):
                log.info("node %s does not tell what was removed: %s", record.name, page)
                return None
            if not page.removals:
                return _Told([], [], whole=False, forgot=False)
            if not page.keys:
                return _Told(keys, missed, page.whole, page.gap)
            names = split_keys(page.keys)
            keys += names
            missed += [name for name, is_news in zip(names, page.added, strict=False) if is_news]
            after = page.first + len(names) - 1
