"""TetriInfer's choice of a decode instance (arXiv 2401.11181), known at second hand.

Lengths of answers are predicted, and of two random instances with room the request goes to the one
with fewer decodes of its kind, heavy or light. Against it: a random instance, and the one with the
fewest requests (JSQ), both without a prediction. The hardware is that of the shipped profile for
the paper's model, its prefill instances are many enough to be out of the way.
"""

from __future__ import annotations

from random import Random
from typing import TYPE_CHECKING

import numpy as np

from tiffin.conductor.records import Role

from ....plots import Line, Plot
from ....sim.cluster.elastic_cluster import ElasticOptions, simulate_elastic
from ....traces.phases import Phase, RequestKind, in_phases
from ...evidence import Evidence, Statement
from ...registry import reproduction

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ....sim.instances.mixed_instance import MixedInstance
    from ....traces.trace import Trace, TraceRequest
    from ...registry import Effort, Tell

PROFILE = "opt-13b.a100.tp1.distserve"
# Keys and values of 5,120 dimensions of 40 layers, in 16 bits; room for them as DistServe has it.
TOKEN_BYTES, KV_CAPACITY_TOKENS = 2 * 5120 * 40 * 2, 66_144
# The paper's bounds of what is heavy, and OPT's context of 2,048 tokens in halves.
LIGHT_PREFILL, HEAVY_PREFILL = (18, 512), (513, 1024)
HEAVY_TOKENS = 128
LIGHT_DECODE, HEAVY_DECODE = (2, HEAVY_TOKENS), (HEAVY_TOKENS + 1, 1024)
MIXED = tuple(
    RequestKind(prompt, output)
    for prompt in (LIGHT_PREFILL, HEAVY_PREFILL)
    for output in (LIGHT_DECODE, HEAVY_DECODE)
)
# Of the paper's predictor, in its buckets of 200 tokens; here of the kind that the caller names.
ACCURACY = 0.749

RATES = (16.0, 20.0, 24.0)  # requests/s; eight decode instances can take some 26
REQUESTS = 1500
WAYS = ("random", "fewest requests", "two-level", "tbt")


def random_one(able: Sequence[MixedInstance], chance: Random) -> MixedInstance:
    """Any instance."""
    return chance.choice(able)


def fewest_requests(able: Sequence[MixedInstance], chance: Random) -> MixedInstance:
    """Join the shortest queue: the instance with the fewest requests, as of now."""
    return min(able, key=lambda one: one.decoding)


def options(way: str, seed: int, trace: Trace) -> ElasticOptions:
    """A cluster that chooses its decode instances so. Callers name the right kind of answer in
    `ACCURACY` of all cases."""
    chance = Random(seed)
    kinds = {
        request.arrival_s: (request.output_tokens > HEAVY_TOKENS) == (chance.random() < ACCURACY)
        for request in trace.requests
    }

    def output_class(request: TraceRequest) -> str:
        return "heavy" if kinds[request.arrival_s] else "light"

    return ElasticOptions(
        {Role.PREFILL: 8, Role.DECODE: 8},
        {} if way in WAYS[:2] else {"decode": {"policy": way}},
        profile=PROFILE,
        token_bytes=TOKEN_BYTES,
        kv_capacity_tokens=KV_CAPACITY_TOKENS,
        choose_decode={"random": random_one, "fewest requests": fewest_requests}.get(way),
        output_class=output_class,
        seed=seed,
    )


def decoded(way: str, rate: float, seed: int, requests: int = REQUESTS) -> tuple[float, float]:
    """(mean seconds from a request's arrival to its end, 99th percentile of its seconds per token)
    at this rate."""
    trace = in_phases((Phase(requests / rate, rate, MIXED),), seed)
    jobs = simulate_elastic(trace, options(way, seed, trace)).jobs
    ends_s = [job.ended_s - job.trace.arrival_s for job in jobs if job.ended_s is not None]
    token_s = [float(np.mean(job.gaps_s)) for job in jobs if job.gaps_s]
    return float(np.mean(ends_s)), float(np.quantile(token_s, 0.99))


@reproduction(
    "tetriinfer-scheduling",
    "Decode instances by predicted length",
    "TetriInfer, arXiv 2401.11181",
    second_hand=True,
)
def scheduling(effort: Effort, tell: Tell) -> Evidence:
    """Times of requests over the rate, by the way to choose; means over the seeds."""
    found: dict[tuple[str, float], tuple[float, float]] = {}
    for rate in RATES:
        for way in WAYS:
            tell(f"{way}, {rate:g} requests/s")
            runs = [decoded(way, rate, seed) for seed in effort.seeds]
            found[way, rate] = tuple(np.mean(runs, axis=0).tolist())
    top = RATES[-1]
    ends_s = {way: found[way, top][0] for way in WAYS}
    token_s = {way: found[way, top][1] for way in WAYS}
    at = f"at {top:g} requests/s"
    per_token = ", ".join(f"{way} {seconds * 1e3:.0f} ms" for way, seconds in token_s.items())
    whole = ", ".join(f"{way} {seconds:.2f} s" for way, seconds in ends_s.items())
    statements = (
        Statement(
            f"two levels give a lower 99th percentile of time per token than chance, {at}",
            token_s["two-level"] < token_s["random"],
            per_token,
        ),
        Statement(
            f"and a lower mean time of a request, {at}",
            ends_s["two-level"] < ends_s["random"],
            whole,
        ),
        Statement(
            "with two candidates they are within 5% of the shortest queue of all, in both",
            token_s["two-level"] <= 1.05 * token_s["fewest requests"]
            and ends_s["two-level"] <= 1.05 * ends_s["fewest requests"],
            f"{token_s['two-level'] / token_s['fewest requests'] - 1:+.1%} and "
            f"{ends_s['two-level'] / ends_s['fewest requests'] - 1:+.1%}",
        ),
        Statement(
            "the conductor's default, the lowest predicted time between tokens, is no worse",
            token_s["tbt"] <= token_s["two-level"] and ends_s["tbt"] <= ends_s["two-level"],
            f"{token_s['tbt'] / token_s['two-level'] - 1:+.1%} and "
            f"{ends_s['tbt'] / ends_s['two-level'] - 1:+.1%}",
        ),
    )
    lines = [Line(way, RATES, tuple(found[way, rate][1] * 1e3 for rate in RATES)) for way in WAYS]
    title = "Time per token of light and heavy decodes, 99th percentile"
    plot = Plot("tetriinfer-scheduling", title, "requests/s", "ms", tuple(lines))
    return Evidence((), statements, (plot,))
