"""Python's cycle collector in processes that serve for months."""

from __future__ import annotations

import gc


def calm_collector() -> None:
    """Keep it away from what stays. With 500,000 blocks in an index a full collection stops a
    process for half a second, and the young ones take an eighth of each decision of a conductor.
    What requests leave behind leaves by reference counting alone: only rare garbage, such as
    tracebacks, waits for the young generations."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 50, 1_000_000)
