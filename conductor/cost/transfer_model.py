"""Estimated transfer times of blocks: measured links, storage tiers, transfers in flight. Pure.

The seconds of a transfer are modelled as

    latency + waiting + nbytes / min(bandwidth of the link that is left, of the source's tier)

A link's latency and bandwidth are moving averages of its receiver's reports (`NodeRecord.links` of
the store) and of completed transfers. A node is modelled with one network
card, which sends and receives at the rates of its fastest links; waiting is for what the sender's
card has promised to send, or the receiver's to receive, whichever takes longer; what both will have
to do besides, by plans that they know, leaves the link a part of its bandwidth (`card_queue.py`).
Reading within one node costs its tier's bandwidth alone.

Node numbers are the cluster's (`Cluster.node_number`), -1 for no node; two instances without a node
count as on different nodes. Links are stored as square matrices, so that a thousand candidates are
looked up at once; the last row and column, which index -1 selects, stand for unknown nodes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import numpy as np
from msgspec import Meta

from ..state.instance_table import NODES_MAX as NODES_MAX
from ..state.prefix_index import TIERS as TIERS
from .card_queue import CardQueue
from .link_speeds import LinkSpeeds

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence

    from numpy.typing import NDArray

    Floats = NDArray[np.float64]
    Numbers = NDArray[np.int64] | NDArray[np.int32] | int

# Initial size of the matrices. They grow up to NODES_MAX; links of nodes beyond it are unknown.
_NODES_MIN = 64

# Measurements beyond these bounds are ignored; a link that is slower or later is down.
BANDWIDTH_BYTES_S_MIN, BANDWIDTH_BYTES_S_MAX = 1e6, 1e13
LATENCY_S_MAX = 10.0

# Reports that differ by less than a thousandth, plus a microsecond of latency, are no change.
_SAME, _LATENCY_S_SMALL = 1e-3, 1e-6
# So much, as a share, is news of links in general.
_NEWS = 0.05

Bandwidth = Annotated[float, Meta(ge=BANDWIDTH_BYTES_S_MIN, le=BANDWIDTH_BYTES_S_MAX)]


class TransferSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What is taken for true of links and tiers that nobody has measured. Bytes and seconds.

    The defaults of tiers are those of a node with eight A800 (Mooncake, FAST '25, table 1: 128 GB/s
    from host to device); the link's is 100 Gb/s at 0.87, what its transfer engine gets out of
    800 Gb/s (figure 12); NVMe is one disk of PCIe 4.
    """

    link_bandwidth_bytes_s: Bandwidth = 10.9e9
    """Of a way between two nodes that nobody has measured."""

    link_latency_s: Annotated[float, Meta(ge=0, le=LATENCY_S_MAX)] = 1e-3
    """Of a way that nobody has measured: lease, plan and first byte."""

    hbm_bandwidth_bytes_s: Bandwidth = 128e9
    """At which another instance's device memory is read, also by its neighbour on the same node."""

    dram_bandwidth_bytes_s: Bandwidth = 128e9
    """From a node's memory to the devices of an instance."""

    nvme_bandwidth_bytes_s: Bandwidth = 5e9
    """At which a node's disks are read."""

    link_weight: Annotated[float, Meta(gt=0, le=1)] = 0.25
    """Weight of a new measurement of a link in its moving average."""


class TransferModel:
    """All links between nodes, and each node's transfers in flight. Not thread-safe.

    `node_number` returns the number of a node's name: `Cluster.node_number`.
    """

    # [source, target]: seconds per byte; seconds before the first byte; whether measured in this
    # direction; whether measured in this or the other direction.
    _byte_s: NDArray[np.float32]
    _latency_s: NDArray[np.float32]
    _own: NDArray[np.bool_]
    _known: NDArray[np.bool_]

    def __init__(
        self, node_number: Callable[[str], int], settings: TransferSettings | None = None
    ) -> None:
        self._number = node_number
        self._names: dict[int, str] = {}
        self._nodes = 0
        self._sending, self._receiving = CardQueue(), CardQueue()
        self.ignored = 0  # invalid or implausible measurements
        self.settings = settings or TransferSettings()
        self._speeds = LinkSpeeds()
        self._default_byte_s = 1 / self.settings.link_bandwidth_bytes_s
        self._tier_byte_s = self._of_tiers()
        self._grow(_NODES_MIN)

    def configure(self, settings: TransferSettings) -> None:
        """Change the settings; measurements stay."""
        if settings.link_bandwidth_bytes_s != self.settings.link_bandwidth_bytes_s:
            self._default_byte_s = 1 / settings.link_bandwidth_bytes_s
        self.settings = settings
        self._tier_byte_s = self._of_tiers()
        self._byte_s[~self._known] = self._default_byte_s
        self._latency_s[~self._known] = settings.link_latency_s
        self._settle()

    # -- measurements ------------------------------------------------------------------------------

    def observe(self, node: str, links: Mapping[str, Sequence[float]]) -> None:
        """Take a node's report of its links *from* other nodes: [bytes/s, seconds] by their names.
        The reverse direction is assumed to be the same until it is reported too. Invalid reports
        are ignored and counted: one node's broken clock must not stop the feed."""
        target = self._named(node)
        for name, way in links.items():
            source = self._named(name)
            if len(way) == 2 and min(source, target) >= 0 and source != target:
                self._measured(source, target, float(way[0]), float(way[1]))
            else:
                self.ignored += 1

    def moved(self, source_node: int, target_node: int, nbytes: int, seconds: float) -> None:
        """Record a transfer from memory to memory that had both cards to itself, and took `seconds`
        from the event that began it to the one that ended it. Transfers within a node are ignored.
        What is learnt of links in general counts for those that nobody has measured."""
        low, high = sorted((source_node, target_node))
        if low < 0 or low == high or high >= NODES_MAX or nbytes <= 0:
            return
        if not 0 < seconds < np.inf:
            self.ignored += 1
            return
        self._fit(high)
        byte_s, general_byte_s = self._speeds.observe(source_node, target_node, nbytes, seconds)
        if byte_s is not None:
            latency_s = float(self._latency_s[source_node, target_node])
            self._measured(source_node, target_node, 1 / byte_s, latency_s)
        news = abs(general_byte_s / self._default_byte_s - 1) if general_byte_s else 0.0
        if general_byte_s and news > _NEWS:  # seldom: it is written for every link
            fastest_s, slowest_s = 1 / BANDWIDTH_BYTES_S_MAX, 1 / BANDWIDTH_BYTES_S_MIN
            self._default_byte_s = min(max(general_byte_s, fastest_s), slowest_s)
            self._byte_s[~self._known] = self._default_byte_s
            self._settle()

    def forget(self, numbers: Collection[int]) -> None:
        """Reset these node numbers before they are reused: their links become unknown, and they
        have no transfers in flight."""
        at = [number for number in numbers if number < self._nodes]
        if not at:
            return
        for number in at:
            self._names.pop(number, None)
        knew = np.logical_or.reduce(self._known[:, at], axis=1)
        knew |= np.logical_or.reduce(self._known[at], axis=0)
        nodes = np.union1d(np.flatnonzero(knew), np.array(at, np.int64))
        unknown: list[tuple[NDArray[Any], Any]] = [
            (self._known, False),
            (self._own, False),
            (self._byte_s, self._default_byte_s),
            (self._latency_s, self.settings.link_latency_s),
        ]
        for matrix, value in unknown:
            matrix[at, :] = matrix[:, at] = value
        self._speeds.forget(set(at))
        self._sending.forget(at)
        self._receiving.forget(at)
        self._settle(nodes)

    def ways(self) -> dict[str, dict[str, tuple[float, float]]]:
        """(bandwidth in bytes/s, latency in s) of the measured links, by source and target."""
        found: dict[str, dict[str, tuple[float, float]]] = {}
        for source, target in np.argwhere(self._own).tolist():
            if source in self._names and target in self._names:
                byte_s = float(self._byte_s[source, target])
                way = (1 / byte_s, float(self._latency_s[source, target]))
                found.setdefault(self._names[source], {})[self._names[target]] = way
        return found

    # -- transfers in flight -----------------------------------------------------------------------

    def begin(
        self, source_node: int, nbytes: int, now: float | None = None, *, target_node: int = -1
    ) -> None:
        """Add a transfer in flight between two nodes. With `now`, it adds waiting time only until
        the cards can have done with it; without, until `end`."""
        for queue, node in self._ends(source_node, target_node):
            queue.begin(node, nbytes, now)

    def end(self, source_node: int, nbytes: int, *, target_node: int = -1) -> None:
        """Remove a transfer in flight that succeeded or failed; arguments as of `begin`."""
        for queue, node in self._ends(source_node, target_node):
            queue.end(node, nbytes)

    def plan(self, source_node: int, target_node: int, nbytes: int, ready_at: float) -> None:
        """Add a transfer that will begin at about `ready_at`; `unplan` before it begins, or when it
        will not."""
        for queue, node in self._ends(source_node, target_node):
            queue.plan(node, nbytes, ready_at)

    def unplan(self, source_node: int, target_node: int, nbytes: int) -> None:
        """Remove a planned transfer; arguments as of `plan`."""
        for queue, node in self._ends(source_node, target_node):
            queue.unplan(node, nbytes)

    def traffic(self, source_node: int, target_node: int) -> tuple[int, int]:
        """(how many transfers are in flight at the two cards, how many have begun there): a
        transfer that finds none, and during which none begins, has its link to itself."""
        both = self._ends(source_node, target_node)
        in_flight = sum(int(queue.in_flight[node]) for queue, node in both)
        return in_flight, sum(int(queue.begun[node]) for queue, node in both)

    @property
    def idle(self) -> bool:
        """Whether nothing is in flight or planned."""
        return self._sending.idle and self._receiving.idle

    def in_flight_bytes(self, source_node: int) -> int:
        """The bytes that a node sends: begun and not ended."""
        return int(self._sending.bytes[source_node]) if 0 <= source_node < self._nodes else 0

    def receiving_bytes(self, target_node: int) -> int:
        """The bytes that a node receives: begun and not ended."""
        return int(self._receiving.bytes[target_node]) if 0 <= target_node < self._nodes else 0

    def planned_bytes(self, source_node: int) -> int:
        """The bytes that a node will send: planned and not begun."""
        return (
            int(self._sending.planned_bytes[source_node]) if 0 <= source_node < self._nodes else 0
        )

    def _ends(self, source_node: int, target_node: int) -> list[tuple[CardQueue, int]]:
        """The queues and numbers of both cards; a number that is none has no card here."""
        found = []
        for queue, node in ((self._sending, source_node), (self._receiving, target_node)):
            if 0 <= node < NODES_MAX:
                self._fit(node)
                found.append((queue, node))
        return found

    # -- the estimate ------------------------------------------------------------------------------

    def seconds(
        self,
        source_nodes: Numbers,
        source_tiers: Numbers,
        target_nodes: Numbers,
        nbytes: NDArray[Any] | float,
        now: float | None = None,
    ) -> Floats:
        """Estimated seconds to transfer `nbytes` from each source to each target, started now.
        Arguments are arrays that broadcast, or numbers; tiers are indices of `TIERS`. 0 bytes take
        0 seconds."""
        source, target = np.asarray(source_nodes), np.asarray(target_nodes)
        highest = max(int(source.max(initial=-1)), int(target.max(initial=-1)))
        same = None
        if highest >= self._nodes:
            self._fit(min(highest, NODES_MAX - 1))
            if highest >= NODES_MAX:
                same = (source == target) & (source >= 0)
                source = np.where(source < NODES_MAX, source, -1)
                target = np.where(target < NODES_MAX, target, -1)
        # Flat indices are faster than pairs. With a -1 in them they select an element of the last
        # row or column; all of these are equal.
        at = source * (self._nodes + 1) + target
        link, latency_s = self._byte_s.take(at).astype(np.float64), self._latency_s.take(at)
        sender_s, receiver_s = self._sending.waits_s(now), self._receiving.waits_s(now)
        wait_s = np.maximum(sender_s.take(source), receiver_s.take(target)) * (link > 0)
        tier = self._tier_byte_s.take(source_tiers)
        link = link * self._slowing(source, target, now)
        if same is not None:
            link, wait_s = np.where(same, 0.0, link), np.where(same, 0.0, wait_s)
            latency_s = np.where(same, 0.0, latency_s)
        seconds = wait_s + latency_s + nbytes * np.maximum(link, tier)
        return np.asarray(seconds * (np.asarray(nbytes) > 0), np.float64)

    def seconds_from(
        self,
        source_node: int,
        source_tier: int,
        target_nodes: NDArray[Any],
        nbytes: NDArray[Any],
        now: float,
    ) -> Floats:
        """`seconds` from one source, in half the time: node numbers [targets], and the bytes sent
        to each [targets]."""
        highest = max(source_node, int(target_nodes.max(initial=-1)))
        if highest >= self._nodes:
            return self.seconds(source_node, source_tier, target_nodes, nbytes, now)
        wait_s: Floats | float = self._sending.wait_s(source_node, now)
        if not self._receiving.idle:
            wait_s = np.maximum(self._receiving.waits_s(now).take(target_nodes), wait_s)
        slowing = self._slowing(source_node, target_nodes, now)
        return self._from(source_node, source_tier, target_nodes, nbytes, wait_s, slowing)

    def later_seconds_from(
        self,
        source_node: int,
        source_tier: int,
        target_nodes: NDArray[Any],
        nbytes: NDArray[Any],
        begins_at: float,
        now: float,
    ) -> Floats:
        """`seconds_from` for transfers that begin at `begins_at`, behind what is planned too."""
        highest = max(source_node, int(target_nodes.max(initial=-1)))
        if highest >= self._nodes:
            return self.seconds(source_node, source_tier, target_nodes, nbytes, begins_at)
        wait_s: Floats | float = 0.0
        if not self._sending.idle:
            wait_s = float(self.sender_waits_s(np.array([source_node]), begins_at)[0])
        if not self._receiving.idle:
            receiver_s = self._receiving.shared_waits_s(target_nodes, begins_at, now)
            wait_s = np.maximum(receiver_s, wait_s)
        return self._from(source_node, source_tier, target_nodes, nbytes, wait_s)

    def sender_waits_s(self, source_nodes: NDArray[Any], begins_at: Floats | float) -> Floats:
        """Seconds that a transfer which begins at `begins_at` would wait at each sender's card,
        behind what is in flight and what is planned."""
        if self._sending.idle:
            return np.zeros(len(source_nodes))
        known = np.where(source_nodes < self._nodes, source_nodes, -1)
        return self._sending.later_waits_s(known, begins_at)

    def sending_s(self, source_nodes: NDArray[Any], nbytes: Floats) -> Floats:
        """Seconds in which each sender's card can send its bytes."""
        known = np.where(source_nodes < self._nodes, source_nodes, -1)
        seconds: Floats = nbytes / self._sending.rate_bytes_s.take(known)
        return seconds

    def _slowing(self, source: Numbers, target: Numbers, now: float | None) -> Floats | float:
        """How many times as long sending takes because of what is planned at both cards: they share
        their bandwidth with it."""
        if now is None or not (self._sending.planning or self._receiving.planning):
            return 1.0
        sender, receiver = (one.planned_shares(now) for one in (self._sending, self._receiving))
        share = np.maximum(sender.take(source), receiver.take(target))
        slowing: Floats = 1 / np.maximum(1 - share, 0.5)
        return slowing

    def _from(
        self,
        source_node: int,
        source_tier: int,
        target_nodes: NDArray[Any],
        nbytes: NDArray[Any],
        wait_s: Floats | float,
        slowing: Floats | float = 1.0,
    ) -> Floats:
        link = self._byte_s[source_node].take(target_nodes) * slowing
        seconds: Floats = nbytes * np.maximum(link, self._tier_byte_s[source_tier])
        seconds += self._latency_s[source_node].take(target_nodes)
        if not isinstance(wait_s, float) or wait_s:
            seconds += wait_s * (link > 0)
        seconds *= nbytes > 0
        return seconds

    # -- the matrices ------------------------------------------------------------------------------

    def _named(self, name: str) -> int:
        number = self._number(name)
        if not 0 <= number < NODES_MAX:
            return -1
        self._fit(number)
        self._names[number] = name
        return number

    def _measured(self, source: int, target: int, bandwidth: float, latency_s: float) -> None:
        if not (
            BANDWIDTH_BYTES_S_MIN <= bandwidth <= BANDWIDTH_BYTES_S_MAX
            and 0 <= latency_s <= LATENCY_S_MAX
        ):
            self.ignored += 1
            return
        byte_s = float(self._byte_s[source, target])
        late_s = float(self._latency_s[source, target])
        weight = 1.0
        if self._own[source, target]:
            weight = self.settings.link_weight
            news = abs(1 / bandwidth - byte_s) / byte_s
            if news < _SAME and abs(latency_s - late_s) < _SAME * late_s + _LATENCY_S_SMALL:
                return  # the usual case: idle links report the same again, every few seconds
        byte_s += weight * (1 / bandwidth - byte_s)
        late_s += weight * (latency_s - late_s)
        self._own[source, target] = True
        self._write(source, target, byte_s, late_s)
        if not self._own[target, source]:
            self._write(target, source, byte_s, late_s)

    def _write(self, source: int, target: int, byte_s: float, latency_s: float) -> None:
        self._byte_s[source, target], self._latency_s[source, target] = byte_s, latency_s
        self._known[source, target] = True
        # The rate of the fastest link is taken as that of the network card.
        self._sending.rate_bytes_s[source] = 1 / self._byte_s[source][self._known[source]].min()
        into_s = self._byte_s[:, target][self._known[:, target]]
        self._receiving.rate_bytes_s[target] = 1 / into_s.min()

    def _of_tiers(self) -> Floats:
        own = self.settings
        tiers = (own.hbm_bandwidth_bytes_s, own.dram_bandwidth_bytes_s, own.nvme_bandwidth_bytes_s)
        return 1 / np.array(tiers)

    def _fit(self, number: int) -> None:
        if number >= self._nodes:
            self._grow(min(NODES_MAX, max(number + 1, 2 * self._nodes)))

    def _grow(self, nodes: int) -> None:
        """Grow the matrices to `nodes`, plus a last row and column for unknown nodes."""
        had, size, own = self._nodes, nodes + 1, self.settings
        grown: dict[str, NDArray[Any]] = {
            "_byte_s": np.full((size, size), self._default_byte_s, np.float32),
            "_latency_s": np.full((size, size), own.link_latency_s, np.float32),
            "_own": np.zeros((size, size), np.bool_),
            "_known": np.zeros((size, size), np.bool_),
        }
        for name, array in grown.items():
            if had:
                kept = (slice(had),) * array.ndim
                array[kept] = getattr(self, name)[kept]
            setattr(self, name, array)
        self._nodes = nodes
        for queue in (self._sending, self._receiving):
            queue.grow(nodes)
            queue.rate_bytes_s = np.full(size, 1 / self._default_byte_s)
        self._settle()

    def _settle(self, nodes: NDArray[np.int64] | slice = slice(None)) -> None:
        """Update the values derived from the links: the cards' rates, and 0 seconds of link time
        within a node. The last row and column, of unknown nodes, are never within one node."""
        default_s = self._default_byte_s
        outward = np.where(self._known[nodes], self._byte_s[nodes], np.inf).min(axis=1)
        inward = np.where(self._known[:, nodes], self._byte_s[:, nodes], np.inf).min(axis=0)
        for queue, byte_s in ((self._sending, outward), (self._receiving, inward)):
            known_s = np.where(np.isinf(byte_s), default_s, byte_s.astype(np.float64))
            queue.rate_bytes_s[nodes] = 1 / known_s
        inner = np.arange(self._nodes)
        self._byte_s[inner, inner] = self._latency_s[inner, inner] = 0.0
