"""Whether a prompt is prefilled by another instance than the one that will decode it. Pure.

Prefill next to decode makes everybody's next token wait; prefill elsewhere moves the KV cache, and
waits in a queue. So what is short, or what others have mostly computed, stays where it will be
decoded. The effective length is what counts: prompt tokens less those that are cached there.

Two forms, both published for Dynamo. The rule:

    remote if effective >= remote_tokens_min and prefill queue < queue_max
           or running decodes >= busy_decodes and effective >= busy_tokens_min

Dynamo's own one (`max_local_prefill_length` 512, `max_prefill_queue_size`) is its first line. The
score, of votes with weights:

    score = weights of the votes for remote - weights of the votes for local
    remote if score > remote_prefill_min_score

where each vote is cast if its metric is above its threshold, and none otherwise.

How the KV cache of a remote prefill moves depends on its length, too. Layer by layer, it is hidden
behind the computation of the next layer, but costs a message per layer: Splitwise (ISCA '24) found
it to be worth it from 512 tokens on, measured on H100.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

Tokens = Annotated[int, Meta(ge=0, le=16 << 20)]
Requests = Annotated[int, Meta(ge=0, le=1_000_000)]

Metric = Literal["prefill_length", "prefill_queue_depth", "decode_load"]

# A metric counts once, or perhaps with a second threshold.
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

    form: Literal["rule", "score", "remote", "local"] = "rule"
    """`rule` or `score`, as above; `remote`: always, if there is somewhere; `local`: never."""

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


@dataclass(frozen=True, slots=True)
class Situation:
    """What is decided upon: the prompt, what of it is `cached_tokens` at the instance that would
    decode it, how many wait for prefill where it would be prefilled, and how many decode where it
    would be decoded."""

    prompt_tokens: int
    cached_tokens: int
    prefill_queue: int
    running_decodes: int

    @property
    def effective_tokens(self) -> int:
        """Tokens that have to be computed; one at least, which gives the answer's first."""
        return max(self.prompt_tokens - self.cached_tokens, 1)

    def metric(self, name: Metric) -> int:
        """The number that a vote looks at."""
        if name == "prefill_length":
            return self.effective_tokens
        return self.prefill_queue if name == "prefill_queue_depth" else self.running_decodes


@dataclass(frozen=True, slots=True)
class Placement:
    """`remote`: prefill elsewhere. `reason` says which rule made it so, `score` is of that form."""

    remote: bool
    reason: Literal["long", "busy", "short", "queue", "score", "setting"]
    score: float | None = None


def place(settings: DisaggregationSettings, situation: Situation) -> Placement:
    """Where to prefill, given that there is an instance for it elsewhere."""
    if settings.form == "rule":
        return _by_rule(settings, situation)
    if settings.form == "score":
        value = score(settings.votes, situation)
        return Placement(value > settings.remote_prefill_min_score, "score", value)
    return Placement(settings.form == "remote", "setting")


def score(votes: tuple[Vote, ...], situation: Situation) -> float:
    """Weights for remote less weights for local, of the votes that are cast."""
    value = 0.0
    for vote in votes:
        if situation.metric(vote.metric) > vote.threshold:
            value += vote.weight if vote.action == "prefer_remote" else -vote.weight
    return value


def layerwise(settings: DisaggregationSettings, moved_tokens: int) -> bool:
    """Whether the KV cache of so many tokens moves layer by layer, and not in one piece."""
    return moved_tokens >= settings.layerwise_tokens_min


def _by_rule(settings: DisaggregationSettings, situation: Situation) -> Placement:
    tokens, busy = situation.effective_tokens, settings.busy_decodes
    long = tokens >= settings.remote_tokens_min
    if long and situation.prefill_queue < settings.queue_max:
        return Placement(True, "long")
    disturbs = tokens >= settings.busy_tokens_min
    if disturbs and busy is not None and situation.running_decodes >= busy:
        return Placement(True, "busy")
    return Placement(False, "queue" if long else "short")
