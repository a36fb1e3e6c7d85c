"""Orders to kvstore nodes about blocks, and the view of the pool behind them. Pure records.

`replication.py` and `draining.py` create the orders; `service/order_sender.py` carries them out
over connections to the nodes.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Protocol

from ..records import KEY_BYTES
from .popularity import salts_of

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence

    from ..records import Fetch
    from ..state.prefix_index import PrefixMatch
    from ..state.sliced_work import Work
    from .popularity import Group, HotPrefix, Popularity

# The parent key of block 0.
NO_PARENT = bytes(KEY_BYTES)
# The most blocks in one Copy: as many as a node leases from another at a time.
ORDER_BLOCKS_MAX = 64
# Timeout of one order; the same as a node's timeout for another node in an evacuation.
ORDER_TIMEOUT_S = 60.0
# The number of orders whose outcome nobody waits for: who reads the blocks finds what has come.
UNWATCHED = 0
# Within how many times the predicted time what is fetched should have come, and how much longer at
# least; then an engine reads what is elsewhere itself.
FETCH_FACTOR, FETCH_MORE_S = 2.0, 0.05
# An order without a report of its outcome for this long counts as lost.
LOST_S = 3 * ORDER_TIMEOUT_S


@dataclass(frozen=True, slots=True)
class NodeSpace:
    """Capacity and state of a kvstore node, from the directory."""

    name: str
    capacity_bytes: int
    free_bytes: int
    draining: bool = False


@dataclass(frozen=True, slots=True)
class Copy:
    """Order the node `target` to copy these consecutive blocks from the node `source`. `parent` is
    the key before the first block (NO_PARENT for block 0), `depth` the first block's index in the
    prompt."""

    number: int
    keys: tuple[bytes, ...]
    parent: bytes
    depth: int
    source: str
    target: str
    nbytes: int
    reason: str


@dataclass(frozen=True, slots=True)
class Drop:
    """Tell `node` that it may evict these blocks: other nodes have replicas of them."""

    number: int
    keys: tuple[bytes, ...]
    node: str
    reason: str


@dataclass(frozen=True, slots=True)
class Admit:
    """Order `node` to accept new blocks (`on`), or to refuse them because it is being drained."""

    number: int
    node: str
    on: bool


@dataclass(frozen=True, slots=True)
class Evacuate:
    """Order `node` to hand over every block that no other node has, for up to `timeout_s`."""

    number: int
    node: str
    timeout_s: float


def fetch_orders(
    fetches: Sequence[Fetch], keys: Sequence[bytes], node: str, home_of: Callable[[str], str]
) -> list[Copy]:
    """The orders for `node` to copy what a decision counts on at other nodes, for an engine that
    will ask `node`. What is in another engine's HBM can be copied where that saves it: `home_of`
    gives an instance's node, or ""."""
    orders: list[Copy] = []
    for one in fetches if node else ():
        source = home_of(one.source) if one.tier == "hbm" else one.source
        if source in ("", node):
            continue
        before = orders[-1] if orders else None
        part = tuple(keys[one.start : one.stop])
        if before is not None and (before.source, before.depth + len(before.keys)) == (
            source,
            one.start,
        ):
            orders[-1] = replace(before, keys=before.keys + part, nbytes=before.nbytes + one.nbytes)
            continue
        parent = keys[one.start - 1] if one.start else NO_PARENT
        orders.append(Copy(UNWATCHED, part, parent, one.start, source, node, one.nbytes, "fetch"))
    return orders


Order = Copy | Drop | Admit | Evacuate


@dataclass(frozen=True, slots=True)
class Ended:
    """The outcome of an order. `blocks`: of a Copy, how many leading blocks of its keys the target
    has; of another order, how many blocks it was applied to. `left`: blocks of an Evacuate that no
    other node has yet. `error` names the failure, "" if there was none. Only the code that created
    the order retries it."""

    number: int
    blocks: int = 0
    error: str = ""
    left: int = 0


class BlockHolders(Protocol):
    """The part of `state.prefix_index.PrefixIndex` that this package uses."""

    def match(self, keys: Sequence[bytes]) -> PrefixMatch:
        """The holders of the leading blocks, as runs with the same holders."""

    def holders_of(self, key: bytes) -> list[int]:
        """The numbers of the holders of one block."""

    def label(self, number: int) -> str:
        """The label "name/tier" of a holder."""


def _no_seconds(sources: Sequence[str], target: str, nbytes: int) -> Sequence[float]:
    return [0.0] * len(sources)


@dataclass(slots=True)
class PoolView:
    """A snapshot of the nodes for one tick; it caches look-ups, so the next tick needs a new one.

    `seconds(sources, target, nbytes)` is how long a copy from each source takes; `serving(group)`
    names the nodes that run beside instances of a group (None: all nodes).
    """

    nodes: Mapping[str, NodeSpace]
    index: BlockHolders
    popularity: Popularity
    seconds: Callable[[Sequence[str], str, int], Sequence[float]] = _no_seconds
    serving: Callable[[Group], Collection[str]] | None = None
    _names: dict[int, tuple[str, ...]] = field(default_factory=dict, repr=False)
    _hot: tuple[int, float, list[HotPrefix]] = field(default=(-1, 0.0, []), repr=False)
    _takers: dict[Group, Takers] = field(default_factory=dict, repr=False)

    def finding_hot(self, n: int, now: float) -> Work[list[HotPrefix]]:
        """The `n` most popular prefixes, looked up once for all drains of this tick."""
        if self._hot[:2] != (n, now):
            found = yield from self.popularity.finding_hot(n, now)
            self._hot = n, now, found
        return self._hot[2]

    def holders(self, key: bytes) -> set[str]:
        """The nodes that have a replica of a block in DRAM or on NVMe. A block in an engine's own
        memory (HBM) does not count as a replica."""
        return {name for number in self.index.holders_of(key) for name in self._node(number)}

    def leading(self, keys: Sequence[bytes]) -> dict[str, int]:
        """How many leading blocks each node has; nodes without the first are left out."""
        lengths: dict[str, int] = {}
        alive: set[str] | None = None
        for run in self.index.match(keys).runs:
            names = self.nodes_of(run.holders)
            alive = names if alive is None else alive & names
            if not alive:
                break
            lengths.update(dict.fromkeys(alive, run.stop))
        return lengths

    def lacked(self, keys: tuple[bytes, ...], node: str) -> tuple[bytes, ...]:
        """The keys before the first of `keys` that a node has."""
        start = 0
        for run in self.index.match(keys).runs:
            if node in self.nodes_of(run.holders):
                return keys[:start]
            start = run.stop
        return keys

    def nodes_of(self, holders: int) -> set[str]:
        """The nodes among `holders`, a mask with one bit per holder."""
        return {name for number in bits(holders) for name in self._node(number)}

    def _node(self, number: int) -> tuple[str, ...]:
        """The node whose tier a holder is, as a tuple of one; empty for an engine's memory."""
        found = self._names.get(number)
        if found is None:
            name, _, tier = self.index.label(number).rpartition("/")
            found = (name,) if tier in ("dram", "nvme") and name in self.nodes else ()
            self._names[number] = found
        return found

    def takers(self, group: Group) -> list[str]:
        """Candidate targets for copies of a group's blocks: node names, sorted."""
        return self.index_of_takers(group).names

    def index_of_takers(self, group: Group) -> Takers:
        """The candidate targets with their salts and free space, cached per group."""
        found = self._takers.get(group)
        if found is None:
            nodes = self.nodes
            names = nodes if self.serving is None else self.serving(group)
            found = Takers(sorted(n for n in names if n in nodes and not nodes[n].draining), nodes)
            self._takers[group] = found
        return found


class Takers:
    """Candidate target nodes for copies, evaluated once for all prefixes of a group."""

    def __init__(self, names: list[str], nodes: Mapping[str, NodeSpace]) -> None:
        self.names = names
        self.known = frozenset(names)
        self.salts = salts_of(names)
        self._nodes = nodes
        self._by_room: list[str] | None = None

    def share_free(self, name: str) -> float:
        """The free share of a node's memory."""
        node = self._nodes[name]
        return node.free_bytes / max(node.capacity_bytes, 1)

    def capacity_bytes(self, name: str) -> int:
        """The size of a node's memory."""
        return self._nodes[name].capacity_bytes

    def by_room(self, able: Callable[[str], bool]) -> list[str]:
        """The candidates that were `able` at the first call (later calls return that list), the
        largest free share first."""
        if self._by_room is None:
            named = filter(able, self.names)
            self._by_room = sorted(named, key=lambda name: (-self.share_free(name), name))
        return self._by_room


def bits(mask: int) -> list[int]:
    """The numbers of the bits that are set."""
    found = []
    while mask:
        low = mask & -mask
        found.append(low.bit_length() - 1)
        mask ^= low
    return found
