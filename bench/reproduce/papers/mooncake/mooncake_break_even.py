"""Mooncake's equation for when fetching beats computing (FAST '25, section 2): the least bandwidth.

    flops(n) = l (a n² d + b n d²),   KV bytes(p) = p l (2 d / gqa) s

The conductor is asked, for hardware that computes at its peak and for the one that was measured,
and the bandwidth is bisected at which it begins to fetch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from tiffin.conductor.cost import latency_profiles

from ....plots import Line, Plot
from ...evidence import Comparison, Evidence, Statement
from ...registry import reproduction
from ...setups.fetch_or_compute import BLOCK_TOKENS, Cell, fetched_blocks

if TYPE_CHECKING:
    from tiffin.conductor.cost.latency_profiles import Profile

    from ...registry import Effort, Tell

MEASURED = latency_profiles.load(latency_profiles.DEFAULT)
# Llama-3-70B: layers, dimensions, and the equation's factors of attention and of linear layers.
LAYERS, DIMENSIONS, ATTENTION, LINEAR = 80, 8192, 4, 22
# Dense 16-bit FLOPS of eight GPUs, by their data sheets, and the paper's least GB/s for 8,192
# tokens.
PEAK_FLOPS = {"A800": 8 * 312e12, "H800": 8 * 989e12}
PUBLISHED_GB_S = {"A800": 6.0, "H800": 19.0}
PREFIX_TOKENS = 8192
PREFIXES = (1024, 2048, 4096, 8192, 16_384, 32_768, 65_536)


def at_peak(flops_s: float) -> Profile:
    """The latency profile of hardware that computes the equation's FLOPs at this rate."""
    linear = LAYERS * LINEAR * DIMENSIONS**2 / flops_s
    attention = LAYERS * ATTENTION * DIMENSIONS / flops_s
    return msgspec.structs.replace(MEASURED, prefill=(0.0, linear, attention))


def least_bandwidth(profile: Profile, prefix_tokens: int) -> float:
    """Bytes per second from which on the conductor has a prefix fetched, to a thousandth. The
    prompt is a block longer, as its last token is always computed."""
    low, high = 1e8, 1e12
    while high / low > 1.001:
        middle = (low * high) ** 0.5
        cell = Cell(prefix_tokens + BLOCK_TOKENS, prefix_tokens // BLOCK_TOKENS, middle)
        if fetched_blocks(cell, profile, "kvcache_centric", 0.0):
            high = middle
        else:
            low = middle
    return high


@reproduction(
    "mooncake-break-even", "The bandwidth from which fetching pays", "Mooncake, FAST '25, section 2"
)
def break_even(effort: Effort, tell: Tell) -> Evidence:
    """Least bandwidths, by hardware and by length."""
    tell("bisecting")
    found = {
        name: least_bandwidth(at_peak(flops_s), PREFIX_TOKENS) / 1e9
        for name, flops_s in PEAK_FLOPS.items()
    }
    measured = least_bandwidth(MEASURED, PREFIX_TOKENS) / 1e9
    comparisons = tuple(
        Comparison(f"8 x {name} at its peak, 8,192 tokens", published, found[name], "GB/s")
        for name, published in PUBLISHED_GB_S.items()
    )
    peak_s, measured_s = (
        profile.prefill[1] * PREFIX_TOKENS + profile.prefill[2] * PREFIX_TOKENS**2
        for profile in (at_peak(PEAK_FLOPS["A800"]), MEASURED)
    )
    statement = Statement(
        "on measured hardware less bandwidth is enough, by the share of its peak that it reaches",
        abs(measured / found["A800"] - peak_s / measured_s) < 0.02,
        f"{measured:.1f} GB/s, {measured / found['A800']:.0%}; "
        f"of the peak, {peak_s / measured_s:.0%}",
    )
    return Evidence(comparisons, (statement,), (_plot(),))


def _plot() -> Plot:
    profiles = {f"8 x {name} at its peak": at_peak(rate) for name, rate in PEAK_FLOPS.items()}
    lines = [
        Line(
            name,
            tuple(map(float, PREFIXES)),
            tuple(least_bandwidth(profile, tokens) / 1e9 for tokens in PREFIXES),
        )
        for name, profile in {**profiles, "8 x A800, measured": MEASURED}.items()
    ]
    dots = Line("paper", (PREFIX_TOKENS,) * 2, tuple(PUBLISHED_GB_S.values()), "dots")
    title = "Bandwidth from which fetching a prefix beats computing it"
    return Plot("mooncake-break-even", title, "tokens", "GB/s", (*lines, dots), log_x=True)
