"""Settings of Python's garbage collector, and of the C library's heap, for long-lived server
processes."""

from __future__ import annotations

import ctypes
import gc

# A collection that never comes.
_NEVER = 1_000_000


def calm_collector() -> None:
    """Freeze the objects that exist now, and make collections rare. With 500,000 blocks in an index
    a full collection pauses a process for half a second, and collections of the young generations
    take an eighth of each decision of a conductor. Reference counting alone frees the garbage of
    requests; only rare cycles, such as tracebacks, wait for the young generations."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 50, _NEVER)


def collect_young_only() -> None:
    """As `calm_collector`, for a process whose answers take less than a millisecond. The collector
    looks at new objects, which takes it a quarter of a microsecond for each: whenever the process
    calls `collect_young`, or else at 10,000. At what has outlived that it looks when the process
    calls `collect_all`: a quarter of a second for a million."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(10_000, _NEVER, _NEVER)


def collect_all() -> None:
    """Look at all objects that were made since the start: a cycle that outlives a look at new ones
    is freed by nothing else. What that and earlier peaks have left goes back to the system."""
    gc.collect()
    give_back()


# glibc's alone.
_trim = getattr(ctypes.CDLL(None), "malloc_trim", None)


def give_back() -> None:
    """Give the C library's free memory back to the system: after a peak glibc keeps what is free
    between blocks in use, for good. 20 ms for a heap of 50 MB. Other libraries do it themselves."""
    if _trim is not None:
        _trim(0)


def collect_young() -> None:
    """Look at new objects now, where nobody waits, and not within an answer."""
    gc.collect(0)
