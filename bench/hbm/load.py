"""Background loads of a GPU during a measurement: matrix products on all SMs, and decode steps.

Not run: there was no GPU.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from ..store.rows import Side

if TYPE_CHECKING:
    from collections.abc import Callable

    from ..kernels.device import Machine
    from ..store.rows import Target

_CALIBRATIONS = 5
# The time of the matrices, as a multiple of the time that the measured action takes alone: beside
# the load it takes longer.
_MARGIN = 8.0
_SLACK_S = 0.01
_TIMEOUT_S = 30.0


class GpuLoad(Protocol):
    """Work that is queued on a device."""

    def done(self) -> bool:
        """Whether it has ended."""

    def wait(self, timeout_s: float) -> None:
        """Wait until it has ended."""


class Beside:
    """A load that is started before each sample, and should still run when the sample ends.

    `early` counts the samples during which the load ended: if there are any, no target is judged.
    """

    def __init__(self, start: Callable[[], GpuLoad]) -> None:
        self._start = start
        self._load: GpuLoad | None = None
        self.early = 0

    def side(self, action: Callable[[], object]) -> Side:
        """`action`, measured during the load."""
        return Side(action, self._stop, self._begin)

    def judged(self, *targets: Target) -> tuple[Target, ...]:
        """The targets, or none if the load ended too early."""
        return () if self.early else targets

    @property
    def note(self) -> str:
        """The note of the row."""
        return f"not judged: the load ended before {self.early} samples did" if self.early else ""

    def _begin(self) -> None:
        self._load = self._start()

    def _stop(self) -> None:
        assert self._load is not None
        self.early += self._load.done()
        self._load.wait(_TIMEOUT_S)


@dataclass(frozen=True, slots=True)
class _Queued:
    event: Any

    def done(self) -> bool:
        return bool(self.event.query())

    def wait(self, timeout_s: float) -> None:
        del timeout_s
        self.event.synchronize()


class Matrices:
    """Products of large square matrices, one after the other on a stream of their own: no SM is
    idle."""

    def __init__(self, where: Machine, edge: int) -> None:
        torch = where.torch
        self._torch, self._where = torch, where
        self._stream = torch.cuda.Stream(where.device)
        shape, kind = (edge, edge), torch.bfloat16
        self._a, self._b, self._c = (
            torch.randn(shape, dtype=kind, device=where.device) for _ in range(3)
        )
        where.synchronise()
        self._each_s = self._calibrate()

    def start(self, beside_s: float) -> GpuLoad:
        """Queue enough of them for a measured action that takes `beside_s` alone."""
        count = math.ceil((_MARGIN * beside_s + _SLACK_S) / self._each_s)
        with self._torch.cuda.stream(self._stream):
            for _ in range(count):
                self._torch.mm(self._a, self._b, out=self._c)
            return _Queued(self._stream.record_event())

    def _calibrate(self) -> float:
        cuda = self._torch.cuda
        taken_s = []
        for _ in range(_CALIBRATIONS):
            begin, end = (cuda.Event(enable_timing=True) for _ in range(2))
            with cuda.stream(self._stream):
                begin.record()
                self._torch.mm(self._a, self._b, out=self._c)
                end.record()
            end.synchronize()
            taken_s.append(float(begin.elapsed_time(end)) / 1e3)
        return min(taken_s)


class DecodeSteps:
    """The load of decoding: reads all weights to multiply them with a few rows. Captured once as a
    CUDA graph, so that the host's time is not measured."""

    def __init__(
        self, where: Machine, *, batch: int, shape: tuple[int, int], layers: int, steps: int
    ) -> None:
        torch = where.torch
        rows, columns = shape
        kind = {"dtype": torch.bfloat16, "device": where.device}
        weights = [torch.randn(rows, columns, **kind) for _ in range(layers)]
        x, y = torch.randn(batch, rows, **kind), torch.empty(batch, columns, **kind)
        self.nbytes = steps * layers * rows * columns * 2
        self._keep = weights, x, y
        torch.mm(x, weights[0], out=y)  # the library's own set-up can't be captured
        where.synchronise()
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph):
            for weight in weights * steps:
                torch.mm(x, weight, out=y)

    def run(self) -> None:
        """Queue all steps on the current stream."""
        self._graph.replay()
