"""MemServe's rule (arXiv 2406.17565), known at second hand: fetch a cached prefix from another
instance if that takes no longer than the time that it saves.

The conductor decides by the same comparison, of predicted times. Here its decision is held against
both alternatives, each forced in the simulated network, over prompts, cached shares, bandwidths,
queues and rivals for the sender's card.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product
from typing import TYPE_CHECKING

import numpy as np

from tiffin.conductor.cost import latency_profiles

from ...plots import Line, Plot
from ..evidence import Evidence, Statement
from ..registry import reproduction
from ..setups.fetch_or_compute import BLOCK_TOKENS, Cell, fetched_blocks, ttft_s

if TYPE_CHECKING:
    from ..registry import Effort, Tell

PROFILE = latency_profiles.load(latency_profiles.DEFAULT)
LATENCY_S = 1e-3
OURS = "kvcache_centric"
WAYS = (OURS, "always", "never")
PROMPTS = (1024, 2048, 4096, 8192, 16_384, 32_768, 65_536, 131_072)
SHARES = (0.25, 0.5, 0.75, 0.95)
BANDWIDTHS_BYTES_S = (1e9, 2e9, 4e9, 8e9, 16e9, 32e9, 87e9)
QUEUED, RIVALS = (0, 1), (0, 1, 3)


NOTES = (
    "Behind a queue blocks come while the prompt waits: kvcache_centric, in this unlike Mooncake's "
    "Algorithm 1, takes the longer of the two times. It fetches all or nothing.",
    "Rivals fetch as much as the prompt itself: the conductor takes a card for a queue and the "
    "network shares it, which is the same for equal sizes.",
)


@dataclass(frozen=True, slots=True)
class Judged:
    """A cell, and its TTFT by each way: that of the policy's decision, "always" and "never"."""

    cell: Cell
    ttft_s: dict[str, float]

    def excess(self, way: str) -> float:
        """TTFT above that of the better one of fetching all and of fetching nothing, as a share."""
        return self.ttft_s[way] / min(self.ttft_s["always"], self.ttft_s["never"]) - 1


def cells() -> list[Cell]:
    """The whole grid; a cached part has one block at least."""
    return [
        Cell(tokens, max(1, int(tokens * share) // BLOCK_TOKENS), bandwidth, queued, rivals)
        for tokens, share, bandwidth, queued, rivals in product(
            PROMPTS, SHARES, BANDWIDTHS_BYTES_S, QUEUED, RIVALS
        )
    ]


def judge(cell: Cell) -> Judged:
    """Both alternatives, and what the policy decides."""
    decided = fetched_blocks(cell, PROFILE, OURS, LATENCY_S)
    blocks = {OURS: decided, "always": cell.cached_blocks, "never": 0}
    return Judged(cell, {way: ttft_s(cell, PROFILE, LATENCY_S, n) for way, n in blocks.items()})


def right_share(judged: list[Judged], way: str) -> float:
    """Cells in which a way is as good as the better one, to a thousandth, as a share."""
    return float(np.mean([one.excess(way) <= 1e-3 for one in judged]))


def mean_excess(judged: list[Judged], way: str) -> float:
    """In the mean over all cells."""
    return float(np.mean([one.excess(way) for one in judged]))


@reproduction(
    "memserve-fetch-or-recompute",
    "Fetch a prefix, or compute it",
    "MemServe, arXiv 2406.17565",
    second_hand=True,
)
def fetch_or_recompute(effort: Effort, tell: Tell) -> Evidence:
    """How often the decision is the better one, and what it costs where it is not."""
    grid = cells()
    tell(f"{len(grid)} cells")
    judged = [judge(cell) for cell in grid]
    alone = [one for one in judged if not one.cell.queued and not one.cell.rivals]
    lost = {way: mean_excess(judged, way) for way in WAYS}
    statements = (
        Statement(
            "on idle instances and links the decision is the better one in 99% of all cells",
            right_share(alone, OURS) >= 0.99,
            _shares(alone),
        ),
        Statement(
            "with queues and rivals, in 90% of all cells",
            right_share(judged, OURS) >= 0.9,
            _shares(judged),
        ),
        Statement(
            "less TTFT is lost than by always fetching, and by never fetching",
            lost[OURS] < min(lost["always"], lost["never"]),
            ", ".join(f"{way} {share:.1%}" for way, share in lost.items()) + " in the mean",
        ),
    )
    return Evidence((), statements, (_plot(judged),), NOTES)


def _shares(judged: list[Judged]) -> str:
    shares = ", ".join(f"{way} {right_share(judged, way):.1%}" for way in WAYS)
    return f"{shares} of {len(judged)}"


def _plot(judged: list[Judged]) -> Plot:
    lines = []
    for way in WAYS:
        lost = [
            100
            * mean_excess([one for one in judged if one.cell.bandwidth_bytes_s == bandwidth], way)
            for bandwidth in BANDWIDTHS_BYTES_S
        ]
        lines.append(
            Line(way, tuple(bandwidth / 1e9 for bandwidth in BANDWIDTHS_BYTES_S), tuple(lost))
        )
    title = "TTFT above that of the better of fetching and computing, mean"
    return Plot("memserve-fetch-or-recompute", title, "GB/s", "%", tuple(lines), log_x=True)
