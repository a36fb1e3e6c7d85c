"""A double of torch.cuda over the CPU, to test the order of calls that the benchmarks make.

It does not simulate a GPU: work is done when it is queued, and events record the host's time.
"""

from __future__ import annotations

import contextlib
import time
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch

from tiffin.bench.kernels.device import Machine

if TYPE_CHECKING:
    from collections.abc import Iterator


class FakeEvent:
    """A double of torch.cuda.Event; `ended` is the answer of `query` for all events."""

    ended = True

    def __init__(self, cuda: FakeCuda, **_: object) -> None:
        self._cuda = cuda
        self.at_s = 0.0

    def record(self, stream: object = None) -> None:
        self._cuda.note("record")
        self.at_s = time.perf_counter()

    def synchronize(self) -> None:
        self._cuda.note("synchronize")

    def query(self) -> bool:
        return FakeEvent.ended

    def wait(self, stream: object = None) -> None:
        pass

    def elapsed_time(self, other: FakeEvent) -> float:
        return (other.at_s - self.at_s) * 1e3


class FakeCuda:
    def __init__(self) -> None:
        self._notes: list[str] | None = None
        self.replays = 0

    def note(self, what: str) -> None:
        if self._notes is not None:
            self._notes.append(what)

    @contextlib.contextmanager
    def noting(self, notes: list[str]) -> Iterator[None]:
        """Record events' calls in `notes`."""
        self._notes = notes
        yield
        self._notes = None

    def Event(self, **options: object) -> FakeEvent:  # noqa: N802 (as torch spells it)
        return FakeEvent(self, **options)

    def Stream(self, device: object = None) -> FakeCuda:  # noqa: N802
        return self

    def CUDAGraph(self) -> FakeCuda:  # noqa: N802
        return self

    def replay(self) -> None:
        self.replays += 1
        time.sleep(1e-4)

    def record_event(self) -> FakeEvent:
        return FakeEvent(self)

    def current_stream(self) -> FakeCuda:
        return self

    def stream(self, stream: object) -> Any:
        return contextlib.nullcontext()

    def graph(self, graph: object) -> Any:
        return contextlib.nullcontext()

    def synchronize(self, device: object) -> None:
        pass

    def get_device_properties(self, device: object) -> Any:
        return SimpleNamespace(
            name="no GPU at all",
            total_memory=1 << 30,
            L2_cache_size=1 << 10,
            multi_processor_count=1,
            uuid="12",
        )


class FakeTorch:
    """torch with a double of `cuda`."""

    def __init__(self) -> None:
        self.cuda = FakeCuda()

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


class FakeGpu(Machine):
    """The CPU, measured in the way of a GPU."""

    __slots__ = ()

    @property
    def on_gpu(self) -> bool:
        return True

    def pinned(self, nbytes: int) -> Any:
        return torch.zeros(nbytes, dtype=torch.uint8)


def fake_gpu() -> Machine:
    return FakeGpu(FakeTorch(), torch.device("cpu"))
