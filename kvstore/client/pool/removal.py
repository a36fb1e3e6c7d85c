"""Removal from all nodes of a pool: who is asked, and when it has succeeded.

Asked are all nodes that are registered now, and those that this client has known and that the
directory lists no more: it may have lost its entries. When all have answered, the directory is
asked once more, and nodes that came meanwhile are asked too. So a node that was not asked was
registered after all that were had removed the blocks, and hears of it from them before it serves
(`replication/returning.py`).
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from ...deadlines import OVERRUN_S, until_s
from ...errors import (
    DeadlineExceeded,
    DirectoryUnavailable,
    NodeUnavailable,
    TiffinError,
)
from ...node.core import messages
from .pool_verbs import AskNode

if TYPE_CHECKING:
    from collections.abc import Collection

    from ...directory.base import NodeRecord
    from ...format.keys import Prefix
    from .verb_driver import VerbDriver

# How long to wait for a node that the directory does not list: nearly always it has stopped.
UNLISTED_S = 1.0


def remove_everywhere(
    driver: VerbDriver, prefix: Prefix, told: Collection[int | None], deadline: float
) -> int:
    """Have all nodes of the pool but those `told` already remove these blocks; the largest number
    of them that one node had.

    Raises the error of a registered node that did not answer or refused, DeadlineExceeded, and
    NodeUnavailable if the directory does not say which nodes there are. All that can be reached
    have removed the blocks even then.
    """
    if not len(prefix):
        return 0
    asked, count = set(told), 0
    failures: list[TiffinError] = []
    while True:
        registered, unknown = _registered(driver)
        others = {n: record for n, record in driver.seen().items() if n not in registered}
        fresh = {n: r for n, r in {**others, **registered}.items() if n not in asked}
        if not fresh:
            break
        asked |= fresh.keys()
        for number, reply in _ask(driver, prefix, fresh, registered, deadline).items():
            if isinstance(reply, messages.Done):
                count = max(count, reply.count)
            elif number in registered or not isinstance(reply, NodeUnavailable | DeadlineExceeded):
                failures.append(reply)
            else:  # it has left: if it returns, the others tell it
                driver.forget(fresh[number])
    if not (registered or others):
        reason = unknown or "the directory lists none"
        failures.append(NodeUnavailable(f"no node of the pool is known yet: {reason}"))
    elif unknown is not None:
        failures.append(NodeUnavailable(f"others than the known nodes may have it: {unknown}"))
    elif time.monotonic() > deadline + OVERRUN_S:
        failures.append(DeadlineExceeded("the removal took too long: a copy may have passed it by"))
    if failures:
        raise failures[0]
    return count


def _registered(driver: VerbDriver) -> tuple[dict[int, NodeRecord], DirectoryUnavailable | None]:
    """The nodes that are registered now; while that is not known, the latest ones, and why."""
    try:
        return driver.nodes_now(), None
    except DirectoryUnavailable as error:
        return driver.latest, error


def _ask(
    driver: VerbDriver,
    prefix: Prefix,
    nodes: dict[int, NodeRecord],
    registered: Collection[int],
    deadline: float,
) -> dict[int, Any]:
    """Have these nodes remove the blocks: replies or errors by number."""
    left_s = until_s(deadline)
    steps: list[Any] = []
    for number, record in nodes.items():
        wait_s = left_s if number in registered else min(left_s, UNLISTED_S)
        request = messages.Remove(0, prefix.key_bytes, left_s)
        steps.append(AskNode(number, request, wait_s, record))
    return dict(zip(nodes, driver.together(steps), strict=True))
