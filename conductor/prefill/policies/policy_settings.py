"""Settings of the prefill policies, with bounds. All of them can be changed at run time.

Defaults are those of the system that a policy comes from; `docs/conductor/policies.md` names the
sources.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

Share = Annotated[float, Meta(ge=0, le=1)]
Weight = Annotated[float, Meta(ge=0, le=1000)]
# A ratio of the larger to the smaller of two loads or lengths.
Ratio = Annotated[float, Meta(ge=1, le=1000)]
Seconds = Annotated[float, Meta(ge=0, le=3600)]
Requests = Annotated[int, Meta(ge=0, le=1_000_000)]


class PrefixAwareSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """SGLang's `cache_aware`: follow the prefix while the load is balanced."""

    match_threshold: Share = 0.3
    """Least part of the prompt that the best match must have, or the least loaded is chosen."""

    balance_abs_threshold: Requests = 64
    """Requests by which the most and the least loaded may differ, whatever their ratio."""

    balance_rel_threshold: Ratio = 1.5
    """Ratio of the two beyond which, if they differ by more than that, the load decides."""


class KvCostSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Dynamo's cost in blocks: what has to be computed, less credits, and what is decoded."""

    form: Literal["linear", "lmetric"] = "linear"
    """`linear`: scale · prefill + decode. `lmetric`: prefill · (decode + 1)."""

    device_credit: Share = 1.0
    """Blocks that one block in the instance's HBM saves."""

    host_credit: Share = 0.75
    """One block in its node's DRAM."""

    disk_credit: Share = 0.25
    """One block on its node's NVMe."""

    shared_credit: Share = 0.5
    """One block that only others have; at 0, nothing is fetched."""

    prefill_load_scale: Weight = 4.0
    """Weight of prefill against decode. Dynamo's default is 1, and its advice for long prompts 4,
    which was better in simulations too, where prefill is short, and no worse where decode is
    (docs/conductor/policies.md). It matters where instances do both."""

    temperature: Annotated[float, Meta(ge=0, le=100)] = 0.0
    """Softmax sampling; 0 takes the lowest cost."""


class PrebleSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Preble's E2: exploit what is cached, or explore by load."""

    exploit_share: Share = 0.5
    """Exploit if more than this part of the prompt is cached."""

    rebalance_ratio: Ratio = 1.5
    """Explore anyway if the holder's load is so many times the lowest one."""

    rebalance_min_s: Seconds = 0.5
    """Load below which an instance is never called overloaded."""

    output_tokens: Annotated[int, Meta(ge=0, le=1_000_000)] = 150
    """What a running request will still answer, on average."""

    evicted_reuse: Share = 0.5
    """Part of the evicted tokens that will have to be computed again."""


class KvcacheCentricSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Mooncake's Algorithm 1: per instance the better of its own prefix or the longest one."""

    balancing_threshold: Ratio = 1.2
    """An instance whose own prefix is shorter than the longest by at least this factor may fetch
    the rest. Mooncake sets it by hand and publishes no value; 1.2 makes a prefix that lacks less
    than a sixth recompute without looking further."""


class Algorithm1Settings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Mooncake's Algorithm 1 to the letter."""

    balancing_threshold: Ratio = 1.2
    """An instance fetches if the longest prefix is at least this many times its own. Unpublished;
    the same as that of `kvcache_centric`."""


class WeightedFactorsSettings(
    msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True
):
    """Weights of Fregly's Table 17-3; the last two are deducted."""

    occupancy: Weight = 3.0
    """Of a per cent of KV capacity in use."""

    active: Weight = 1.0
    """Of a request."""

    bandwidth: Weight = 0.5
    """Of a per cent of memory bandwidth in use."""

    match: Weight = 10.0
    """Of having the prefix."""

    recent: Weight = 1.0
    """Of computing it just now."""


class PolicySettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Which policy chooses the instance for prefill, and what each of them can be told."""

    name: Annotated[str, Meta(min_length=1, max_length=64)] = "kvcache_centric"
    """One of `base.names()`."""

    near_share: Annotated[float, Meta(ge=0.0, le=0.2)] = 0.01
    """For `kvcache_centric`: predicted TTFTs at most this much above the lowest count
    as equal to it; of these instances who has the least to bring and to compute is chosen, then who
    has the fewest decodes. Predictions are off by some 5 % in the mean; an instance that was
    measured to be a little faster than all others must not get everything. Where calibration is
    less exact, its errors count instead."""

    prefix_aware: PrefixAwareSettings = PrefixAwareSettings()
    kv_cost: KvCostSettings = KvCostSettings()
    preble: PrebleSettings = PrebleSettings()
    kvcache_centric: KvcacheCentricSettings = KvcacheCentricSettings()
    algorithm_1: Algorithm1Settings = Algorithm1Settings()
    weighted_factors: WeightedFactorsSettings = WeightedFactorsSettings()
