"""A simulated pool: nodes that hold keys, prompts that come, orders carried out at once."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

from tiffin.conductor.pool.orders import Admit, Copy, Drop, Ended, Evacuate, NodeSpace, PoolView
from tiffin.conductor.pool.popularity import Group, Popularity, PopularitySettings
from tiffin.conductor.pool.replication import Replication
from tiffin.conductor.state.prefix_index import PrefixIndex
from tiffin.conductor.state.sliced_work import finished

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from tiffin.conductor.pool.orders import Order
    from tiffin.conductor.pool.popularity import HotPrefix
    from tiffin.conductor.pool.replication import ReplicationSettings

MIB = 1 << 20
HALF_LIFE_S = 100.0


def prompt(name: str, blocks: int) -> tuple[bytes, ...]:
    """Readable keys: "sys" of 2 blocks is sys:0, sys:1."""
    return tuple(f"{name}:{i}".encode().ljust(16, b".") for i in range(blocks))


def hot_prefixes(popularity: Popularity, n: int, now: float) -> list[HotPrefix]:
    """The result of `finding_hot`, without its pauses."""
    return finished(popularity.finding_hot(n, now))


class World:
    """The pool. `nodes` have 1 GiB each; a block has 1 MiB. Only calls advance `now`."""

    def __init__(self, nodes: Iterable[str], settings: ReplicationSettings) -> None:
        self.now = 0.0
        self.index = PrefixIndex()
        self.popularity = Popularity(
            random.Random(1), PopularitySettings(half_life_s=HALF_LIFE_S), columns_log2=14
        )
        self.spaces = {name: NodeSpace(name, 1024 * MIB, 512 * MIB) for name in nodes}
        self.replication = Replication(settings)
        self.full = False  # nodes evict dropped blocks at once
        self.refusing: dict[str, int] = {}  # the number of blocks of an order that a node takes
        self.speeds: dict[tuple[str, str], float] = {}
        self.transcript: list[str] = []
        self.unheard: list[tuple[str, tuple[bytes, ...]]] = []  # copies not in the index yet

    @property
    def pool(self) -> PoolView:
        return PoolView(
            self.spaces,
            self.index,
            self.popularity,
            lambda sources, target, nbytes: [
                self.speeds.get((source, target), 1.0) for source in sources
            ],
        )

    def has(self, node: str, keys: Sequence[bytes], tier: str = "dram") -> None:
        self.index.add(self.index.holder(node, tier), keys, self.now)

    def lacks(self, node: str, keys: Sequence[bytes]) -> None:
        for tier in ("dram", "nvme"):
            number = self.index.find(node, tier)
            if number is not None:
                self.index.remove(number, keys, self.now)

    def holders(self, key: bytes) -> set[str]:
        return self.pool.holders(key)

    def come(self, keys: Sequence[bytes], times: int = 1, node: str = "") -> None:
        """Prompts come, and go to an instance on `node`."""
        for _ in range(times):
            shared = self.popularity.seen(keys, self.now, group=Group("m"), block_bytes=MIB)
            if node:
                self.popularity.wanted(keys[:shared], node, self.now)

    def tick(self, seconds: float = 1.0) -> list[Order]:
        """Advance the time; make orders and carry them out."""
        self.now += seconds
        orders = self.replication.plan(self.pool, self.now)
        for order in orders:
            self.say(order)
            self.carry_out(order)
        return orders

    def carry_out(self, order: Order) -> None:
        if isinstance(order, Drop) and self.full:
            self.lacks(order.node, order.keys)
        if not isinstance(order, Copy):
            return
        blocks = min(len(order.keys), self.refusing.get(order.target, len(order.keys)))
        self.has(order.target, order.keys[:blocks])
        error = "" if blocks == len(order.keys) else "NoRoom"
        self.replication.ended(Ended(order.number, blocks, error), self.now)

    def say(self, order: Order) -> None:
        self.transcript.append(f"{self.now:6.0f} s  {say(order)}")


def say(order: Order) -> str:
    """An order as a line of the transcript."""
    match order:
        case Copy():
            return (
                f"copy {names(order.keys)} {order.source} -> {order.target}, "
                f"{order.nbytes // MIB} MiB ({order.reason})"
            )
        case Drop():
            return f"drop {names(order.keys)} on {order.node} ({order.reason})"
        case Admit():
            return f"{order.node} takes {'new blocks' if order.on else 'nothing new'}"
        case Evacuate():
            return f"{order.node} hands over the rest, for {order.timeout_s:.0f} s"


def names(keys: Sequence[bytes]) -> str:
    """ "sys:0..3"."""
    first, last = (key.rstrip(b".").decode() for key in (keys[0], keys[-1]))
    return first if len(keys) == 1 else f"{first}..{last.rpartition(':')[2]}"


def lines(text: str) -> list[str]:
    """The lines of a transcript that is written in a test."""
    return [line.strip() for line in text.strip().splitlines()]
