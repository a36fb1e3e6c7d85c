"""A small cluster with a prompt, and what plain loops say of it, for the tests of policies.

`World` says who has which blocks and what costs what; `question` asks it of the real index,
transfers and cluster. What loops say is written from the papers, without looking at the code.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import numpy as np
from hypothesis import strategies as st

from tiffin.conductor.cost.transfer_model import TransferModel, TransferSettings
from tiffin.conductor.prefill.block_sources import PlacedQuestion, Places
from tiffin.conductor.prefill.policies.policy_settings import PolicySettings
from tiffin.conductor.records import InstanceSpec, Request, Role
from tiffin.conductor.state.inflight_prefills import Computing
from tiffin.conductor.state.instance_table import Cluster
from tiffin.conductor.state.prefix_index import PrefixIndex

if TYPE_CHECKING:
    from collections.abc import Iterator

NOW = 1000.0
BLOCK_TOKENS = 100
BLOCK_BYTES = 1_000_000
TIERS = ("hbm", "dram", "nvme")

# 70B on 8 A800, nearly: 0.1 ms a token, 1 ns a token squared.
LATENCY = (0.05, 1e-4, 1e-9, 0.02, 1e-4, 1e-7)

# 10 ms for a block over a link, 1 ms from memory, 20 ms from a disk; 11 ms to compute it.
WAYS = TransferSettings(
    link_bandwidth_bytes_s=1e8,
    link_latency_s=2e-3,
    hbm_bandwidth_bytes_s=1e9,
    dram_bandwidth_bytes_s=1e9,
    nvme_bandwidth_bytes_s=5e7,
)


@dataclass
class Inst:
    """`hbm` are the indices of the prompt's blocks that it has; `queue_s` how long one waits."""

    node: str = ""
    queue_s: float = 0.0
    hbm: frozenset[int] = frozenset()
    latency: tuple[float, ...] = LATENCY


@dataclass
class Node:
    """Indices of the prompt's blocks in its two tiers; `sending` bytes are in flight from it."""

    dram: frozenset[int] = frozenset()
    nvme: frozenset[int] = frozenset()
    sending: int = 0


@dataclass
class World:
    """Instances "i0", "i1", ...; nodes by name. `links[source, target]` are (bytes/s, seconds)."""

    blocks: int
    instances: list[Inst]
    nodes: dict[str, Node] = field(default_factory=dict)
    links: dict[tuple[str, str], tuple[float, float]] = field(default_factory=dict)
    tail_tokens: int = 7
    ways: TransferSettings = WAYS

    @property
    def prompt_tokens(self) -> int:
        return self.blocks * BLOCK_TOKENS + self.tail_tokens

    @property
    def keys(self) -> tuple[bytes, ...]:
        return tuple(index.to_bytes(16, "big") for index in range(self.blocks))

    # -- by the real parts -------------------------------------------------------------------------

    def question(
        self,
        settings: PolicySettings | None = None,
        seed: int = 1,
        computing: Computing | None = None,
        only: int | None = None,
    ) -> PlacedQuestion:
        """`only`: the one instance that may be chosen; all others can still be fetched from."""
        cluster, index = Cluster(), PrefixIndex()
        for name in self.nodes:
            cluster.node_number(name)
        for number, inst in enumerate(self.instances):
            spec = InstanceSpec(
                f"i{number}",
                "m",
                Role.MIXED,
                "p",
                node=inst.node,
                block_tokens=BLOCK_TOKENS,
                block_bytes=BLOCK_BYTES,
            )
            cluster.register(spec, inst.latency, NOW)
            self._add(index, spec.id, "hbm", inst.hbm)
        transfers = TransferModel(cluster.node_number, self.ways)
        for name, node in self.nodes.items():
            self._add(index, name, "dram", node.dram)
            self._add(index, name, "nvme", node.nvme)
        for (source, target), way in self.links.items():
            transfers.observe(target, {source: way})
        for name, node in self.nodes.items():
            if node.sending:
                transfers.begin(cluster.node_number(name), node.sending)
        rows = np.arange(len(self.instances)) if only is None else np.array([only])
        return self._ask(cluster, index, transfers, rows, settings, seed, computing)

    def _add(self, index: PrefixIndex, name: str, tier: str, blocks: frozenset[int]) -> None:
        if blocks:
            index.add(index.holder(name, tier), [self.keys[b] for b in sorted(blocks)], NOW)

    def _ask(self, cluster, index, transfers, rows, settings, seed, computing):  # type: ignore[no-untyped-def]
        match = index.match(self.keys)
        held = []
        for number in rows:
            node = self.instances[number].node
            names = (f"i{number}", node, node)
            found = [index.find(name, tier) for name, tier in zip(names, TIERS, strict=True)]
            held.append([-1 if holder is None else holder for holder in found])
        columns = np.array(held).T
        lengths = match.lengths(index.width)
        return PlacedQuestion(
            request=Request("r", "m", self.prompt_tokens, self.keys),
            now=NOW,
            cluster=cluster,
            rows=rows,
            hbm_blocks=match.leading(columns[:1]),
            dram_blocks=match.leading(columns[:2]),
            local_blocks=match.leading(columns),
            held_blocks=match.leading(columns),
            best_blocks=int(lengths.max(initial=0)),
            pool_blocks=match.blocks,
            queue_s=np.array([self.instances[number].queue_s for number in rows]),
            coming=None,
            match=match,
            transfers=transfers,
            computing=computing or Computing(),
            settings=settings or PolicySettings(near_share=0.0),
            dice=random.Random(seed),
            places=Places.of(index, cluster),
        )

    # -- by plain loops ----------------------------------------------------------------------------

    def compute_s(self, inst: Inst, blocks: int) -> float:
        """c0 + c1 (n - p) + c2 (n² - p²)."""
        c0, c1, c2 = inst.latency[:3]
        n = self.prompt_tokens
        p = min(blocks * BLOCK_TOKENS, n - 1)
        return c0 + c1 * (n - p) + c2 * (n * n - p * p)

    def tier_block_s(self, tier: str) -> float:
        bandwidth = getattr(self.ways, f"{tier}_bandwidth_bytes_s")
        return BLOCK_BYTES / float(bandwidth)

    def way(self, source: str, target: str) -> tuple[float, float, float]:
        """(bytes/s of the link, latency, seconds until the sender is free)."""
        if source == target and source:
            return float("inf"), 0.0, 0.0
        default = (self.ways.link_bandwidth_bytes_s, self.ways.link_latency_s)
        back = self.links.get((target, source), default)
        bandwidth, latency_s = self.links.get((source, target), back)
        known = [
            self._bandwidth(source, other) for other in self.nodes if self._known(source, other)
        ]
        rate = max(known, default=default[0])
        sending = self.nodes[source].sending if source in self.nodes else 0
        return bandwidth, latency_s, sending / rate

    def _known(self, source: str, target: str) -> bool:
        return (source, target) in self.links or (target, source) in self.links

    def _bandwidth(self, source: str, target: str) -> float:
        back = self.links.get((target, source), (0.0, 0.0))
        return self.links.get((source, target), back)[0]

    def own_lengths(self, number: int) -> tuple[int, int, int]:
        """Leading blocks in HBM, in HBM or DRAM, and in any tier of the instance and its node."""
        inst = self.instances[number]
        node = self.nodes.get(inst.node, Node())
        return (
            leading(inst.hbm),
            leading(inst.hbm | node.dram),
            leading(inst.hbm | node.dram | node.nvme),
        )

    def own_plans(self, number: int) -> Iterator[tuple[int, float]]:
        """(blocks, seconds to load them) for each tier that one can go down to."""
        hbm, dram, local = self.own_lengths(number)
        dram_s = (dram - hbm) * self.tier_block_s("dram")
        yield hbm, 0.0
        yield dram, dram_s
        yield local, dram_s + (local - dram) * self.tier_block_s("nvme")

    def own(self, number: int) -> tuple[int, float]:
        """The one of them after which the prompt is ready first."""
        inst = self.instances[number]
        return min(self.own_plans(number), key=lambda p: p[1] + self.compute_s(inst, p[0]))


def leading(blocks: frozenset[int]) -> int:
    """How many of the first blocks are there without a hole."""
    count = 0
    while count in blocks:
        count += 1
    return count


# -- hypothesis ------------------------------------------------------------------------------------


def some_blocks(blocks: int) -> st.SearchStrategy[frozenset[int]]:
    """A leading part, as caches have, and sometimes one with holes, as evictions leave."""
    parts = st.integers(0, blocks).map(lambda count: frozenset(range(count)))
    return parts | st.frozensets(st.integers(0, blocks - 1))


@st.composite
def worlds(draw: st.DrawFn, instances_max: int = 4) -> World:
    blocks = draw(st.integers(1, 6))
    names = ["a", "b", "c"][: draw(st.integers(0, 3))]
    queues = st.sampled_from([0.0, 0.004, 0.05, 0.4]) | st.floats(0, 1)
    latencies = st.tuples(
        st.sampled_from([0.0, 0.05]), st.floats(1e-6, 1e-3), st.floats(0, 1e-7)
    ).map(lambda c: (*c, 0.0, 0.0, 0.0))
    instance = st.builds(
        Inst,
        node=st.sampled_from(["", *names]),
        queue_s=queues,
        hbm=some_blocks(blocks),
        latency=st.just(LATENCY) | latencies,
    )
    node = st.builds(
        Node,
        dram=some_blocks(blocks),
        nvme=some_blocks(blocks),
        sending=st.sampled_from([0, 0, 3_000_000]),
    )
    ways = [(source, target) for source in names for target in names if source != target]
    way = st.tuples(st.floats(2e7, 5e9), st.floats(0, 0.05))
    links = st.dictionaries(st.sampled_from(ways), way) if ways else st.just({})
    return World(
        blocks=blocks,
        instances=draw(st.lists(instance, min_size=1, max_size=instances_max)),
        nodes={name: draw(node) for name in names},
        links=draw(links),
        tail_tokens=draw(st.integers(0, BLOCK_TOKENS - 1)),
    )


@st.composite
def more_blocks(draw: st.DrawFn, world: World) -> World:
    """The same world, where one instance or node has some blocks more."""
    more = frozenset(draw(st.sets(st.integers(0, world.blocks - 1))))
    held = draw(st.integers(0, len(world.instances) + 2 * len(world.nodes) - 1))
    instances, nodes = list(world.instances), dict(world.nodes)
    if held < len(instances):
        instances[held] = replace(instances[held], hbm=instances[held].hbm | more)
    else:
        name = list(nodes)[(held - len(instances)) // 2]
        tier = ("dram", "nvme")[(held - len(instances)) % 2]
        nodes[name] = replace(nodes[name], **{tier: getattr(nodes[name], tier) | more})
    return replace(world, instances=instances, nodes=nodes)
