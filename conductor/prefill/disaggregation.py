"""Conditional disaggregation: whether another instance than the decode instance prefills. Pure.

A prefill on the decode instance delays the next token of every request that decodes there; a remote
prefill has to transfer the KV cache, and waits in a queue. So prompts that are short, or mostly
cached, are prefilled on the decode instance. The default form, `predicted`, compares what both ways
are predicted to cost, in seconds: of this request's time to the first token, and of what others are
delayed by. Two more are published for Dynamo. They know no times, and decide by the effective
length, prompt tokens less those cached there. The rule:

    remote if effective >= remote_tokens_min and prefill queue < queue_max
           or running decodes >= busy_decodes and effective >= busy_tokens_min

Dynamo's own one (`max_local_prefill_length` 512, `max_prefill_queue_size`) is its first line. The
score, of votes with weights:

    score = weights of the votes for remote - weights of the votes for local
    remote if score > remote_prefill_min_score

where a vote counts only if its metric is above its threshold.

How the KV cache of a remote prefill is transferred depends on its length, too. A layer-wise
transfer is hidden behind the computation of the next layer, but costs a message per layer:
Splitwise (ISCA '24) found it to be worth it from 512 tokens on, measured on H100.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Literal

import msgspec
from msgspec import Meta

if TYPE_CHECKING:
    from ..records import Objectives

Tokens = Annotated[int, Meta(ge=0, le=16 << 20)]
Requests = Annotated[int, Meta(ge=0, le=1_000_000)]

Metric = Literal["prefill_length", "prefill_queue_depth", "decode_load"]

# Enough for each metric with more than one threshold.
VOTES_MAX = 16


class Vote(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One term of the score: `action`, with this weight, if the metric is above the threshold."""

    metric: Metric
    """`prefill_length`: effective tokens. `prefill_queue_depth`: requests that wait for prefill.
    `decode_load`: requests that decode where this one would."""

    threshold: Annotated[float, Meta(ge=0, le=16 << 20)]
    """In tokens or requests; the vote is cast above it."""

    action: Literal["prefer_remote", "prefer_local"]
    """What it votes for."""

    weight: Annotated[float, Meta(ge=0, le=1000)]
    """What it adds to the score, or takes from it."""


class DisaggregationSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """When to prefill elsewhere, and how the KV cache moves then."""

    form: Literal["predicted", "rule", "score", "remote", "local"] = "predicted"
    """`predicted`, `rule` or `score`, as above; `remote`: always, if there is somewhere; `local`:
    never."""

    delay_weight: Annotated[float, Meta(ge=0, le=1000)] = 1.0
    """Of `predicted`: what a second by which a local prefill delays another request's token counts,
    in seconds of TTFT. With both objectives, times the share of the one that it is worth in shares
    of the other: see `delay_weight`."""

    near_share: Annotated[float, Meta(ge=0, le=1)] = 0.05
    """Of `predicted`: ways that differ by at most this share of the faster one are decided by the
    rule."""

    remote_tokens_min: Tokens = 256
    """Of the rule: effective tokens from which a prompt is prefilled elsewhere."""

    queue_max: Requests = 10
    """Of the rule: with so many waiting for prefill, it is not."""

    busy_decodes: Requests | None = 8
    """Of the rule: decodes from which an instance should not be disturbed. None: never."""

    busy_tokens_min: Tokens = 64
    """Of the rule: effective tokens that disturb a busy one, whatever the queue."""

    votes: Annotated[tuple[Vote, ...], Meta(max_length=VOTES_MAX)] = (
        Vote(metric="prefill_length", threshold=256, action="prefer_remote", weight=0.7),
        Vote(metric="prefill_queue_depth", threshold=10, action="prefer_local", weight=0.3),
    )
    """Of the score."""

    remote_prefill_min_score: Annotated[float, Meta(ge=-1000, le=1000)] = 0.5
    """Of the score: above it, a prompt is prefilled elsewhere."""

    layerwise_tokens_min: Tokens = 512
    """Tokens to move from which their KV cache goes layer by layer; below, in one piece."""

    overlapped: bool = False
    """Whether engines do that, and KV leaves while it is computed. Else it is taken to leave when
    the prefill is done."""


@dataclass(frozen=True, slots=True)
class Situation:
    """The input of the decision: the prompt, the `cached_tokens` of it at the decode instance, the
    queue length at the remote prefill instance, and the number of requests that decode at the
    decode instance."""

    prompt_tokens: int
    cached_tokens: int
    prefill_queue: int
    running_decodes: int

    @property
    def effective_tokens(self) -> int:
        """Tokens that have to be computed; at least one, which yields the first output token."""
        return max(self.prompt_tokens - self.cached_tokens, 1)

    def metric(self, name: Metric) -> int:
        """The value of a vote's metric."""
        if name == "prefill_length":
            return self.effective_tokens
        return self.prefill_queue if name == "prefill_queue_depth" else self.running_decodes


@dataclass(frozen=True, slots=True)
class PredictedWays:
    """What both ways are predicted to cost, in seconds of TTFT, those of others included.

    `local_s`: if an instance prefills that decodes, with the weighted delay of what it decodes.
    `remote_s`: if another one does, with the transfer.
    """

    local_s: float
    remote_s: float


@dataclass(frozen=True, slots=True)
class PrefillPlacement:
    """Whether to prefill remotely (`remote`). `reason` names what decided; `score` is set in the
    form "score" only, the costs of both ways where they were predicted."""

    remote: bool
    reason: Literal["predicted", "long", "busy", "short", "queue", "score", "setting", "no_prefill"]
    score: float | None = None
    local_s: float | None = None
    remote_s: float | None = None


def place(
    settings: DisaggregationSettings, situation: Situation, ways: PredictedWays | None = None
) -> PrefillPlacement:
    """Decide between local and remote prefill, given that an instance for remote prefill exists.
    The form "predicted" needs `ways`."""
    if settings.form == "predicted" and ways is not None:
        return _by_prediction(settings, situation, ways)
    if settings.form in ("predicted", "rule"):
        return _by_rule(settings, situation)
    if settings.form == "score":
        value = score(settings.votes, situation)
        return PrefillPlacement(value > settings.remote_prefill_min_score, "score", value)
    return PrefillPlacement(settings.form == "remote", "setting")


def delay_weight(
    settings: DisaggregationSettings, objectives: Objectives, step_s: float, output_tokens: int
) -> float:
    """Seconds of TTFT that are as bad as a second by which a prefill delays a running decode.

    A request with both objectives can wait `ttft_s` for its first token, and has

        output_tokens · (tbt_s - step_s)

    to spare after that, with steps of `step_s`. Each second counts as its share of what there is.
    Nothing to spare counts as one step: less can not be told from it. Without both objectives, all
    seconds are equal.
    """
    ttft_s, tbt_s = objectives.ttft_s, objectives.tbt_s
    if ttft_s is None or tbt_s is None:
        return settings.delay_weight
    spare_s = max(output_tokens * (tbt_s - step_s), step_s, 1e-6)
    return settings.delay_weight * ttft_s / spare_s


def score(votes: tuple[Vote, ...], situation: Situation) -> float:
    """Weights for remote less weights for local, of the votes with a metric above the threshold."""
    value = 0.0
    for vote in votes:
        if situation.metric(vote.metric) > vote.threshold:
            value += vote.weight if vote.action == "prefer_remote" else -vote.weight
    return value


def layerwise(settings: DisaggregationSettings, moved_tokens: int) -> bool:
    """Whether the KV cache of `moved_tokens` is transferred layer by layer, not in one piece."""
    return moved_tokens >= settings.layerwise_tokens_min


def overlapped(settings: DisaggregationSettings, moved_tokens: int) -> bool:
    """Whether the KV cache of `moved_tokens` leaves while it is computed."""
    return settings.overlapped and layerwise(settings, moved_tokens)


def _by_prediction(
    settings: DisaggregationSettings, situation: Situation, ways: PredictedWays
) -> PrefillPlacement:
    local_s, remote_s = ways.local_s, ways.remote_s
    if abs(local_s - remote_s) <= settings.near_share * min(local_s, remote_s):
        return replace(_by_rule(settings, situation), local_s=local_s, remote_s=remote_s)
    remote = remote_s < local_s
    return PrefillPlacement(remote, "predicted", local_s=local_s, remote_s=remote_s)


def _by_rule(settings: DisaggregationSettings, situation: Situation) -> PrefillPlacement:
    tokens, busy = situation.effective_tokens, settings.busy_decodes
    long = tokens >= settings.remote_tokens_min
    if long and situation.prefill_queue < settings.queue_max:
        return PrefillPlacement(True, "long")
    disturbs = tokens >= settings.busy_tokens_min
    if disturbs and busy is not None and situation.running_decodes >= busy:
        return PrefillPlacement(True, "busy")
    return PrefillPlacement(False, "queue" if long else "short")
