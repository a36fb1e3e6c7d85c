"""A pool of several nodes for each test; afterwards all of them are at rest, and nothing is open."""

from __future__ import annotations

import gc
import os
import threading
from typing import TYPE_CHECKING

import pytest
from kvsupport import wait_until
from poolsupport import Cluster

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture
def nothing_left(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """No thread and no descriptor outlives the test."""
    threads, files = set(threading.enumerate()), len(os.listdir("/proc/self/fd"))
    yield

    def gone() -> bool:
        # An error that was logged has a traceback, that a view of a region, that a descriptor.
        for when in ("call", "teardown"):
            caplog.get_records(when).clear()  # type: ignore[arg-type]
        gc.collect()
        more = [t for t in threading.enumerate() if t not in threads and t.name != "asyncio_0"]
        return not more and len(os.listdir("/proc/self/fd")) <= files

    wait_until(gone, f"threads and descriptors end: {set(threading.enumerate()) - threads}")


@pytest.fixture
def cluster(nothing_left: None) -> Iterator[Cluster]:
    cluster = Cluster()
    try:
        yield cluster
        cluster.quiet()
    finally:
        cluster.close()
