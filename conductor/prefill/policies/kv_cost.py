"""The policy "kv_cost", Dynamo's router: one cost in blocks, of prefill work and decode load.

    credit   = device · hbm + host · dram + disk · nvme + shared · blocks of other holders only
    prefill  = max(queued prefill blocks + blocks of the prompt - credit, 0)
    decode   = context blocks of running decodes + blocks of the prompt
    linear:    cost = prefill_load_scale · prefill + decode
    lmetric:   cost = prefill · (decode + 1)

With a temperature T, an instance is drawn with probability ~ exp(-(cost / (max - min)) / T).

Blocks that only other holders have are fetched from the place with the longest prefix, if that
takes less time than computing them: the shared credit assumes so.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np

from ..local_cost import Compute, own
from ..policy_registry import Choice, lowest, register
from ..remote_fetch import extend
from .simple import local_choice

if TYPE_CHECKING:
    import random

    from ..policy_registry import Floats, PolicyQuestion
    from .policy_settings import KvCostSettings


@register("kv_cost")
class KvCost:
    """The lowest cost in blocks."""

    name = "kv_cost"

    def choose(self, question: PolicyQuestion) -> Choice:
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


def _blocks(question: PolicyQuestion, settings: KvCostSettings) -> tuple[Floats, Floats]:
    cluster, rows, tokens = question.cluster, question.rows, float(question.block_tokens)
    prompt = math.ceil(question.request.prompt_tokens / tokens)
    hbm, dram, local = (
        question.tokens(blocks) / tokens
        for blocks in (question.hbm_blocks, question.dram_blocks, question.local_blocks)
    )
    # credits · ranges, with the terms of each boundary combined
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
    """Softmax sampling, scaled by the spread of the costs; the lowest cost without temperature or
    spread."""
    spread = float(np.ptp(cost))
    if temperature <= 0 or spread <= 0:
        return lowest(cost, dice)
    weights = np.exp((cost.min() - cost) / spread / temperature).cumsum()
    return min(int(np.searchsorted(weights, dice.random() * weights[-1], "right")), len(cost) - 1)


def _predicted(question: PolicyQuestion, at: int, cost: Floats, *, fetch: bool) -> Choice:
    """The predictions in seconds for a candidate that was chosen by cost in blocks."""
    compute = Compute(question)
    mine = own(question, compute)
    if not fetch:
        return local_choice(question, at, cost, mine)
    return extend(question, mine, compute).choice(at, cost)
