"""Sources that blocks can be fetched from: an instance's HBM, or a node's DRAM and NVMe.

The index has holders, one per tier. A node is one place with two holders: blocks evicted from its
DRAM are on its disk, so that only both tiers together have a whole prefix. `Places` maps the
index's holder numbers to the cluster's numbers, as columns; it is rebuilt when either has changed.
Pure.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from ..cost.transfer_model import TIERS
from .policy_registry import PolicyQuestion

if TYPE_CHECKING:
    from ..state.instance_table import Cluster
    from ..state.prefix_index import PrefixIndex, PrefixMatch
    from .policy_registry import Blocks

_NO_HOLDER = -1


@dataclass(slots=True)
class Places:
    """All places, one array element each.

    `names` are instances' ids or nodes' names, `nodes` [places] the cluster's numbers of the nodes
    they are on, `rows` [places] its rows of the instances (-1: a node), `columns` [2, places] the
    index's numbers of the faster and the slower tier's holder (-1: none), `tiers` [2, places] which
    tiers these are (indices of `transfer_model.TIERS`). `of_holder` maps the index's numbers back
    to places (-1: none).
    """

    names: list[str] = field(default_factory=list)
    nodes: Blocks = field(default_factory=lambda: np.empty(0, np.int64))
    rows: Blocks = field(default_factory=lambda: np.empty(0, np.int64))
    columns: Blocks = field(default_factory=lambda: np.empty((2, 0), np.int64))
    tiers: Blocks = field(default_factory=lambda: np.empty((2, 0), np.int64))
    of_holder: list[int] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.names)

    @classmethod
    def of(cls, index: PrefixIndex, cluster: Cluster) -> Places:
        """All holders of the index, except instances that are not registered: their node is
        unknown. Takes some milliseconds for a thousand."""
        names: list[str] = []
        nodes: list[int] = []
        rows: list[int] = []
        holders: dict[tuple[str, bool], list[int]] = {}
        for number in sorted(index.numbers()):
            name, _, tier = index.label(number).rpartition("/")
            device = tier == "hbm"
            if device and name not in cluster:
                continue
            if (name, device) not in holders:
                holders[name, device] = [_NO_HOLDER, _NO_HOLDER]
                names.append(name)
                row = cluster.row(name) if device else -1
                rows.append(row)
                nodes.append(int(cluster.node[row]) if device else cluster.node_number(name))
            holders[name, device][tier == "nvme"] = number
        of_holder = [-1] * index.width
        for place, numbers in enumerate(holders.values()):
            for number in numbers:
                if number >= 0:
                    of_holder[number] = place
        columns = np.array(list(holders.values()), np.int64).reshape(-1, 2).T
        device_tiers, node_tiers = (0, 0), (1, 2)
        tiers = [device_tiers if device else node_tiers for _, device in holders]
        return cls(
            names,
            np.array(nodes, np.int64),
            np.array(rows, np.int64),
            np.ascontiguousarray(columns),
            np.ascontiguousarray(np.array(tiers, np.int64).reshape(-1, 2).T),
            of_holder,
        )

    def lengths(self, match: PrefixMatch) -> tuple[Blocks, Blocks]:
        """Leading blocks of the prompt that each place has in its faster tier, and in both."""
        return match.leading(self.columns[:1]), match.leading(self.columns)

    def having(self, holders: int) -> list[int]:
        """The places of the bit mask `holders`. For a few holders: it loops over the bits."""
        holders &= (1 << len(self.of_holder)) - 1
        found: dict[int, None] = {}
        while holders:
            lowest = holders & -holders
            found[self.of_holder[lowest.bit_length() - 1]] = None
            holders ^= lowest
        found.pop(-1, None)
        return list(found)

    def tier(self, place: int, tier: int) -> str:
        """The name of a place's tier. `tier` is 0 for the faster one."""
        return TIERS[int(self.tiers[tier, place])]

    def is_local(self, place: int, node: str) -> bool:
        """Whether a place is the kvstore node `node` itself, not an instance or another node."""
        return bool(self.rows[place] < 0) and self.names[place] == node


_NOWHERE = Places()


@dataclass(slots=True)
class PlacedQuestion(PolicyQuestion):
    """A question with the places that blocks can be fetched from. With a plain `PolicyQuestion`, a
    policy has none."""

    places: Places


def places_of(question: PolicyQuestion) -> Places:
    """The places that this prompt's blocks can be fetched from."""
    return question.places if isinstance(question, PlacedQuestion) else _NOWHERE
