"""Predicted seconds for a candidate to load its own cached blocks and compute the rest of a prompt.

    compute(p) = c0 + c1 (n - p) + c2 (n² - p²)          n tokens, of which p are cached
    load       = bytes in DRAM / its bandwidth + bytes on NVMe / its bandwidth

A disk can be slower than the GPU. Each candidate therefore uses its cached blocks in HBM, or those
in HBM and DRAM, or those in all three tiers, whichever is fastest. No number of blocks in between
can be better: the time saved by loading blocks is convex in their number, because later tokens cost
more to compute.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from .policy_registry import Blocks, Floats, PolicyQuestion


class Compute:
    """Seconds to compute a prompt of which leading blocks are cached. The question's `prefill_s`,
    with the terms that do not depend on the blocks precomputed, as policies call it several times.
    """

    def __init__(self, question: PolicyQuestion) -> None:
        cluster, rows, n = question.cluster, question.rows, float(question.request.prompt_tokens)
        self.block_tokens = question.block_tokens
        self._tokens_max = n - 1  # the last token is always computed
        self._tokens_min = question.cached_part_tokens  # whatever is loaded: an engine has these
        self._c1, self._c2 = cluster.c1.take(rows), cluster.c2.take(rows)
        self._all_s = cluster.c0.take(rows) + (self._c1 + self._c2 * n) * n

    def seconds(self, blocks: NDArray[np.int64] | NDArray[np.float64] | int) -> Floats:
        """`blocks` [..., candidates] or one number; returns [..., candidates]."""
        tokens: Floats | float
        if isinstance(blocks, int):
            tokens = min(blocks * float(self.block_tokens), self._tokens_max)
        else:
            tokens = np.minimum(blocks * float(self.block_tokens), self._tokens_max)
        if self._tokens_min is not None:
            tokens = np.maximum(tokens, self._tokens_min)
        seconds: Floats = self._all_s - (self._c1 + self._c2 * tokens) * tokens
        return seconds


@dataclass(slots=True)
class Own:
    """The plan of each candidate with its own blocks only: it uses `blocks` of them, after `load_s`
    of reading those that are not in HBM, and computes the rest in `compute_s`. All [candidates]."""

    blocks: Blocks
    load_s: Floats
    compute_s: Floats

    def fetched_from(self, question: PolicyQuestion) -> Blocks:
        """The first block of a remote fetch, [candidates]: an engine begins when the request
        arrives, and fetches what it does not hold then, also what queued prompts will compute."""
        if question.held_blocks is question.local_blocks:
            return self.blocks
        return np.minimum(self.blocks, question.held_blocks)


def tier_block_s(question: PolicyQuestion) -> tuple[Floats, Floats]:
    """Seconds to read one block from the candidate's own node's DRAM, and from its NVMe,
    [candidates]."""
    nbytes = question.cluster.block_bytes[question.rows]
    ways = question.transfers.settings
    return nbytes / ways.dram_bandwidth_bytes_s, nbytes / ways.nvme_bandwidth_bytes_s


def own(question: PolicyQuestion, compute: Compute) -> Own:
    """The best plan of each candidate without remote fetches."""
    blocks = question.hbm_blocks
    best = Own(blocks, np.zeros(len(blocks)), compute.seconds(blocks))
    if question.local_blocks is blocks:
        return best  # no candidate's node adds blocks to those in HBM
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


def turn_s(question: PolicyQuestion, ready_s: Floats | float = 0.0) -> Floats:
    """Seconds until the turn of a request whose blocks will have come in `ready_s`, [candidates]:
    they come while it queues. Prompts that are queued there before it and whose blocks come earlier
    than its turn go first; those whose blocks come later do not."""
    begins_s: Floats = np.maximum(question.queue_s, ready_s)
    coming = question.coming
    if coming is None:
        return begins_s
    after_s = np.maximum(question.queue_s, coming.ready_s) + coming.seconds
    behind = coming.ready_s <= begins_s
    turns_s: Floats = np.where(behind, np.maximum(after_s, ready_s), begins_s)
    return turns_s
