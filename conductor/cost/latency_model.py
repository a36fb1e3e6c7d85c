"""Latency formulas: seconds of a prefill, of a decode step, of recomputation. Pure.

`docs/conductor/cost.md` has their sources and their errors. All of them take numpy arrays that
broadcast, or plain numbers, and return float64.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeAlias, overload

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Numbers: TypeAlias = NDArray[Any] | float
    Floats: TypeAlias = NDArray[np.float64]


def prefill_s(c0: Numbers, c1: Numbers, c2: Numbers, n: Numbers, p: Numbers) -> Floats:
    """Seconds to compute a prompt of `n` tokens of which the first `p` are cached:
    c0 + c1 (n - p) + c2 (n² - p²).

    Linear layers process each new token (c1); each new token attends to all tokens before it, in
    sum (n² - p²) / 2 pairs (c2). The last token is always computed, as its output is the first
    token of the answer: p counts up to n - 1.
    """
    tokens = np.asarray(n, np.float64)
    cached = np.minimum(p, tokens - 1)
    seconds: Floats = c0 + c1 * (tokens - cached) + c2 * (tokens * tokens - cached * cached)
    return seconds


@overload
def decode_step_s(  # type: ignore[overload-overlap]  # arrays are no floats
    d0: float, d1: float, d2: float, batch: float, context: float
) -> float: ...


@overload
def decode_step_s(
    d0: Numbers, d1: Numbers, d2: Numbers, batch: Numbers, context: Numbers
) -> Floats: ...


def decode_step_s(
    d0: Numbers, d1: Numbers, d2: Numbers, batch: Numbers, context: Numbers
) -> Numbers:
    """Seconds of one decode step, the time between tokens, of `batch` requests with `context`
    tokens together: d0 + d1 batch + d2 context.

    Each step reads the weights once (d0) and the KV of each token of context (d2) from memory, and
    each request adds work of its own (d1). Of plain numbers the result is one, too: numpy takes ten
    times as long for it.
    """
    return d0 + d1 * batch + d2 * context
