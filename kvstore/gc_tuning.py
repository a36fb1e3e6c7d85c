"""Settings of Python's garbage collector for long-lived server processes."""

from __future__ import annotations

import gc


def calm_collector() -> None:
    """Freeze the objects that exist now, and make collections rare. With 500,000 blocks in an index
    a full collection pauses a process for half a second, and collections of the young generations
    take an eighth of each decision of a conductor. Reference counting alone frees the garbage of
    requests; only rare cycles, such as tracebacks, wait for the young generations."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 50, 1_000_000)
