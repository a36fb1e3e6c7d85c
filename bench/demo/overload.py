"""Overload: more requests than the workers can serve, without and with predictive admission.

The same arrivals twice, once with admission's mode "off" and once with "predictive". Prompts have
the lengths and shared prefixes of the trace, but new tokens in each pass, so that neither pass
finds blocks of another in the pool.
"""

from __future__ import annotations

import urllib.request
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
from prometheus_client.parser import text_string_to_metric_families

from ..serving.errors import ProcessFailed
from .engines.model import VOCAB
from .engines.trace import load_slice, tokens_of
from .router import DemoPrompt

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from tiffin.conductor.client import ConductorClient

    from .router import Router, ServedRequest

MODES = ("off", "predictive")
# The rate of arrivals, as a multiple of the rate in the pass before, where clients (as many as
# prefill workers) send the next prompt when the last one is answered.
OVERLOAD = 3.0
# How long requests arrive, as a multiple of the objective. The queue grows by two seconds every
# three seconds: at the end a request that is not rejected waits longer than twice the objective, on
# slow machines and on fast ones.
LASTS_OBJECTIVES = 4.0
# The share of the objective up to which admission accepts a predicted time. Predictions are too low
# as often as too high, and in an overload the queue is as long as admission allows: without a
# margin, half of the last accepted requests would be late.
SCALE = 0.8
_SHADOW = "tiffin_conductor_shadow_requests"
_METRICS_TIMEOUT_S = 5.0


@dataclass(slots=True)
class Pass:
    """The results of one mode. `shadow`: the conductor's own counts of requests, by outcome."""

    mode: str
    served: list[ServedRequest] = field(default_factory=list)
    shadow: dict[str, int] = field(default_factory=dict)


def arrivals(rate_s: float, lasts_s: float, seed: int) -> list[float]:
    """Times of arrival, seconds from the first: a Poisson process."""
    dice, times = np.random.default_rng(seed), [0.0]
    while times[-1] < lasts_s:
        times.append(times[-1] + float(dice.exponential(1 / rate_s)))
    return times[:-1]


def prompts(count: int, seed: int) -> list[DemoPrompt]:
    """`count` prompts of the slice, from its first one on, repeated if needed; tokens by seed."""
    requests, made = load_slice(), []
    for number in range(count):
        turn, index = divmod(number, len(requests))
        tokens = tokens_of(requests[index], seed=seed + turn * 1000, vocab=VOCAB).tolist()
        made.append(DemoPrompt(index, tokens))
    return made


def overload(
    router: Router,
    client: ConductorClient,
    url: str,
    times_s: Sequence[float],
    ttft_s: float,
    seed: int,
    ended: Callable[[str, ServedRequest], None],
) -> list[Pass]:
    """Run both passes; `ended` is called with the mode and each ended request. Raises
    ProcessFailed."""
    passes = []
    for number, mode in enumerate(MODES, start=1):
        client.patch({"admission": {"mode": mode, "class_scales": {"normal": SCALE}}})
        before = shadow_counts(url)
        served = router.replay(
            mode,
            prompts(len(times_s), seed + number),
            arrivals_s=times_s,
            ttft_s=ttft_s,
            ended=partial(ended, mode),
        )
        after = shadow_counts(url)
        shadow = {name: after[name] - before.get(name, 0) for name in after}
        passes.append(Pass(mode, served, {k: v for k, v in shadow.items() if v}))
    return passes


def shadow_counts(url: str) -> dict[str, int]:
    """The shadow counts of a conductor, from its metrics: requests by outcome. Raises
    ProcessFailed."""
    try:
        with urllib.request.urlopen(f"{url}/metrics", timeout=_METRICS_TIMEOUT_S) as answer:
            text = answer.read().decode()
    except OSError as error:
        raise ProcessFailed(f"the conductor gave no metrics: {error}") from error
    return {
        sample.labels["outcome"]: int(sample.value)
        for family in text_string_to_metric_families(text)
        if family.name == _SHADOW
        for sample in family.samples
    }


def in_time(served: Sequence[ServedRequest], ttft_s: float) -> int:
    """How many were answered, and had their first token within the objective."""
    return sum(not one.rejected and one.ttft_s <= ttft_s for one in served)


def summarise(one: Pass, ttft_s: float) -> dict[str, Any]:
    """The summary of one mode. `goodput`: requests that met the objective, of all that arrived;
    `goodput_s`: per second, from the first arrival until the last one would have been in time."""
    admitted = [served for served in one.served if not served.rejected]
    times_s = [served.ttft_s for served in admitted]
    met = in_time(one.served, ttft_s)
    lasts_s = max((served.at_s for served in one.served), default=0.0) + ttft_s
    return {
        "arrived": len(one.served),
        "admitted": len(admitted),
        "rejected": len(one.served) - len(admitted),
        "met": met,
        "met_share": met / len(admitted) if admitted else 0.0,
        "goodput": met / len(one.served) if one.served else 0.0,
        "goodput_s": met / lasts_s,
        "ttft_p50_s": float(np.percentile(times_s, 50)) if times_s else 0.0,
        "ttft_p90_s": float(np.percentile(times_s, 90)) if times_s else 0.0,
        "shadow": one.shadow,
    }
