"""Goodput: the highest rate at which enough requests still meet their objectives."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

# Share of requests that have to meet their objectives (DistServe, OSDI '24, section 6).
TARGET_SHARE = 0.9


def highest_rate(
    attained_at: Callable[[float], float],
    *,
    target_share: float = TARGET_SHARE,
    start: float = 1.0,
    precision: float = 0.05,
    step: float = 2.0,
    rate_max: float = 1e6,
) -> float:
    """The highest rate with an attainment of `target_share`, to within a share of `precision`.

    `attained_at(rate)` is the share of requests that meet their objectives. It is taken to fall
    with the rate: from `start`, the rate is multiplied or divided by `step` until the target is
    between two rates, and then bisected in the logarithm. The unit is the caller's: requests per
    second, or times of a trace's own rate. Returns 0.0 if no rate above `start` / 2¹⁰ attains it,
    `rate_max` if all below attain it.
    """
    low, high = start, start
    if attained_at(start) >= target_share:
        while high < rate_max:
            low, high = high, high * step
            if attained_at(high) < target_share:
                break
        else:
            return rate_max
    else:
        while low > start / 2**10:
            low, high = low / step, low
            if attained_at(low) >= target_share:
                break
        else:
            return 0.0
    while high / low > 1 + precision:
        middle = float((low * high) ** 0.5)
        if attained_at(middle) >= target_share:
            low = middle
        else:
            high = middle
    return low
