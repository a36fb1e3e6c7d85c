"""Replication of hot prefixes: their target nodes, and the orders to copy and drop blocks. Pure.

Fetching replicates by itself: a node that fetches blocks keeps them. But requests wait for the
first fetches, and while only one node has a prefix that a third of all prompts begin with, prompts
either queue behind that node or all fetch from it at once. So replicas are made ahead of need:

- *Spread.* A prefix that a share s of all prompts begin with is copied to `headroom` x s of the
  nodes: then load can be balanced in any way, and enough instances have the prefix at hand.
  (Mooncake, FAST '25, figure 11: its ten hottest blocks end up on practically every prefill node.)
- *Follow.* A node whose instances had to fetch a prefix from elsewhere `wants_min` times within
  about a half-life gets a replica, whatever its share: the next fetch costs the same bytes.

Four limits bound the cost: bytes of all replicas, bytes per second (a token bucket), a share of
each node's memory, and orders under way per node. The hottest prefix goes first. A replica is
dropped when less than a `shrink`-th of its reason is left, and not before `keep_s`, so that noise
around a threshold causes no orders. A `Drop` tells the node that it need not keep the blocks; the
node evicts them when it needs the room. Only replicas that were ordered here are dropped, and
never when no other node has the blocks.

Replicas that a node evicted by itself are forgotten and not ordered again for `keep_s`: the node
had no room. A node that does not answer, or has no room, gets no orders for a back-off that doubles
with each failure in a row.
"""

from __future__ import annotations

import math
from collections import Counter, OrderedDict
from dataclasses import dataclass, field
from functools import cache
from itertools import count, islice
from typing import TYPE_CHECKING, Annotated, NamedTuple

import msgspec
import numpy as np
from msgspec import Meta

from ..state.sliced_work import finished
from .orders import LOST_S, NO_PARENT, ORDER_BLOCKS_MAX, Copy, Drop, Ended

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from ..state.sliced_work import Work
    from .orders import Order, PoolView, Takers
    from .popularity import Group, HotPrefix

# The index lists a new replica within seconds; until then its absence there means nothing.
SETTLED_S = 10.0
# Replicas that one tick checks, in rotation: some milliseconds. 64 GiB of replicas of 2 MiB each
# are all checked within the two minutes for which each is kept at least.
CHECKED_AT_ONCE = 256
# The most recently dropped blocks that are remembered, so that they are not copied again at once.
COOLING_MAX = 65_536
# Candidate targets that may turn out unusable for one prefix in one tick.
_TRIES_MAX = 64
# The back-off of a node after a failed copy.
REST_MIN_S, REST_MAX_S = 5.0, 300.0
_DOUBLINGS_MAX = 10

Bytes = Annotated[int, Meta(ge=0, le=1 << 62)]
Share = Annotated[float, Meta(ge=0, le=1)]


class ReplicationSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """How far hot prefixes are spread, and what that may cost."""

    enabled: bool = True
    """Whether copies are ordered at all; what was copied is given up when this is turned off."""

    budget_bytes: Bytes = 64 << 30
    """Of all copies together, in nodes' memory."""

    bandwidth_bytes_s: Annotated[float, Meta(gt=0, le=1e13)] = 1.25e9
    """Of all copies together, on average. A tenth of one 100 Gb/s port."""

    burst_s: Annotated[float, Meta(gt=0, le=3600)] = 1.0
    """Seconds of bandwidth that may be saved up; at least one block may always be."""

    node_share: Share = 0.1
    """Of a node's memory that copies may take."""

    headroom: Annotated[float, Meta(gt=0, le=100)] = 1.5
    """A prefix of a share s of all prompts is spread to headroom x s of the nodes."""

    popularity_min: Annotated[float, Meta(ge=1, le=1e9)] = 4.0
    """Prompts that have to be remembered of a prefix before it is copied anywhere."""

    wants_min: Annotated[float, Meta(gt=0, le=1e9)] = 2.0
    """A node that had to bring a prefix so often gets a copy."""

    replicas_max: Annotated[int, Meta(ge=1, le=4096)] = 64
    """Nodes that have one block, counting those that computed it."""

    shrink: Annotated[float, Meta(ge=1.5, le=100)] = 2.0
    """A copy is given up when a shrink-th of its reason is left. What keeps noise from flapping."""

    keep_s: Annotated[float, Meta(ge=1, le=86_400)] = 120.0
    """A copy is kept so long at least, and a block that was given up is not copied to the same node
    again so long."""

    orders_max: Annotated[int, Meta(ge=1, le=256)] = 16
    """Copies under way in all."""

    orders_per_node_max: Annotated[int, Meta(ge=1, le=64)] = 2
    """Copies under way from, and to, one node: serving reads goes first."""

    hot_max: Annotated[int, Meta(ge=1, le=4096)] = 256
    """Prefixes that are looked at, the hottest first."""


@dataclass(slots=True)
class Bucket:
    """A token bucket of bytes."""

    left_bytes: float = 0.0
    filled_at: float | None = None

    def fill(self, rate_bytes_s: float, most_bytes: float, now: float) -> None:
        """Add the tokens since the last call. The bucket begins full."""
        came = math.inf if self.filled_at is None else rate_bytes_s * (now - self.filled_at)
        self.left_bytes = min(most_bytes, self.left_bytes + max(0.0, came))
        self.filled_at = now if self.filled_at is None else max(now, self.filled_at)


@dataclass(slots=True)
class _Kept:
    """The replica of one block on one node."""

    nbytes: int
    since: float
    group: Group


class _Heat(NamedTuple):
    """How often prompts want a block: in all, and on one of the `holders` nodes that have it."""

    popularity: float
    demand: float
    holders: int


@dataclass(slots=True)
class _Pressure:
    """Memory pressure: `nbytes` to drop, of blocks that are wanted at most `below` times."""

    nbytes: int
    below: float
    reason: str


@dataclass(slots=True)
class _Rest:
    until: float = -math.inf
    in_a_row: int = 0


@dataclass(slots=True)
class ReplicationNumbers:
    """Counters since the start, for metrics."""

    copies_ordered: int = 0
    copied_blocks: int = 0
    copies_failed: int = 0
    dropped_blocks: int = 0
    evicted_blocks: int = 0
    lost_orders: int = 0
    failures: dict[str, int] = field(default_factory=dict)


class Replication:
    """The replicas that were ordered: those under way, and those kept. Not thread-safe."""

    def __init__(self, settings: ReplicationSettings | None = None) -> None:
        self.settings = settings or ReplicationSettings()
        self.numbers = ReplicationNumbers()
        self._counter = count(1)
        self._bucket = Bucket()
        # By (node, key), in the order in which replicas were made or last checked.
        self._kept: OrderedDict[tuple[str, bytes], _Kept] = OrderedDict()
        self._kept_bytes: dict[str, int] = {}  # per node; includes copies under way
        self._under_way: dict[int, tuple[Copy, float]] = {}
        self._groups: dict[int, Group] = {}  # of the orders under way
        self._cooling: OrderedDict[tuple[str, bytes], float] = OrderedDict()
        # The nodes of each block in `_kept` and in `_cooling`: most prefixes have none.
        self._kept_on: dict[bytes, set[str]] = {}
        self._cooling_on: dict[bytes, set[str]] = {}
        self._rests: dict[str, _Rest] = {}
        # The popularity of a prefix that the byte budget has no room for, and the bytes it needs.
        self._squeezed: tuple[float, int] | None = None

    @property
    def bytes_used(self) -> int:
        """Bytes of all replicas that are kept or under way."""
        return sum(self._kept_bytes.values())

    @property
    def under_way(self) -> int:
        """Copies that were ordered and whose outcome is not reported yet."""
        return len(self._under_way)

    def copies(self, node: str) -> list[bytes]:
        """The blocks of which a node keeps a replica that was ordered here."""
        return [key for name, key in self._kept if name == node]

    def resting(self, node: str, now: float) -> bool:
        """Whether a node is in back-off after a failed copy."""
        return now < self._rests.get(node, _Rest()).until

    def plan(self, pool: PoolView, now: float) -> list[Order]:
        """The orders to send now. Call it every second or so."""
        return finished(self.planning(pool, now))

    def planning(self, pool: PoolView, now: float) -> Work[list[Order]]:
        """`plan` in pieces. The caller must not call `ended` between two of them."""
        self._give_up_lost(now)
        orders: list[Order] = []
        orders += yield from self._shrink(pool, now)
        if self.settings.enabled:
            orders += yield from self._grow(pool, now)
        return orders

    def ended(self, outcome: Ended, now: float) -> None:
        """Record the outcome of a Copy of `plan`. Outcomes of other orders are ignored."""
        order, _ = self._under_way.pop(outcome.number, (None, 0.0))
        if order is None:
            return
        blocks = min(max(outcome.blocks, 0), len(order.keys))
        each = order.nbytes // len(order.keys)
        self._add_bytes(order.target, -order.nbytes)
        group = self._groups.pop(outcome.number)
        for key in order.keys[:blocks]:
            if (order.target, key) not in self._kept:
                self._kept[order.target, key] = _Kept(each, now, group)
                self._kept_on.setdefault(key, set()).add(order.target)
                self._add_bytes(order.target, each)
        self.numbers.copied_blocks += blocks
        if blocks == len(order.keys):
            self._rests.pop(order.target, None)
        else:
            self._failed(order, outcome.error or "no_room", now)

    # -- shrinking ---------------------------------------------------------------------------------

    def _shrink(self, pool: PoolView, now: float) -> Work[list[Drop]]:
        """Forget replicas that their nodes evicted, and drop those that are not needed."""
        batch = list(islice(self._kept, CHECKED_AT_ONCE))
        keys = [key for _, key in batch]
        popularity = pool.popularity.of_each(keys, now).tolist()
        demand = pool.popularity.demand_each(keys, [node for node, _ in batch], now).tolist()
        pressure = self._pressure()
        sent = {(o.source, key) for o, _ in self._under_way.values() for key in o.keys}
        given_up: dict[tuple[str, str], list[bytes]] = {}
        # The least wanted first: of one block, the replicas with the most demand remain.
        for i in sorted(range(len(batch)), key=lambda i: (popularity[i], demand[i], batch[i])):
            yield
            node, key = batch[i]
            # Replicas dropped above do not count, though the index still lists them.
            holders = pool.holders(key)
            others = {
                n
                for n in holders
                if n != node and not pool.nodes[n].draining and not self._is_cooling(n, key, now)
            }
            if self._is_gone(pool, node, key, node in holders, now):
                self._evicted(node, key, now)
                continue
            self._kept.move_to_end((node, key))
            if not others or (node, key) in sent or not self._may_go(node, key, now):
                continue
            heat = _Heat(popularity[i], demand[i], len(others) + 1)
            reason = self._why_drop(pool, self._kept[node, key], heat, pressure, now)
            if reason:
                self._give_up(node, key, now)
                given_up.setdefault((node, reason), []).append(key)
        self._squeezed = None
        return [
            Drop(next(self._counter), tuple(dropped), node, reason)
            for (node, reason), dropped in sorted(given_up.items())
        ]

    def _is_gone(self, pool: PoolView, node: str, key: bytes, here: bool, now: float) -> bool:
        """Whether a replica is gone: its node has left, or has evicted it."""
        if node not in pool.nodes:
            return True
        settled = now >= self._kept[node, key].since + SETTLED_S
        return settled and not here

    def _may_go(self, node: str, key: bytes, now: float) -> bool:
        own = self.settings
        return not own.enabled or now >= self._kept[node, key].since + own.keep_s

    def _pressure(self) -> _Pressure:
        """How many bytes to drop though they are not cold, and why."""
        excess_bytes = self.bytes_used - self.settings.budget_bytes
        if excess_bytes > 0:
            return _Pressure(excess_bytes, math.inf, "over the budget")
        if self._squeezed is not None:
            popularity, nbytes = self._squeezed
            below = popularity / self.settings.shrink
            return _Pressure(nbytes, below, f"room for a prefix wanted {popularity:.1f} times")
        return _Pressure(0, 0.0, "")

    def _why_drop(
        self, pool: PoolView, kept: _Kept, heat: _Heat, pressure: _Pressure, now: float
    ) -> str:
        """Why a replica should be dropped; "" if it should stay."""
        own = self.settings
        if not own.enabled:
            return "replication is off"
        if pressure.nbytes > 0 and heat.popularity <= pressure.below:
            pressure.nbytes -= kept.nbytes
            return pressure.reason
        if heat.demand * own.shrink >= own.wants_min:
            return ""
        if heat.popularity * own.shrink < own.popularity_min:
            return "cold"
        prompts = max(pool.popularity.prompts(now, kept.group), heat.popularity)
        share = min(1.0, own.shrink * heat.popularity / prompts)
        spread = heat.holders > self._goal(share, len(pool.takers(kept.group)))
        return "more copies than its share needs" if spread else ""

    def _give_up(self, node: str, key: bytes, now: float) -> None:
        self._forget(node, key)
        self._cool(node, key, now)
        self.numbers.dropped_blocks += 1

    # -- growing -----------------------------------------------------------------------------------

    def _grow(self, pool: PoolView, now: float) -> Work[list[Copy]]:
        own = self.settings
        coming: dict[str, set[bytes]] = {}
        for order, _ in self._under_way.values():
            coming.setdefault(order.target, set()).update(order.keys)
        orders: list[Copy] = []
        popularity_min = own.popularity_min * pool.popularity.grain(now)
        hot = yield from pool.popularity.finding_hot(own.hot_max, now)
        for prefix in hot:
            yield
            if prefix.popularity < popularity_min or prefix.block_bytes <= 0:
                continue
            burst_bytes = max(own.bandwidth_bytes_s * own.burst_s, float(prefix.block_bytes))
            self._bucket.fill(own.bandwidth_bytes_s, burst_bytes, now)
            # A hotter prefix goes first, also when it has to wait for bandwidth.
            poor = self._bucket.left_bytes < prefix.block_bytes
            if poor or len(self._under_way) >= own.orders_max:
                break
            orders += yield from self._spread(prefix, coming, pool, now)
        return orders

    def _goal(self, share: float, nodes: int) -> int:
        """The wanted number of replicas of a prefix with this share of all prompts."""
        # Rounded before `ceil`: 1.5 x 0.2 x 10 is 3, and not 3.0000000000000004.
        spread = math.ceil(round(self.settings.headroom * share * nodes, 9))
        return max(1, min(spread, nodes, self.settings.replicas_max))

    def _spread(
        self, prefix: HotPrefix, coming: dict[str, set[bytes]], pool: PoolView, now: float
    ) -> Work[list[Copy]]:
        """Copies of one prefix: to nodes with demand for it, and to as many as its share needs.
        Each target is a piece of its own: 0.1 ms."""
        own, keys = self.settings, prefix.keys
        held, takers = pool.leading(keys), pool.index_of_takers(prefix.group)
        if not held or not takers.names:
            return []
        # Only these nodes have a block of the prefix, or will have one.
        some = {name for name, coming_keys in coming.items() if keys[0] in coming_keys}
        some |= self._kept_on.get(keys[0], set()) | held.keys()
        holders = cache(pool.holders)  # the nodes ask about the same few blocks
        have = {
            name: self._with_coming(name, keys, held, coming, holders)
            for name in some & takers.known
        }
        yield
        held = self._staying(keys, held, now)
        replicas = sum(blocks == len(keys) for blocks in have.values())
        goal = self._goal(prefix.share, len(takers.names))
        demand = pool.popularity.demand_on(keys[-1], takers.salts, now)
        wants_min = own.wants_min * pool.popularity.grain(now)
        wants = {
            takers.names[at]: float(demand[at])
            for at in np.flatnonzero(demand >= wants_min).tolist()
        }
        orders: list[Copy] = []
        tries = 0
        for name in self._in_order(takers, wants, have, len(keys), now):
            yield
            wanted = name in wants
            if replicas >= own.replicas_max or (not wanted and replicas >= goal):
                break  # the nodes that follow want it less
            if tries >= _TRIES_MAX or len(self._under_way) >= own.orders_max:
                break
            why = f"wanted {wants[name]:.1f} times" if wanted else f"{replicas} of {goal} nodes"
            copy = self._copy(prefix, name, have.get(name, 0), held, pool, why, now)
            if copy is not None:
                coming.setdefault(name, set()).update(copy.keys)
                orders.append(copy)
                replicas += 1
            tries += copy is None
        return orders

    def _in_order(
        self, takers: Takers, wants: dict[str, float], have: dict[str, int], whole: int, now: float
    ) -> Iterator[str]:
        """Candidate targets: nodes that lack some of a prefix of `whole` blocks, in the order of
        demand, of leading blocks they have, and of free share of memory."""

        def rank(name: str) -> tuple[float, int, float, str]:
            blocks = have.get(name, 0)
            return -wants.get(name, 0.0), -blocks, -takers.share_free(name), name

        lacking = [name for name in wants.keys() | have.keys() if have.get(name, 0) < whole]
        yield from sorted(lacking, key=rank)
        for name in takers.by_room(lambda name: self._is_able(name, takers, now)):
            if name not in wants and name not in have:
                yield name

    def _is_able(self, name: str, takers: Takers, now: float) -> bool:
        """Whether a node can take a copy: not in back-off, and its share of memory is not full."""
        share_bytes = self.settings.node_share * takers.capacity_bytes(name)
        return not self.resting(name, now) and self._kept_bytes.get(name, 0) < share_bytes

    def _with_coming(
        self,
        node: str,
        keys: tuple[bytes, ...],
        held: dict[str, int],
        coming: dict[str, set[bytes]],
        holders: Callable[[bytes], set[str]],
    ) -> int:
        """How many leading blocks a node will have when the copies under way have arrived."""
        blocks = held.get(node, 0)
        if node not in self._kept_bytes:
            return blocks
        ordered = coming.get(node, set())
        # Replicas that the index does not list yet count as well.
        while blocks < len(keys) and (
            keys[blocks] in ordered
            or (node, keys[blocks]) in self._kept
            or node in holders(keys[blocks])
        ):
            blocks += 1
        return blocks

    def _staying(self, keys: tuple[bytes, ...], held: dict[str, int], now: float) -> dict[str, int]:
        """How many leading blocks each node has before the first one that it was ordered to drop:
        only those can be a source of copies."""
        staying = dict(held)
        if not self._cooling:
            return staying
        for at in range(len(keys) - 1, -1, -1):
            for name in self._cooling_on.get(keys[at], ()):
                if staying.get(name, 0) > at and self._is_cooling(name, keys[at], now):
                    staying[name] = at
        return staying

    def _copy(
        self,
        prefix: HotPrefix,
        target: str,
        begin: int,
        held: dict[str, int],
        pool: PoolView,
        reason: str,
        now: float,
    ) -> Copy | None:
        """A copy of blocks that `target` lacks, as many as every budget allows; None if none."""
        blocks = self._blocks_allowed(prefix, target, begin, pool, now)
        if blocks <= 0:
            return None
        source = self._source(target, begin, begin + blocks, held, prefix.block_bytes, pool)
        if source is None:
            return None
        keys = pool.lacked(prefix.keys[begin : min(begin + blocks, held[source])], target)
        if not keys:
            return None  # they have come since the first piece
        nbytes = len(keys) * prefix.block_bytes
        parent = prefix.keys[begin - 1] if begin else NO_PARENT
        number = next(self._counter)
        order = Copy(number, keys, parent, begin, source, target, nbytes, reason)
        self._under_way[number], self._groups[number] = (order, now), prefix.group
        self._add_bytes(target, nbytes)
        self._bucket.left_bytes -= nbytes
        self.numbers.copies_ordered += 1
        return order

    def _blocks_allowed(
        self, prefix: HotPrefix, target: str, begin: int, pool: PoolView, now: float
    ) -> int:
        own, node = self.settings, pool.nodes[target]
        if (
            len(self._under_way) >= own.orders_max
            or self.resting(target, now)
            or self._busy(target) >= own.orders_per_node_max
            or self._is_cooling(target, prefix.keys[begin], now)
        ):
            return 0
        room_bytes = own.budget_bytes - self.bytes_used
        if room_bytes < prefix.block_bytes:
            wanted_bytes = (len(prefix.keys) - begin) * prefix.block_bytes
            self._squeezed = max(self._squeezed or (0.0, 0), (prefix.popularity, wanted_bytes))
            return 0
        share_bytes = own.node_share * node.capacity_bytes - self._kept_bytes.get(target, 0)
        least_bytes = min(room_bytes, share_bytes, self._bucket.left_bytes)
        return min(
            len(prefix.keys) - begin, ORDER_BLOCKS_MAX, int(least_bytes // prefix.block_bytes)
        )

    def _source(
        self,
        target: str,
        begin: int,
        end: int,
        held: dict[str, int],
        block_bytes: int,
        pool: PoolView,
    ) -> str | None:
        """The source node with most of blocks [begin, end), and of equals the fastest."""
        busy = Counter(order.source for order, _ in self._under_way.values())
        able = {
            name: min(blocks, end) - begin
            for name, blocks in held.items()
            if name != target and blocks > begin and busy[name] < self.settings.orders_per_node_max
        }
        most = max(able.values(), default=0)
        equals = sorted(name for name, blocks in able.items() if blocks == most)
        if not equals:
            return None
        seconds = pool.seconds(equals, target, most * block_bytes)
        return min(zip(seconds, equals, strict=True))[1]

    def _busy(self, target: str) -> int:
        """Copies under way to a node."""
        return sum(target == order.target for order, _ in self._under_way.values())

    # -- small -------------------------------------------------------------------------------------

    def _add_bytes(self, node: str, nbytes: int) -> None:
        left = self._kept_bytes.get(node, 0) + nbytes
        if left:
            self._kept_bytes[node] = left
        else:
            self._kept_bytes.pop(node, None)

    def _forget(self, node: str, key: bytes) -> None:
        self._add_bytes(node, -self._kept.pop((node, key)).nbytes)
        _discard(self._kept_on, key, node)

    def _evicted(self, node: str, key: bytes, now: float) -> None:
        self._forget(node, key)
        self._cool(node, key, now)
        self.numbers.evicted_blocks += 1

    def _cool(self, node: str, key: bytes, now: float) -> None:
        self._cooling[node, key] = now + self.settings.keep_s
        self._cooling.move_to_end((node, key))
        self._cooling_on.setdefault(key, set()).add(node)
        while len(self._cooling) > COOLING_MAX or next(iter(self._cooling.values())) <= now:
            (other, warm), _ = self._cooling.popitem(last=False)
            _discard(self._cooling_on, warm, other)

    def _is_cooling(self, node: str, key: bytes, now: float) -> bool:
        return now < self._cooling.get((node, key), -math.inf)

    def _failed(self, order: Copy, error: str, now: float) -> None:
        self.numbers.copies_failed += 1
        self.numbers.failures[error] = self.numbers.failures.get(error, 0) + 1
        rest = self._rests.setdefault(order.target, _Rest())
        rest.until = now + min(REST_MAX_S, REST_MIN_S * 2**rest.in_a_row)
        rest.in_a_row = min(rest.in_a_row + 1, _DOUBLINGS_MAX)

    def _give_up_lost(self, now: float) -> None:
        lost = [n for n, (_, at) in self._under_way.items() if now >= at + LOST_S]
        for number in lost:
            self.numbers.lost_orders += 1
            self.ended(Ended(number, error="lost"), now)


def _discard(nodes: dict[bytes, set[str]], key: bytes, node: str) -> None:
    nodes[key].discard(node)
    if not nodes[key]:
        del nodes[key]
