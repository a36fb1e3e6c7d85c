"""A look-alike of Mooncake's synthetic workload, whose trace does not ship with Tiffin.

The paper (FAST '25, section 5.1) mixes conversations of ShareGPT, questions over documents of
L-Eval and of LooGLE, 1 : 1 : 1, in several turns, arriving as a Poisson process. So does this, with
the generator of `tiffin trace`. Its numbers are set so that what is published of the trace comes
out, and nothing else was looked at: `PUBLISHED`, which `likeness` compares.
"""

from __future__ import annotations

import heapq
from collections import Counter
from dataclasses import replace
from functools import cache
from itertools import islice
from random import Random
from typing import TYPE_CHECKING

from ...traces.generator import LogNormal, Sessions, WorkloadParameters
from ...traces.ideal_cache import hit_share
from ...traces.statistics import describe
from ...traces.trace import BLOCK_TOKENS, Trace
from ..evidence import Comparison

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ...traces.trace import TraceRequest

REQUESTS = 3993
_RATE = 3.9  # requests per second, a third of each part
# What comes first is left out, until as many sessions end as begin.
_WARM_UP_REQUESTS = 6_000


def _part(
    turns: float, opening: LogNormal, addition: LogNormal, answer: LogNormal, pause: LogNormal
) -> WorkloadParameters:
    """Sessions of a third of the requests, which share nothing with each other."""
    return WorkloadParameters(
        rate=_RATE / 3,
        prefixes=1,
        prefix=LogNormal(1, 0),
        popularity=0,
        turns=turns,
        opening=opening,
        addition=addition,
        answer=answer,
        pause=pause,
        system_blocks=0,
        longest=196_608,
    )


PARTS = {
    # Short prompts that grow, and long answers.
    "ShareGPT": _part(
        *(5, LogNormal(700, 1.0), LogNormal(100, 1.0)),
        *(LogNormal(290, 0.5), LogNormal(70, 1.2)),
    ),
    # Documents of all lengths, and few questions on each.
    "L-Eval": _part(
        *(1.95, LogNormal(13_500, 0.75), LogNormal(60, 0.7)),
        *(LogNormal(45, 1.0), LogNormal(110, 1.3)),
    ),
    # Long documents, and many questions on each.
    "LooGLE": _part(
        *(10, LogNormal(24_000, 0.47), LogNormal(40, 0.5)),
        *(LogNormal(35, 0.6), LogNormal(45, 1.3)),
    ),
}

# Of the trace: section 5.1 of the paper, its figure 9 for what caches of so many tokens hit, and
# the rest from the public file's own lengths and block ids.
PUBLISHED = {
    "requests per second": 3.9,
    "prompt tokens, mean": 15_325.0,
    "prompt tokens, p50": 11_587.0,
    "prompt tokens, p90": 38_615.0,
    "prompt tokens, p99": 66_458.0,
    "answer tokens, mean": 149.0,
    "answer tokens, p50": 69.0,
    "answer tokens, p90": 389.0,
    "answer tokens, p99": 769.0,
    "distinct blocks": 43_924.0,
    "of these used once, %": 58.0,
    "uses of the hottest block": 24.0,
    "hit without limit, %": 65.8,
    "hit by 1M tokens, %": 14.6,
    "hit by 4M tokens, %": 38.0,
    "hit by 10M tokens, %": 58.9,
}


@cache
def synthetic_look_alike(seed: int = 0) -> Trace:
    """As many requests as the trace has; the same for the same seed."""
    chance = Random(seed)
    parts = [_numbered(part, Random(chance.random()), at) for at, part in enumerate(PARTS.values())]
    merged = heapq.merge(*parts, key=lambda request: request.arrival_s)
    kept = list(islice(merged, _WARM_UP_REQUESTS, _WARM_UP_REQUESTS + REQUESTS))
    start_s = kept[0].arrival_s
    moved = (replace(r, arrival_s=round(r.arrival_s - start_s, 6)) for r in kept)
    return Trace("synthetic, a look-alike", tuple(moved))


def _numbered(part: WorkloadParameters, chance: Random, at: int) -> Iterator[TraceRequest]:
    """The requests of a part, with block ids that no other part has."""
    for request in Sessions(part, chance).requests():
        yield replace(request, blocks=tuple(len(PARTS) * block + at for block in request.blocks))


def likeness(trace: Trace) -> tuple[Comparison, ...]:
    """All that is published of the trace, beside this one's."""
    ours = _figures(trace)
    return tuple(Comparison(what, value, ours[what]) for what, value in PUBLISHED.items())


def _figures(trace: Trace) -> dict[str, float]:
    about = describe(trace)
    assert about.sharing is not None, "it has blocks"
    uses = Counter(block for request in trace.requests for block in request.blocks)
    found = {"requests per second": about.rate, "distinct blocks": float(len(uses))}
    for what, spread in (("prompt", about.prompt_tokens), ("answer", about.output_tokens)):
        for name in ("mean", "p50", "p90", "p99"):
            found[f"{what} tokens, {name}"] = float(getattr(spread, name))
    found["of these used once, %"] = 100 * about.sharing.used_once
    found["uses of the hottest block"] = float(max(uses.values()))
    found["hit without limit, %"] = 100 * about.sharing.infinite_hit
    for tokens in (1, 4, 10):
        share = hit_share(trace, tokens * 1_000_000 // BLOCK_TOKENS)
        found[f"hit by {tokens}M tokens, %"] = 100 * share
    return found
