"""What every policy needs to predict: what a candidate has at hand, and what is left to compute.

    compute(p) = c0 + c1 (n - p) + c2 (n² - p²)          n tokens, of which p are there
    load       = bytes in DRAM / its bandwidth + bytes on NVMe / its bandwidth

A disk can be slower than the GPU. Each candidate therefore uses what it has in HBM, or that and
DRAM, or that and NVMe, whichever is fastest. Nothing between them can be better: what loading so
many blocks saves is convex in their number, because later tokens are dearer to compute.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from .base import Blocks, Floats, Question


class Compute:
    """Seconds to compute a prompt of which leading blocks are there. The question's `prefill_s`,
    with what does not depend on the blocks taken out, as policies ask several times."""

    def __init__(self, question: Question) -> None:
        cluster, rows, n = question.cluster, question.rows, float(question.request.prompt_tokens)
        self.block_tokens = question.block_tokens
        self._tokens_max = n - 1  # the last one is always computed
        self._c1, self._c2 = cluster.c1.take(rows), cluster.c2.take(rows)
        self._all_s = cluster.c0.take(rows) + (self._c1 + self._c2 * n) * n

    def seconds(self, blocks: NDArray[np.int64] | NDArray[np.float64] | int) -> Floats:
        """`blocks` [..., candidates] or one number; returns [..., candidates]."""
        tokens: Floats | float
        if isinstance(blocks, int):
            tokens = min(blocks * float(self.block_tokens), self._tokens_max)
        else:
            tokens = np.minimum(blocks * float(self.block_tokens), self._tokens_max)
        seconds: Floats = self._all_s - (self._c1 + self._c2 * tokens) * tokens
        return seconds

    def of(self, candidates: Blocks) -> Compute:
        """The same for some candidates only."""
        some = Compute.__new__(Compute)
        some.block_tokens, some._tokens_max = self.block_tokens, self._tokens_max
        some._c1, some._c2 = self._c1[candidates], self._c2[candidates]
        some._all_s = self._all_s[candidates]
        return some


@dataclass(slots=True)
class Own:
    """What each candidate does with its own blocks: uses `blocks` of them, after `load_s` of
    reading those that are not in HBM, and computes the rest in `compute_s`. All [candidates]."""

    blocks: Blocks
    load_s: Floats
    compute_s: Floats


def tier_block_s(question: Question) -> tuple[Floats, Floats]:
    """Seconds to read one block from the own node's DRAM, and from its NVMe, [candidates]."""
    nbytes = question.cluster.block_bytes[question.rows]
    ways = question.transfers.settings
    return nbytes / ways.dram_bandwidth_bytes_s, nbytes / ways.nvme_bandwidth_bytes_s


def own(question: Question, compute: Compute) -> Own:
    """The best that each candidate can do alone."""
    blocks = question.hbm_blocks
    best = Own(blocks, np.zeros(len(blocks)), compute.seconds(blocks))
    if question.local_blocks is blocks:
        return best  # no node has any of it
    load_s = best.load_s
    for more, block_s in zip(
        (question.dram_blocks, question.local_blocks), tier_block_s(question), strict=True
    ):
        added = more - blocks
        if added.any():
            load_s = load_s + added * block_s
            best = _better(best, Own(more, load_s, compute.seconds(more)))
        blocks = more
    return best


def _better(one: Own, other: Own) -> Own:
    swap = other.load_s + other.compute_s < one.load_s + one.compute_s
    return Own(
        np.where(swap, other.blocks, one.blocks),
        np.where(swap, other.load_s, one.load_s),
        np.where(swap, other.compute_s, one.compute_s),
    )


def start_s(queue_s: Floats, bring_s: Floats, *, overlap: bool) -> Floats:
    """When prefill starts: after the queue and after its blocks came, which may be at the same
    time."""
    started: Floats = np.maximum(queue_s, bring_s) if overlap else queue_s + bring_s
    return started
