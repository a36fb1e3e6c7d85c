"""What nodes are told to do with blocks, and what there is to know before. Pure records.

`replication.py` and `draining.py` decide on orders, `feeds/orders.py` carries them out over
connections to the nodes.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from .records import KEY_BYTES

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence

    from .index import Match
    from .popularity import HotPrefix, Popularity

# What stands for the key before block 0.
NO_PARENT = bytes(KEY_BYTES)
# As many blocks as a node leases from another at a time.
ORDER_BLOCKS_MAX = 64
# Of one order; as long as a node gives another in an evacuation.
ORDER_TIMEOUT_S = 60.0
# An order that nobody has reported on for so long is taken for lost.
LOST_S = 3 * ORDER_TIMEOUT_S


@dataclass(frozen=True, slots=True)
class NodeSpace:
    """What is known of a kvstore node."""

    name: str
    capacity_bytes: int
    free_bytes: int
    draining: bool = False


@dataclass(frozen=True, slots=True)
class Copy:
    """Let `target` copy these consecutive blocks from `source`; both are nodes' names. `parent` is
    the key before the first (NO_PARENT for block 0), `depth` its index in the prompt."""

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
    """`node` need not keep these blocks for us: others have them."""

    number: int
    keys: tuple[bytes, ...]
    node: str
    reason: str


@dataclass(frozen=True, slots=True)
class Admit:
    """`node` takes new blocks (`on`), or takes none because it is being drained."""

    number: int
    node: str
    on: bool


@dataclass(frozen=True, slots=True)
class Evacuate:
    """Let `node` hand over whatever no other node has, for up to `timeout_s`."""

    number: int
    node: str
    timeout_s: float


Order = Copy | Drop | Admit | Evacuate


@dataclass(frozen=True, slots=True)
class Ended:
    """What became of an order. `blocks`: how many leading ones of a Copy's keys the target has
    (another order: how many blocks it was done to); `left` of an Evacuate are those that no other
    node has yet. `error` names what went wrong, "" if nothing did. Nobody tries again but who
    ordered."""

    number: int
    blocks: int = 0
    error: str = ""
    left: int = 0


class Holders(Protocol):
    """What is needed of `index.PrefixIndex`."""

    def match(self, keys: Sequence[bytes]) -> Match:
        """Who has which leading blocks."""

    def holders_of(self, key: bytes) -> list[int]:
        """The numbers of the holders of one block."""

    def label(self, number: int) -> str:
        """ "name/tier" of a holder."""


@dataclass(slots=True)
class Pool:
    """The nodes as they are at one moment; the next one needs another.

    `seconds(source, target, nbytes)` is how long a copy takes; `serving(model)` names the nodes
    that instances of a model are beside (None: all of them).
    """

    nodes: Mapping[str, NodeSpace]
    index: Holders
    popularity: Popularity
    seconds: Callable[[str, str, int], float] = lambda source, target, nbytes: 0.0
    serving: Callable[[str], Collection[str]] | None = None
    _names: dict[int, tuple[str, ...]] = field(default_factory=dict, repr=False)
    _hot: tuple[int, float, list[HotPrefix]] = field(default=(-1, 0.0, []), repr=False)
    _takers: dict[str, list[str]] = field(default_factory=dict, repr=False)

    def hot(self, n: int, now: float) -> list[HotPrefix]:
        """The `n` most popular prefixes, looked up once for all nodes that are drained."""
        if self._hot[:2] != (n, now):
            self._hot = n, now, self.popularity.hot(n, now)
        return self._hot[2]

    def holders(self, key: bytes) -> set[str]:
        """The nodes that have a block in DRAM or on NVMe. Engines' own memory is not a copy."""
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

    def nodes_of(self, holders: int) -> set[str]:
        """The nodes among holders, a bit each."""
        return {name for number in bits(holders) for name in self._node(number)}

    def _node(self, number: int) -> tuple[str, ...]:
        """The node that a holder is a tier of; none for an engine's memory."""
        found = self._names.get(number)
        if found is None:
            name, _, tier = self.index.label(number).rpartition("/")
            found = (name,) if tier in ("dram", "nvme") and name in self.nodes else ()
            self._names[number] = found
        return found

    def takers(self, model: str) -> list[str]:
        """The nodes that may be given copies of a model's blocks, by name."""
        found = self._takers.get(model)
        if found is None:
            names = self.nodes if self.serving is None else self.serving(model)
            found = sorted(n for n in names if n in self.nodes and not self.nodes[n].draining)
            self._takers[model] = found
        return found


def bits(mask: int) -> list[int]:
    """The numbers of the bits that are set."""
    found = []
    while mask:
        low = mask & -mask
        found.append(low.bit_length() - 1)
        mask ^= low
    return found
