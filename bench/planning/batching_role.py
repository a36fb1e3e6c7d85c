"""An instance with continuous batching, fast: it decodes, and may prefill between. Pure."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from ..sim.results.outcomes import longest_tenth_s

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray

    from .workload import Workload

    # Time of the first token, and of all that follow: the request's TBT.
    TbtOf = Callable[[float, Sequence[float]], float]


def mean_gap_s(first_s: float, after_s: Sequence[float]) -> float:
    """DistServe's TPOT: the mean over all tokens but the first."""
    return (after_s[-1] - first_s) / len(after_s)


def longest_gaps_s(first_s: float, after_s: Sequence[float]) -> float:
    """Mooncake's TBT: the mean of the longest tenth of the gaps."""
    return longest_tenth_s(np.diff(np.asarray((first_s, *after_s))).tolist())


# Share of an instance's room for KV up to which requests join. The rest is for the answers that
# grow; DistServe's simulator has the same. Requests that outgrow it are not preempted.
WATERMARK = 0.9


@dataclass(frozen=True, slots=True)
class Engine:
    """An instance. `prefill` and `decode` are a latency profile's coefficients.

    There is room for `kv_tokens` tokens of KV; a batch of prompts has at most `batch_tokens`.
    """

    prefill: tuple[float, float, float]
    decode: tuple[float, float, float]
    kv_tokens: int
    batch_max: int = 1024
    batch_tokens: int = 16_384


def decode_tbt_s(
    workload: Workload,
    first_s: NDArray[np.float64],
    joins_s: NDArray[np.float64],
    engine: Engine,
    tbt_of: TbtOf,
) -> NDArray[np.float64]:
    """TBT of each request on one instance that only decodes; 0 for an answer of one token.

    `first_s`: when each had its first token; `joins_s`: when its KV has come.
    """
    order = np.argsort(joins_s, kind="stable")
    run = _Run(engine, tbt_of)
    run.serve(
        joins_s[order].tolist(),
        workload.prompt_tokens[order].tolist(),
        workload.output_tokens[order].tolist(),
        first_s[order].tolist(),
    )
    found_s = np.empty(len(order))
    found_s[order] = run.tbt_s
    return found_s


def colocated_s(
    workload: Workload, engine: Engine, tbt_of: TbtOf
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Times of first tokens and TBT of requests, all on one instance that prefills as soon as a
    prompt waits, while decoding stands still: continuous batching without chunks, as in vLLM."""
    run = _Run(engine, tbt_of)
    run.serve(
        workload.arrivals_s.tolist(),
        workload.prompt_tokens.tolist(),
        workload.output_tokens.tolist(),
        None,
    )
    return np.asarray(run.first_s), np.asarray(run.tbt_s)


class _Run:
    """One run of an engine. Each step costs the same, however many requests are in it: those that
    end with it are in a bucket."""

    def __init__(self, engine: Engine, tbt_of: TbtOf) -> None:
        self._engine, self._tbt_of = engine, tbt_of
        self._waiting: deque[int] = deque()
        self._ends: dict[int, list[int]] = {}  # by step
        self._step_ends_s: list[float] = []
        self._batch = self._context = 0
        self._now_s = 0.0

    def serve(
        self,
        arrivals_s: list[float],
        prompts: list[int],
        outputs: list[int],
        first_s: list[float] | None,
    ) -> None:
        """All requests, which come in order; without `first_s`, they are prefilled here."""
        self._prompts, self._outputs = prompts, outputs
        self._prefills = first_s is None
        self.first_s = [0.0] * len(prompts) if first_s is None else first_s
        self.tbt_s = [0.0] * len(prompts)
        self._began = [0] * len(prompts)
        at, count = 0, len(prompts)
        while at < count or self._waiting or self._batch:
            if not self._waiting and not self._batch:
                self._now_s = max(self._now_s, arrivals_s[at])
            while at < count and arrivals_s[at] <= self._now_s:
                self._waiting.append(at)
                at += 1
            joined = self._join()
            if joined and self._prefills:
                self._prefill(joined)
            else:
                self._step()

    def _join(self) -> list[int]:
        engine, tokens = self._engine, 0
        joined: list[int] = []
        while self._waiting and self._batch < engine.batch_max:
            one = self._waiting[0]
            tokens += self._prompts[one]
            if self._batch and self._context + self._prompts[one] > WATERMARK * engine.kv_tokens:
                break
            if joined and self._prefills and tokens > engine.batch_tokens:
                break
            joined.append(self._waiting.popleft())
            if self._outputs[one] > 1:
                self._batch += 1
                self._context += self._prompts[one] + 1
                step = len(self._step_ends_s)
                self._began[one] = step
                self._ends.setdefault(step + self._outputs[one] - 2, []).append(one)
        return joined

    def _prefill(self, joined: list[int]) -> None:
        fixed_s, token_s, pair_s = self._engine.prefill
        lengths = [self._prompts[one] for one in joined]
        squares = sum(length * length for length in lengths)
        self._now_s += fixed_s + token_s * sum(lengths) + pair_s * squares
        for one in joined:
            self.first_s[one] = self._now_s

    def _step(self) -> None:
        if not self._batch:
            return
        fixed_s, request_s, token_s = self._engine.decode
        self._now_s += fixed_s + request_s * self._batch + token_s * self._context
        step = len(self._step_ends_s)
        self._step_ends_s.append(self._now_s)
        self._context += self._batch
        for one in self._ends.pop(step, ()):
            self._batch -= 1
            self._context -= self._prompts[one] + self._outputs[one]
            after_s = self._step_ends_s[self._began[one] :]
            self.tbt_s[one] = self._tbt_of(self.first_s[one], after_s)
