"""Blocks that another request is computing: a candidate may wait for them, and fetch them if that
is on another instance.

What the candidate's own queue is going to compute needs no waiting (`PolicyQuestion.hbm_blocks`),
unless that request itself is still waiting for blocks: nothing else would keep this one behind it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from ..cost.transfer_model import TIERS
from ..records import Fetch
from .local_cost import turn_s

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from ..state.inflight_prefills import Computed
    from .local_cost import Compute, Own
    from .policy_registry import Blocks, Floats, PolicyQuestion

_HBM = TIERS.index("hbm")


@dataclass(slots=True)
class Awaited:
    """Per candidate the plan to wait for the prefill `computed`, all [candidates]: its blocks are
    there in `ready_s`, then the prompt has its turn in `turn_s`, and takes `own_s`. `able`: who can
    do that, and lacks blocks."""

    question: PolicyQuestion
    computed: Computed
    ready_s: Floats
    turn_s: Floats
    own_s: Floats
    able: NDArray[np.bool_]
    start_blocks: Blocks

    def orders(self, at: int) -> tuple[Fetch, ...]:
        """The fetch of one candidate, once that prefill is done."""
        question, stop, start_block = (
            self.question,
            self.computed.blocks,
            int(self.start_blocks[at]),
        )
        row = int(question.rows[at])
        if row == self.computed.row:
            return ()
        nbytes = (stop - start_block) * question.cluster.block_bytes.item(row)
        seconds = float(self.ready_s[at]) - (self.computed.ready_at - question.now)
        source = question.cluster.name(self.computed.row)
        return (Fetch(start_block, stop, source, "hbm", nbytes, seconds),)


def awaited(
    question: PolicyQuestion, mine: Own, compute: Compute, wait_max_s: float
) -> Awaited | None:
    """The prefill in flight that computes the longest prefix of the prompt, if it is done in
    `wait_max_s`; None without one."""
    if not len(question.computing):
        return None
    computed = question.computing.match(question.request.keys, question.now)
    if computed is None or not question.cluster.used[computed.row]:
        return None
    done_s = computed.ready_at - question.now
    lacks = computed.blocks > mine.blocks
    if done_s > wait_max_s or not lacks.any():
        return None
    start_blocks = mine.fetched_from(question)
    cluster, rows = question.cluster, question.rows
    transfer_s = question.transfers.seconds(
        cluster.node.item(computed.row),
        _HBM,
        cluster.node.take(rows),
        np.maximum(computed.blocks - start_blocks, 0) * cluster.block_bytes.take(rows),
        question.now,
    )
    same = rows == computed.row
    able = lacks & (same | cluster.fetches.take(rows))
    ready_s = done_s + np.where(same, 0.0, transfer_s)
    own_s = mine.load_s + compute.seconds(computed.blocks)
    return Awaited(
        question, computed, ready_s, turn_s(question, ready_s), own_s, able, start_blocks
    )
