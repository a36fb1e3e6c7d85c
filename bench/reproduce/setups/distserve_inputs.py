"""What DistServe's reproductions are given: models, GPUs, workloads, objectives.

From the paper (OSDI '24) and its repository, LLMServe/DistServe (Apache-2.0). The data sets are not
here. Of ShareGPT, the quantiles are those of 1,600 requests in `simdistserve/benchmarks/alignment`;
of HumanEval and LongBench the means are published (figure 7), and the shapes are ours.
"""

from __future__ import annotations

from dataclasses import dataclass

from tiffin.conductor.cost import latency_profiles
from tiffin.conductor.cost.latency_profiles import Profile

from ...planning.attainment import Goals
from ...planning.memory import MODELS
from ...planning.placement import Hardware
from ...planning.workload import Quantiles, Workload, poisson
from ...traces.generator import LogNormal

# Of an A100's 80 GiB; from the tokens that fit per GPU in `max_num_tokens.csv`.
USABLE_BYTES = 0.92 * (80 << 30)

# OPT has positions for so many tokens.
TOKENS_MAX = 2048

SHAREGPT_PROMPT = Quantiles(
    (
        *((0.0, 2), (0.05, 25), (0.1, 89), (0.2, 244), (0.3, 375), (0.4, 512), (0.5, 681)),
        *((0.6, 857), (0.7, 1041), (0.8, 1272), (0.9, 1543), (0.95, 1723), (0.98, 1862)),
        *((0.99, 1922), (1.0, 2031)),
    )
)
SHAREGPT_ANSWER = Quantiles(
    (
        *((0.0, 1), (0.05, 6), (0.1, 9), (0.2, 15), (0.3, 22), (0.4, 36), (0.5, 77), (0.6, 157)),
        *((0.7, 258), (0.8, 349), (0.9, 506), (0.95, 648), (0.98, 805), (0.99, 968), (1.0, 1809)),
    )
)
# Cut at 1,900 to 2,040 tokens, as in the repository; so many are shorter that the mean is 1,738.
LONGBENCH_PROMPT = Quantiles(((0.0, 40), (0.23, 1900), (1.0, 2040)))

# engine -> model -> degrees of tensor parallelism in its profiles.
_DEGREES = {"opt-13b": (1, 2, 4), "opt-66b": (2, 3, 4, 8)}

# vLLM on the same GPUs: `profiler-a100-80g.vllm.json` in milliseconds, prefill and small batches of
# decoding (constant, per token of context, per request).
_VLLM_MS = {
    ("opt-13b", 1): ((22.0522, 0.140509, 8.07658e-6), (23.4750, 5.92934e-4, 0.0607269)),
    ("opt-13b", 2): ((27.4408, 0.0905453, 8.45205e-6), (24.5406, 2.24401e-4, 0.0871579)),
    ("opt-13b", 4): ((30.5363, 0.0515064, 4.23247e-7), (25.9011, 7.75363e-5, 0.0552809)),
    ("opt-66b", 2): ((58.3822, 0.382641, 0.0), (57.0734, 3.64611e-3, 0.224937)),
    ("opt-66b", 3): ((45.7445, 0.277813, 3.64625e-5), (44.9396, 8.09615e-4, 0.212880)),
    ("opt-66b", 4): ((42.9655, 0.212866, 4.60102e-5), (39.5818, 6.94572e-4, 0.135809)),
    ("opt-66b", 8): ((38.9312, 0.157368, 4.53168e-6), (31.1760, 2.75565e-4, 0.0679770)),
}


@dataclass(frozen=True, slots=True)
class Application:
    """A row of the paper's table 1, what vLLM's tensor parallelism was, and what was found: times
    as many requests per second as vLLM (figures 8 and 9), and (tensor, pipeline) parallelism of
    prefill and decode (table 5; for OPT-66B it is printed once)."""

    name: str
    model: str
    prompt: Quantiles | LogNormal
    answer: Quantiles | LogNormal
    goals: Goals
    vllm_degree: int
    published_gain: float
    published_placement: tuple[tuple[int, int], tuple[int, int]]

    def workload(self, count: int, seed: int) -> Workload:
        """So many requests."""
        lengths = (self.prompt, self.answer)
        return poisson(self.name, *lengths, count, seed, tokens_max=TOKENS_MAX - 1)


APPLICATIONS = (
    Application(
        "chat, OPT-13B",
        "opt-13b",
        SHAREGPT_PROMPT,
        SHAREGPT_ANSWER,
        Goals(0.25, 0.1),
        1,
        4.6,
        ((2, 1), (1, 1)),
    ),
    Application(
        "chat, OPT-66B",
        "opt-66b",
        SHAREGPT_PROMPT,
        SHAREGPT_ANSWER,
        Goals(2.5, 0.15),
        4,
        2.75,
        ((4, 1), (2, 2)),
    ),
    Application(
        "code, OPT-66B",
        "opt-66b",
        LogNormal(151.2, 0.5),
        LogNormal(71.3, 0.8),
        Goals(0.125, 0.2),
        4,
        5.72,
        ((4, 1), (2, 2)),
    ),
    Application(
        "summaries, OPT-66B",
        "opt-66b",
        LONGBENCH_PROMPT,
        LogNormal(55.0, 1.0),
        Goals(15.0, 0.15),
        4,
        4.24,
        ((4, 1), (2, 2)),
    ),
)


def distserve(model: str) -> Hardware:
    """DistServe's engine on A100, as in the profiles that ship."""
    names = [f"{model}.a100.tp{degree}.distserve" for degree in _DEGREES[model]]
    return _hardware(model, tuple(latency_profiles.load(name) for name in names))


def vllm(model: str) -> Hardware:
    """vLLM on A100, as DistServe's authors measured it."""
    return _hardware(model, tuple(_vllm_profile(model, degree) for degree in _DEGREES[model]))


def _hardware(model: str, profiles: tuple[Profile, ...]) -> Hardware:
    return Hardware(profiles, MODELS[model], USABLE_BYTES)


def _vllm_profile(model: str, degree: int) -> Profile:
    (c0, c1, c2), (d0, context, request) = _VLLM_MS[model, degree]
    return Profile(
        name=f"{model}.a100.tp{degree}.vllm",
        model=model,
        hardware=f"{degree} x A100 80 GB",
        tensor_parallel=degree,
        source="LLMServe/DistServe, simdistserve, profiler-a100-80g.vllm.json",
        licence="Apache-2.0",
        prefill=(c0 / 1e3, c1 / 1e3, c2 / 1e3),
        decode=(d0 / 1e3, request / 1e3, context / 1e3),
    )
