"""Degradation: what may be given up so that a request is not refused. Pure.

    cap_output      its answer is cut at `output_tokens_cap`
    local_prefill   nothing is transferred: the instance that decodes it computes its prompt
    relax           its objectives are `relax_factor` times as long
    smaller_model   another model answers it, of `smaller_models`
    best_effort     it has no objectives any more, and waits in the lowest class

The operator lists steps, the least harmful first, for all classes of priority or for each.
Admission (`admission.py`) tries each alone, then two together, and so on. This module says which
steps a request has, and what the request is after them.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Literal

from ..records import Objectives, PromptKeys

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from ..records import Request

Step = Literal["cap_output", "local_prefill", "relax", "smaller_model", "best_effort"]
STEPS = 5


def possible(
    step: Step, request: Request, output_tokens_cap: int, smaller_models: Mapping[str, str]
) -> bool:
    """Whether a step takes anything from a request that it still has."""
    if step == "cap_output":
        already = request.output_tokens_max
        return already is None or already > output_tokens_cap
    if step == "smaller_model":
        return smaller_models.get(request.model, request.model) != request.model
    return step == "local_prefill" or request.objectives != Objectives()


def after(
    steps: Sequence[Step],
    request: Request,
    *,
    output_tokens_cap: int,
    smaller_models: Mapping[str, str],
    lowest_class: str,
) -> Request:
    """The request after the steps. "local_prefill" and "relax" change nothing in it: the one is
    about where it runs, the other about what it is compared with."""
    if "cap_output" in steps:
        wanted = request.output_tokens
        request = replace(
            request,
            output_tokens_max=output_tokens_cap,
            output_tokens=None if wanted is None else min(wanted, output_tokens_cap),
        )
    if "smaller_model" in steps:
        # Blocks of one model are of no use to another, and are named by other keys.
        request = replace(request.in_space(PromptKeys()), model=smaller_models[request.model])
    if "best_effort" in steps:
        request = replace(request, objectives=Objectives(), priority=lowest_class)
    return request


def relaxed(objectives: Objectives, steps: Sequence[Step], factor: float) -> Objectives:
    """What is left of the objectives after the steps."""
    if "best_effort" in steps:
        return Objectives()
    if "relax" not in steps:
        return objectives
    ttft_s, tbt_s = objectives.ttft_s, objectives.tbt_s
    return Objectives(
        ttft_s=None if ttft_s is None else ttft_s * factor,
        tbt_s=None if tbt_s is None else tbt_s * factor,
    )
