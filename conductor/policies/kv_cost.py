"""Dynamo's router: one cost in blocks, of what has to be computed and of what is decoded.

    credit   = device · hbm + host · dram + disk · nvme + shared · what only others have
    prefill  = max(queued prefill blocks + blocks of the prompt - credit, 0)
    decode   = blocks of context that are decoded + blocks of the prompt
    linear:    cost = prefill_load_scale · prefill + decode
    lmetric:   cost = prefill · (decode + 1)

With a temperature T, an instance is drawn with probability ~ exp(-(cost / (max - min)) / T).

Blocks that only others have are fetched from whoever has the longest prefix, if that takes less
than computing them: that is what the shared credit counts on.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np

from .base import Choice, lowest, register
from .fetching import extend
from .local import Compute, own
from .simple import local_choice

if TYPE_CHECKING:
    import random

    from .base import Floats, Question
    from .settings import KvCostSettings


@register("kv_cost")
class KvCost:
    """The lowest cost in blocks."""

    name = "kv_cost"

    def choose(self, question: Question) -> Choice:
        """The cost is in blocks, or in squares of them for `lmetric`."""
        settings = question.settings.kv_cost
        prefill, decode = _blocks(question, settings)
        if settings.form == "linear":
            cost = settings.prefill_load_scale * prefill + decode
        else:
            cost = prefill * (decode + 1.0)
        at = _draw(cost, settings.temperature, question.dice)
        choice = _predicted(question, at, cost, fetch=settings.shared_credit > 0)
        choice.terms |= {"prefill_blocks": prefill, "decode_blocks": decode}
        return choice


def _blocks(question: Question, settings: KvCostSettings) -> tuple[Floats, Floats]:
    cluster, rows, tokens = question.cluster, question.rows, float(question.block_tokens)
    prompt = math.ceil(question.request.prompt_tokens / tokens)
    hbm, dram, local = question.hbm_blocks, question.dram_blocks, question.local_blocks
    # credits · ranges, with the terms of each boundary put together
    credit = (
        (settings.device_credit - settings.host_credit) * hbm
        + (settings.host_credit - settings.disk_credit) * dram
        + settings.disk_credit * local
        + settings.shared_credit * np.maximum(question.pool_blocks - local, 0)
    )
    prefill: Floats = np.maximum(cluster.queued_tokens[rows] / tokens + prompt - credit, 0.0)
    decode: Floats = cluster.context_tokens[rows] / tokens + prompt
    return prefill, decode


def _draw(cost: Floats, temperature: float, dice: random.Random) -> int:
    """Softmax over the spread of the costs; the lowest one without temperature or spread."""
    spread = float(np.ptp(cost))
    if temperature <= 0 or spread <= 0:
        return lowest(cost, dice)
    weights = np.exp((cost.min() - cost) / spread / temperature).cumsum()
    return min(int(np.searchsorted(weights, dice.random() * weights[-1], "right")), len(cost) - 1)


def _predicted(question: Question, at: int, cost: Floats, *, fetch: bool) -> Choice:
    """What follows, in seconds, from a choice that was made by blocks."""
    compute = Compute(question)
    mine = own(question, compute)
    if not fetch:
        return local_choice(question, at, cost, mine)
    best = extend(question, mine, compute)
    terms = {
        "queue_s": question.queue_s,
        "load_s": mine.load_s,
        "transfer_s": best.transfer_s,
        "prefill_s": best.compute_s,
    }
    fetches = best.fetches(at, int(mine.blocks[at]))
    return Choice(at, cost, best.ttft_s, int(best.blocks[at]), terms, fetches)
