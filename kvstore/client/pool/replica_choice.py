"""Replica choice: which node each block is read from, and which nodes a put goes to. Pure."""

from __future__ import annotations

import math
from hashlib import blake2b
from typing import TYPE_CHECKING, NamedTuple, Protocol

from ...errors import NoRoom

if TYPE_CHECKING:
    import random
    from collections.abc import Collection, Sequence

    from ...directory.base import NodeRecord
    from ...format.keys import Prefix


# The cost of a node that was silent for a moment and was given up: more than that of any node that
# answers, so that it is the last candidate, and the caller waits for it.
LATE_S = 1e6


class Costs(Protocol):
    """The expected costs of reads from nodes."""

    def seconds(self, node: int, nbytes: int) -> float:
        """How long reading `nbytes` from `node` should take; LATE_S and more if it was given up,
        infinite if it is taken for dead."""


class ReplicaRun(NamedTuple):
    """Consecutive blocks [start, stop) of a prefix to be read from one node. `others`: whether each
    of them has another holder that answers, as far as the client knows."""

    node: int
    start: int
    stop: int
    others: bool


def plan_reads(
    holders: Sequence[Collection[int]], start: int, block_bytes: int, costs: Costs
) -> list[ReplicaRun]:
    """Runs that cover the leading blocks which have a holder.

    `holders[i]` are the nodes to ask for block `start + i`. A run stays with its node as long as
    that node holds the next block: a change of node costs a second request, which is more than a
    slightly better link gains.
    """
    runs: list[ReplicaRun] = []
    before: Collection[int] = ()  # the holders of the block before: nearly always the same nodes
    for position, nodes in enumerate(holders, start=start):
        if not nodes:
            break
        last = runs[-1] if runs else None
        if last is not None and last.node in nodes:
            others = last.others and (nodes == before or _elsewhere(nodes, last.node, costs))
            runs[-1] = ReplicaRun(last.node, last.start, position + 1, others)
            before = nodes
            continue
        node = cheapest(nodes, block_bytes, costs)
        if node is None:
            break
        others = _elsewhere(nodes, node, costs)
        runs.append(ReplicaRun(node, position, position + 1, others))
        before = nodes
    return runs


def _elsewhere(nodes: Collection[int], node: int, costs: Costs) -> bool:
    """Whether another of these nodes answers: a reader that gives up a node which stalls for a
    moment must not be left with one that does not answer either."""
    return len(nodes) > 1 and any(
        other != node and costs.seconds(other, 0) < LATE_S for other in nodes
    )


def cheapest(nodes: Collection[int], nbytes: int, costs: Costs) -> int | None:
    """The node that should answer first; None if all are taken for dead."""
    best, least_s = None, math.inf
    for node in sorted(nodes) if len(nodes) > 1 else nodes:
        seconds = costs.seconds(node, nbytes)
        if seconds < least_s:
            best, least_s = node, seconds
    return best


def place(
    nodes: dict[int, NodeRecord],
    count: int,
    nbytes: int,
    dice: random.Random,
    *,
    first: int | None = None,
    without: Collection[int] = (),
) -> list[int]:
    """Up to `count` different nodes for a new block of a prompt that takes `nbytes`, the best
    first.

    `first` (home) comes first if it is among the candidates. Each other node is the one with more
    free bytes of two candidates chosen at random: almost as even as comparing all, and no herd on
    the emptiest (Mitzenmacher, "The power of two choices in randomized load balancing", 2001).
    Draining nodes and those in `without` are no candidates.
    """
    chosen = []
    able = [n for n, r in nodes.items() if not r.draining and n not in without]
    if first in able:
        chosen.append(first)
        able.remove(first)
    while able and len(chosen) < count:
        pair = dice.sample(able, min(2, len(able)))
        best = max(pair, key=lambda node: nodes[node].free_bytes)
        chosen.append(best)
        able.remove(best)
    return [node for node in chosen if node is not None]


def shard_node(nodes: dict[int, NodeRecord], prefix: Prefix) -> int:
    """The number of the node that every rank with the same list of nodes writes `prefix` to.

    The node with the highest hash of (first key, address) wins (rendezvous hashing): ranks need not
    communicate, and a node that joins or leaves moves only its own prefixes. A rank that sees other
    nodes than the other ranks may write to another node; then neither block becomes visible, and
    both reservations expire. Raises NoRoom.
    """
    able = {number: record for number, record in nodes.items() if not record.draining}
    if not able:
        raise NoRoom("no node of the pool takes blocks; look at `tiffin status`")
    first = prefix.keys[0] if len(prefix) else prefix.parent

    def weight(number: int) -> bytes:
        return blake2b(first + able[number].address.encode(), digest_size=16).digest()

    return max(able, key=weight)
