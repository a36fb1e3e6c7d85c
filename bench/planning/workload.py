"""What is asked of a service: requests with lengths, at any rate. Pure."""

from __future__ import annotations

from dataclasses import dataclass, replace
from random import Random
from typing import TYPE_CHECKING, Protocol

import numpy as np

from ..traces.ideal_cache import IdealCache

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from ..traces.trace import Trace


class Length(Protocol):
    """A distribution of tokens; see `LogNormal`, too."""

    def tokens(self, chance: Random) -> int:
        """A value, at least 1."""

    @property
    def mean(self) -> float:
        """The expected value."""


@dataclass(frozen=True, slots=True)
class Quantiles:
    """A length by its quantiles: (share, tokens), from share 0 to 1, straight lines between."""

    points: tuple[tuple[float, float], ...]

    @classmethod
    def deciles(cls, *tokens: float) -> Quantiles:
        """From the least, the nine deciles and the greatest."""
        return cls(tuple((at / 10, value) for at, value in enumerate(tokens)))

    def tokens(self, chance: Random) -> int:
        """A value, at least 1."""
        shares, values = zip(*self.points, strict=True)
        return max(1, round(float(np.interp(chance.random(), shares, values))))

    @property
    def mean(self) -> float:
        """The expected value."""
        pairs = zip(self.points, self.points[1:], strict=False)
        return sum((after[0] - at[0]) * (at[1] + after[1]) / 2 for at, after in pairs)


@dataclass(frozen=True, slots=True)
class Fixed:
    """Always the same length."""

    length: int

    def tokens(self, chance: Random) -> int:
        """It."""
        del chance
        return self.length

    @property
    def mean(self) -> float:
        """It."""
        return float(self.length)


@dataclass(frozen=True, slots=True, eq=False)
class Workload:
    """Requests in order of arrival. All arrays are [requests].

    `cached_tokens` are those of a prompt that need not be computed.
    """

    name: str
    arrivals_s: NDArray[np.float64]
    prompt_tokens: NDArray[np.int64]
    cached_tokens: NDArray[np.int64]
    output_tokens: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.arrivals_s)

    @property
    def rate(self) -> float:
        """Requests per second; 0 if all come at once."""
        span_s = float(self.arrivals_s[-1] - self.arrivals_s[0])
        return (len(self) - 1) / span_s if span_s else 0.0

    def faster(self, factor: float) -> Workload:
        """The same requests, `factor` times as many per second."""
        return replace(self, arrivals_s=self.arrivals_s / factor)

    def longer(self, factor: float) -> Workload:
        """Prompts `factor` times as long; the same share of them is cached."""
        prompt = np.maximum(1, np.rint(self.prompt_tokens * factor)).astype(np.int64)
        cached = np.minimum(prompt - 1, np.rint(self.cached_tokens * factor).astype(np.int64))
        return replace(self, prompt_tokens=prompt, cached_tokens=cached)

    def share_of(self, instances: int) -> Workload:
        """What one of so many instances gets of it, if they take turns."""
        return self.pick(slice(0, None, instances))

    def pick(self, which: slice) -> Workload:
        """Some of the requests."""
        return Workload(
            self.name,
            self.arrivals_s[which],
            self.prompt_tokens[which],
            self.cached_tokens[which],
            self.output_tokens[which],
        )


def poisson(
    name: str, prompt: Length, output: Length, count: int, seed: int, *, tokens_max: int = 1 << 31
) -> Workload:
    """One request per second on average, as a Poisson process, with lengths drawn independently.
    A prompt is cut where it would exceed `tokens_max` with its answer."""
    chance = Random(seed)
    gaps = [chance.expovariate(1.0) for _ in range(count)]
    outputs = [min(output.tokens(chance), tokens_max - 1) for _ in range(count)]
    prompts = [min(prompt.tokens(chance), tokens_max - answer) for answer in outputs]
    return Workload(
        name,
        np.cumsum(np.asarray(gaps)),
        np.asarray(prompts, np.int64),
        np.zeros(count, np.int64),
        np.asarray(outputs, np.int64),
    )


def from_trace(trace: Trace, cache_tokens: int) -> Workload:
    """A trace's requests. What one cache of so many tokens that all share would hold is cached."""
    cache = IdealCache(cache_tokens // trace.block_tokens)
    requests = trace.requests
    hits = [cache.serve(trace.full_blocks(request)) * trace.block_tokens for request in requests]
    prompts = np.asarray([request.prompt_tokens for request in requests], np.int64)
    return Workload(
        trace.name,
        np.asarray([request.arrival_s for request in requests], np.float64),
        prompts,
        np.minimum(np.asarray(hits, np.int64), prompts - 1),
        np.asarray([request.output_tokens for request in requests], np.int64),
    )
