"""Splitwise's hand-over of the KV cache (ISCA '24, section 4.2): serialized, and layer by layer.

One request on an idle pair of machines, as in the paper. Inputs: the latency profiles of its
machines, the bandwidth and the bytes per token of its simulator, and what it measured of a
layer-wise hand-over that is not overlapped. The switch between both ways is the conductor's own.
"""

from __future__ import annotations

from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING

import numpy as np

from tiffin.conductor.core import Conductor
from tiffin.conductor.cost import latency_profiles
from tiffin.conductor.cost.latency_model import decode_step_s, prefill_s
from tiffin.conductor.records import Decision, InstanceSpec, Request, Role

from ...plots import Line, Plot
from ...sim.clock import VirtualClock
from ...sim.instances.decode_instance import DecodeInstance
from ...sim.instances.sim_request import SimRequest
from ...sim.nodes.handover import HandOver
from ...sim.nodes.network import Network
from ...traces.trace import TraceRequest
from ..evidence import Comparison, Evidence, Statement
from ..registry import reproduction
from ..setups.inputs import azure_code

if TYPE_CHECKING:
    from ..registry import Effort, Tell

# splitwise-sim (MIT): `transfer_bandwidth: 200`, in GiB/s, and `estimate_kv_cache_size`, which
# counts keys and values of all 8,192 dimensions of 80 layers in 16 bits: without grouped queries.
BANDWIDTH_BYTES_S = 200 * 2.0**30
LAYERS = 80
TOKEN_BYTES = 2 * 8192 * LAYERS * 2
# Section 6.2: what is left of a layer-wise transfer when the prefill is done.
NOT_OVERLAPPED_S = {"a100": 8e-3, "h100": 5e-3}
NOTES = (
    "The paper does not say of which requests its overheads of a whole answer are. Of the code "
    "trace's time they are 2.5% and 0.5%, of its median request 3.9% and 1.1%: its 3% and 0.8% lie "
    "between.",
    "512 tokens are one threshold for both GPUs: here layer-wise pays from 415 tokens on H100 and "
    "from 664 on A100.",
)
# The sizes of the paper's figures 14 and 15.
PROMPTS = (128, 256, 384, 512, 640, 768, 1024, 1536, 2048, 3072, 4096)
WAYS = ("serialized", "layer-wise", "conductor")


@dataclass(frozen=True, slots=True)
class Latencies:
    """Of one request, in seconds: until the second token after the first, and in all."""

    second_token_s: float
    end_to_end_s: float


def served(gpu: str, prompt_tokens: int, output_tokens: int, way: str) -> Latencies:
    """One request on two idle machines. `way`: one of `WAYS`, or "none": KV that needs no
    transfer, as on one machine."""
    clock, found = VirtualClock(), list[Latencies]()
    network = Network(clock, BANDWIDTH_BYTES_S, 0.0)
    profile = latency_profiles.load(f"llama-2-70b.{gpu}.tp8.splitwise")
    computing_s = float(prefill_s(*profile.prefill, prompt_tokens, 0))
    job = SimRequest("r", TraceRequest(0.0, prompt_tokens, output_tokens), ())

    def ended(job: SimRequest) -> None:
        found.append(Latencies(job.gaps_s[0], clock.now_s))

    decode = DecodeInstance("decode", clock, profile, 1_000_000, 256, ended)
    whole = HandOver(
        "prefill", "decode", prompt_tokens * TOKEN_BYTES, LAYERS, NOT_OVERLAPPED_S[gpu]
    )
    by_layer = way == "layer-wise" or (way == "conductor" and layerwise(gpu, prompt_tokens))

    def computed() -> None:
        job.first_token_s = clock.now_s
        if way == "none":
            decode.join(job)
        elif not by_layer:
            whole.serialized(network, lambda: decode.join(job))

    clock.after(computing_s, computed)
    if by_layer:
        whole.layerwise(clock, network, computing_s, lambda: decode.join(job))
    clock.run(lambda: not found)
    return found[0]


def layerwise(gpu: str, prompt_tokens: int) -> bool:
    """Whether the conductor has a prompt handed over layer by layer."""
    core, name = Conductor(), f"llama-2-70b.{gpu}.tp8.splitwise"
    for role in (Role.PREFILL, Role.DECODE):
        core.register(InstanceSpec(role, "m", role, name, block_bytes=512 * TOKEN_BYTES), 0.0)
    decision = core.schedule(Request("r", "m", prompt_tokens), 0.0)
    assert isinstance(decision, Decision)
    return decision.layerwise


def overheads(gpu: str, prompt_tokens: int, output_tokens: int, way: str) -> tuple[float, float]:
    """By how much the second token, and the whole answer, come later than without a transfer: as
    shares."""
    one = served(gpu, prompt_tokens, output_tokens, way)
    ideal = served(gpu, prompt_tokens, output_tokens, "none")
    return (
        one.second_token_s / ideal.second_token_s - 1,
        one.end_to_end_s / ideal.end_to_end_s - 1,
    )


def break_even_tokens(gpu: str) -> int:
    """The shortest prompt that is served sooner layer by layer, to a token."""
    low, high = 1, max(PROMPTS)
    while high - low > 1:
        middle = (low + high) // 2
        by_layer = served(gpu, middle, 2, "layer-wise").second_token_s
        if by_layer < served(gpu, middle, 2, "serialized").second_token_s:
            high = middle
        else:
            low = middle
    return high


@reproduction(
    "splitwise-transfer", "The KV's hand-over, whole and by layers", "Splitwise, ISCA '24, sec. 6.2"
)
def transfer(effort: Effort, tell: Tell) -> Evidence:
    """Overheads of both ways at the code trace's median request, and over prompt lengths."""
    requests = azure_code().requests
    prompt = round(median(one.prompt_tokens for one in requests))
    output = round(median(one.output_tokens for one in requests))
    tell(f"{prompt} tokens in, {output} out")
    at = {
        (gpu, way): overheads(gpu, prompt, output, way) for gpu in NOT_OVERLAPPED_S for way in WAYS
    }
    (second, whole), (second_layered, whole_layered) = (at["h100", way] for way in WAYS[:2])
    comparisons = (
        Comparison("second token later, serialized, H100", 64.0, second * 100, "%"),
        Comparison("second token later, layer-wise, H100", 16.5, second_layered * 100, "%"),
        Comparison("whole answer later, serialized, H100", 3.0, whole * 100, "%"),
        Comparison("whole answer later, layer-wise, H100", 0.8, whole_layered * 100, "%"),
        Comparison("layer-wise pays from, H100", 512, break_even_tokens("h100"), "tokens"),
    )
    return Evidence(comparisons, _statements(at, prompt), _plots(), NOTES)


def _statements(
    at: dict[tuple[str, str], tuple[float, float]], prompt_tokens: int
) -> tuple[Statement, ...]:
    left = {
        gpu: not_overlapped_s / _prompt_s(gpu, prompt_tokens)
        for gpu, not_overlapped_s in NOT_OVERLAPPED_S.items()
    }
    regret_s = {gpu: max(_regret_s(gpu, tokens) for tokens in PROMPTS) for gpu in NOT_OVERLAPPED_S}
    serialized, layered = _of_the_whole_trace("h100")
    return (
        Statement(
            "layer by layer is better at the median request of the code trace, on both GPUs",
            all(at[gpu, "layer-wise"] < at[gpu, "serialized"] for gpu in NOT_OVERLAPPED_S),
            ", ".join(
                f"{gpu.upper()}: second token {at[gpu, 'serialized'][0]:+.0%} serialized, "
                f"{at[gpu, 'layer-wise'][0]:+.0%} layer-wise"
                for gpu in NOT_OVERLAPPED_S
            ),
        ),
        Statement(
            "what is not overlapped is below 7% of that request's prompt time",
            all(share < 0.07 for share in left.values()),
            ", ".join(f"{gpu.upper()} {share:.1%}" for gpu, share in left.items()),
        ),
        Statement(
            "of the time of the whole code trace, at most 3% serialized and 0.8% layer-wise, H100",
            serialized <= 0.03 and layered <= 0.008,
            f"{serialized:.1%} and {layered:.1%}",
        ),
        Statement(
            "the conductor's switch at 512 tokens is within 3 ms of the better way at all lengths",
            max(regret_s.values()) <= 3e-3,
            ", ".join(f"{gpu.upper()} {seconds * 1e3:.1f} ms" for gpu, seconds in regret_s.items())
            + f"; on A100, layer-wise pays from {break_even_tokens('a100')} tokens",
        ),
    )


def _prompt_s(gpu: str, tokens: int) -> float:
    profile = latency_profiles.load(f"llama-2-70b.{gpu}.tp8.splitwise")
    return float(prefill_s(*profile.prefill, tokens, 0))


def _regret_s(gpu: str, tokens: int) -> float:
    """How much later the second token comes than by the better way, with the conductor's."""
    seconds = [served(gpu, tokens, 2, way).second_token_s for way in WAYS]
    return seconds[-1] - min(seconds)


def _of_the_whole_trace(gpu: str) -> tuple[float, float]:
    """What both ways add to the seconds of all requests of the code trace, each on an idle pair, as
    shares of them."""
    profile = latency_profiles.load(f"llama-2-70b.{gpu}.tp8.splitwise")
    requests = [one for one in azure_code().requests if one.output_tokens > 1]
    prompts, outputs = np.array([[r.prompt_tokens, r.output_tokens] for r in requests], float).T
    step_s = decode_step_s(*profile.decode, 1, prompts + outputs / 2)
    seconds = float((prefill_s(*profile.prefill, prompts, 0) + (outputs - 1) * step_s).sum())
    serialized_s = float(prompts.sum()) * TOKEN_BYTES / BANDWIDTH_BYTES_S
    return serialized_s / seconds, len(requests) * NOT_OVERLAPPED_S[gpu] / seconds


def _plots() -> tuple[Plot, ...]:
    lines = [
        Line(
            f"{gpu.upper()}, {way}",
            tuple(map(float, PROMPTS)),
            tuple(overheads(gpu, tokens, 2, way)[0] * 100 for tokens in PROMPTS),
        )
        for gpu in NOT_OVERLAPPED_S
        for way in WAYS
    ]
    median_tokens = median(one.prompt_tokens for one in azure_code().requests)
    dots = [
        Line("paper, serialized", (median_tokens,), (64.0,), "dots"),
        Line("paper, layer-wise", (median_tokens,), (16.5,), "dots"),
    ]
    title = "How much later the second token comes"
    plot = Plot("splitwise-transfer", title, "prompt, tokens", "overhead, %", (*lines, *dots))
    return (plot,)
