"""Requests of a client that make nodes copy blocks from each other: now, or in the background."""

from __future__ import annotations

import logging
import time
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import TYPE_CHECKING

from ....deadlines import until_s
from ....errors import ClientClosed, InvalidInput, NoRoom, TiffinError
from ....node.core import messages
from ...verbs.block_verbs import DEFAULT_TIMEOUT_S
from ..members import FixedMembers
from ..replica_choice import place

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ....format.keys import Prefix
    from ..verb_driver import VerbDriver

log = logging.getLogger(__name__)

# The most replications in the background queue. A client with more puts faster than its nodes can
# copy.
ORDERS_MAX = 64


def replicate_to(
    driver: VerbDriver,
    prefix: Prefix,
    target: int,
    holders: Sequence[Sequence[int]],
    deadline: float,
) -> int:
    """Have `target` copy the leading blocks of `prefix`, of which `holders[i]` have block i; how
    many it has in the end. If it has none, raises the last error of `target` or a source, and
    NoRoom if no node is known to have the first block."""
    count, failure = pull_from_any(driver, prefix, target, holders, deadline)
    if not count and len(prefix):
        raise failure or NoRoom("no other node is known to have the first block of this prefix")
    return count


def pull_from_any(
    driver: VerbDriver,
    prefix: Prefix,
    target: int,
    holders: Sequence[Sequence[int]],
    deadline: float,
) -> tuple[int, TiffinError | None]:
    """As `replicate_to`: how many blocks `target` has, and the last error on the way."""
    count, failure = 0, None
    while count < len(prefix):
        before = count
        for source in [n for n in holders[count] if n != target] or holders[count]:
            left_s = until_s(deadline)
            if failure is not None and not left_s:
                break  # each further source may cost another GRACE_S
            try:
                count += pull(driver, prefix[count:], source, target, left_s)
            except TiffinError as error:
                failure = error
            if count > before:
                break
        if count == before:
            break
    return count, failure


def replicate_from(
    driver: VerbDriver, prefix: Prefix, source: int, count: int, without: set[int]
) -> None:
    """Have `count` nodes copy `prefix` from `source`; best effort: failures are only logged."""
    size = len(prefix) * prefix.schema.extent_bytes
    # One candidate more than needed, in case a node does not take the blocks.
    able = place(driver.nodes(), count + 1, size, driver.dice, without=without | {source})
    for target in able:
        try:
            copied = pull(driver, prefix, source, target, DEFAULT_TIMEOUT_S)
        except TiffinError as error:
            log.warning("not replicated to node %d: %s", target, error)
            continue
        count -= copied == len(prefix)
        if not count:
            return
    log.warning("%d replicas too few of a prompt of %d blocks", count, len(prefix))


def pull(driver: VerbDriver, prefix: Prefix, source: int, target: int, timeout_s: float) -> int:
    """Have `target` copy `prefix` from `source`; how many leading blocks it has afterwards. Raises
    InvalidInput if one of them is in no directory."""
    deadline = time.monotonic() + timeout_s
    if isinstance(driver.members, FixedMembers):  # its numbers mean nothing to the nodes
        _number_of(driver, target, until_s(deadline))
        source = _number_of(driver, source, until_s(deadline))
    left_s = until_s(deadline)
    request = messages.Pull(0, prefix.key_bytes, prefix.parent, prefix.start, source, left_s)
    return int(driver.ask(target, request, left_s).count)


def _number_of(driver: VerbDriver, listed: int, timeout_s: float) -> int:
    """The number, in the nodes' own directory, of a node of a fixed list."""
    numbers = driver.ask(listed, messages.Statistics(0), timeout_s).numbers
    number = numbers.get("directory", {}).get("number")
    if not number:
        raise InvalidInput(
            f"node {driver.record(listed).name} is in no directory: nodes copy from each other "
            "only in a pool that has one (tiffin node --directory)"
        )
    return int(number)


class Orders:
    """A queue of replications that one background thread runs in order."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="tiffin-replicate")
        self._ordered: list[Future[None]] = []

    def add(self, order: Callable[[], None]) -> None:
        """Queue a replication; it is dropped, with a warning in the log, if ORDERS_MAX wait
        already. Raises ClientClosed."""

        def run() -> None:
            try:
                order()
            except TiffinError as error:
                log.warning("a replication failed: %s", error)

        self._ordered = [future for future in self._ordered if not future.done()]
        if len(self._ordered) < ORDERS_MAX:
            try:
                self._ordered.append(self._thread.submit(run))
            except RuntimeError as error:  # it was shut down
                raise ClientClosed("this client is closed; open another") from error
        else:
            log.warning("a replication was not ordered: %d wait already", ORDERS_MAX)

    def finish(self, timeout_s: float) -> None:
        """Wait up to `timeout_s` for the replications in the queue."""
        wait(self._ordered, timeout_s)

    def close(self) -> None:
        """Drop the replications that have not begun, and wait for the running one."""
        self._thread.shutdown(wait=True, cancel_futures=True)
