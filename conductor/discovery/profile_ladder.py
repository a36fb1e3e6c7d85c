"""What to measure of an engine for its latency profile, and points from what was measured. Pure.

Prefill at lengths in a geometric ladder, each with nothing, half and 95% of it cached; decode with
batches in a ladder, each with several contexts. A batch's step is timed while all of its streams
decode: from the last one's first token until the first one has enough.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..errors import InvalidRequest

if TYPE_CHECKING:
    from ..cost.profile_fit import Point

CACHED_SHARES = (0.0, 0.5, 0.95)
# Three coefficients, told apart from each other and from noise (docs/conductor/cost.md).
LENGTHS = 5
CONTEXTS = 3
# Steps that a point of decoding is the mean of.
STEPS = 32
# Of what the KV cache holds: engines keep some of it, and preempt when it is full.
KV_SHARE = 0.8
# While the others' prompts are computed, a stream decodes on.
ANSWER_TOKENS = 512


@dataclass(frozen=True, slots=True)
class Limits:
    """Of the engine, or of what is to be measured: tokens of a prompt and of the KV cache, the
    engine's block size, and the largest batch."""

    tokens_max: int
    kv_capacity_tokens: int
    block_tokens: int
    batch_max: int


@dataclass(frozen=True, slots=True)
class PrefillStep:
    """A prompt of `tokens`, of which the first `cached` were sent before."""

    tokens: int
    cached: int


@dataclass(frozen=True, slots=True)
class DecodeStep:
    """So many streams at a time, each after a prompt of `context` tokens."""

    batch: int
    context: int


class DecodeWindow:
    """The streams of a batch, `context` tokens of prompt each, and the time in which all decode."""

    def __init__(self, step: DecodeStep) -> None:
        self._step = step
        self._arrivals: list[list[tuple[float, int]]] = [[] for _ in range(step.batch)]
        self._waited_for = set(range(step.batch))  # at first for a token, then for `STEPS`
        self._began: list[int] = []  # tokens of each stream, when the last one has its first
        self._began_s = 0.0

    def arrived(self, stream: int, at_s: float, tokens: int) -> bool:
        """A stream has so many tokens now. Returns whether each has decoded `STEPS` tokens since
        all of them had begun."""
        self._arrivals[stream].append((at_s, tokens))
        if self._began:
            if tokens - self._began[stream] >= STEPS:
                self._waited_for.discard(stream)
            return not self._waited_for
        self._waited_for.discard(stream)
        if not self._waited_for:
            self._began, self._began_s = [one[-1][1] for one in self._arrivals], at_s
            self._waited_for = set(range(self._step.batch))
        return False

    def point(self) -> Point | None:
        """(batch, context together, seconds of a step) over the time in which all streams decoded;
        None if there was none."""
        if not self._began:
            return None
        ended_s = min(one[-1][0] for one in self._arrivals)
        ended = [_tokens_at(one, ended_s) for one in self._arrivals]
        steps = [end - begin for begin, end in zip(self._began, ended, strict=True)]
        if ended_s <= self._began_s or min(steps) < 1:
            return None
        batch = self._step.batch
        context = batch * self._step.context + (sum(self._began) + sum(ended)) / 2
        return batch, round(context), (ended_s - self._began_s) * batch / sum(steps)


def _tokens_at(arrivals: list[tuple[float, int]], at_s: float) -> int:
    return next((tokens for when, tokens in reversed(arrivals) if when <= at_s), 0)


def ladder(least: int, most: int, count: int) -> list[int]:
    """`count` numbers from `least` to `most`, each the same multiple of the one before; fewer if
    they are that close."""
    least = min(least, most)
    ratio = (most / least) ** (1 / max(count - 1, 1))
    return sorted({round(least * ratio**at) for at in range(count)})


def prefill_steps(limits: Limits) -> list[PrefillStep]:
    """From 512 tokens, or an eighth of the longest prompt if that is less, to the longest. Raises
    InvalidRequest if three lengths do not fit."""
    most = min(limits.tokens_max, int(KV_SHARE * limits.kv_capacity_tokens))
    lengths = ladder(min(512, max(most // 8, 1)), most, LENGTHS)
    if len(lengths) < 3:
        raise InvalidRequest(f"prompts of up to {most} tokens are too short to be told apart")
    block = limits.block_tokens
    found = [
        PrefillStep(length, min(int(length * share), length - 1) // block * block)
        for length in lengths
        for share in CACHED_SHARES
    ]
    return list(dict.fromkeys(found))


def decode_steps(limits: Limits) -> list[DecodeStep]:
    """Batches in a ladder of about fourfold, each with contexts that the KV cache has room for.
    Raises InvalidRequest if there is room for one request only."""
    room = int(KV_SHARE * limits.kv_capacity_tokens)
    longest = limits.tokens_max - ANSWER_TOKENS
    found = []
    for batch in _batches(limits.batch_max):
        most = min(longest, room // batch - ANSWER_TOKENS)
        if most >= 64:
            found += [DecodeStep(batch, each) for each in ladder(64, most, CONTEXTS)]
    if len({step.batch for step in found}) < 2:
        raise InvalidRequest(
            f"a KV cache of {limits.kv_capacity_tokens} tokens and prompts of up to "
            f"{limits.tokens_max} have no room for two requests at a time"
        )
    return found


def _batches(most: int) -> list[int]:
    found = [1, 2] if most < 4 else [1]
    while found[-1] * 4 < most:
        found.append(found[-1] * 4)
    return sorted({*found, most})
