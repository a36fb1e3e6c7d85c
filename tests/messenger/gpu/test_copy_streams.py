"""CudaLanes without a GPU: which calls of torch and of the driver are made, on which stream.

The double of torch has streams that run at once; the double of the driver copies host memory.
Whether the real ones behave as documented can be tested only on a GPU (test_copier.py does).
"""

from __future__ import annotations

import contextlib
import ctypes
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from tiffin.kernels.ranges import copy_ranges
from tiffin.messenger.gpu import copy_streams
from tiffin.messenger.gpu.copier import Copies, CudaError, DeviceCopier, DeviceUnavailable
from tiffin.messenger.gpu.copy_streams import CudaLanes
from tiffin.messenger.gpu.cuda_driver import DeviceMemoryError
from tiffin.messenger.gpu.pinning import Pinned

if TYPE_CHECKING:
    from collections.abc import Iterator

torch = pytest.importorskip("torch")


class FakeStream:
    """The part of torch.cuda.Stream that is used."""

    def __init__(self, log: list[Any], number: int, priority: int) -> None:
        self.log, self.cuda_stream, self.priority = log, number, priority

    def record_event(self) -> FakeStream:
        self.log.append(("record", self.cuda_stream))
        return self

    def wait_event(self, event: FakeStream) -> None:
        self.log.append(("wait", self.cuda_stream, event.cuda_stream))

    def query(self) -> bool:
        return True

    def wait(self, stream: FakeStream) -> None:
        stream.wait_event(self)


class FakeCuda:
    """The part of torch.cuda that is used."""

    OutOfMemoryError = MemoryError

    def __init__(self, log: list[Any]) -> None:
        self.log = log
        self.streams: list[FakeStream] = []
        self.current: list[FakeStream] = []

    def is_available(self) -> bool:
        return True

    def Stream(self, device: Any, priority: int) -> FakeStream:  # noqa: N802 - as torch names it
        self.streams.append(FakeStream(self.log, len(self.streams), priority))
        return self.streams[-1]

    @contextlib.contextmanager
    def stream(self, stream: FakeStream) -> Iterator[None]:
        self.current.append(stream)
        yield
        self.current.pop()

    def device(self, device: Any) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()


class FakeTorch:
    """The part of torch that is used; its tensors are real host tensors."""

    def __init__(self) -> None:
        self.log: list[Any] = []
        self.cuda = FakeCuda(self.log)
        self.version = type("version", (), {"hip": None})
        self.uint8 = torch.uint8
        self.full = False

    def empty(self, nbytes: int, **options: Any) -> Any:
        if self.full:
            raise MemoryError("full")
        on = self.cuda.current[-1].cuda_stream if self.cuda.current else None
        self.log.append(("empty", nbytes, "pinned" if "pin_memory" in options else on))
        return torch.empty(nbytes, dtype=torch.uint8)


class FakeDriver:
    """The driver's copies, carried out at once."""

    def __init__(self, log: list[Any]) -> None:
        self.log, self.batches, self.fails, self.inside = log, True, False, False

    @contextlib.contextmanager
    def on(self, index: int | None) -> Iterator[None]:
        self.inside = True
        yield
        self.inside = False

    def copy_each(self, targets: Any, sources: Any, lengths: Any, stream: int) -> None:
        assert self.inside
        if self.fails:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")
        self.log.append(("single", len(targets), stream))
        for target, source, length in zip(targets, sources, lengths, strict=True):
            ctypes.memmove(int(target), int(source), int(length))

    def copy_batch(self, targets: Any, sources: Any, lengths: Any, stream: int) -> None:
        assert self.inside
        self.log.append(("batch", len(targets), stream))
        copy_ranges.copy_ranges_host(targets, sources, lengths)


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeTorch:
    fake = FakeTorch()

    def launch(*table: Any, device: Any, programs: int | None) -> None:
        fake.log.append(("kernel", len(table[0]), programs, fake.cuda.current[-1].cuda_stream))
        copy_ranges.copy_ranges_host(*table)

    monkeypatch.setattr(copy_streams.kernels, "copy_ranges", launch)
    return fake


@pytest.fixture
def driver(fake: FakeTorch) -> FakeDriver:
    return FakeDriver(fake.log)


@pytest.fixture
def copier(fake: FakeTorch, driver: FakeDriver) -> Iterator[DeviceCopier]:
    lanes = CudaLanes(fake, torch.device("cpu"), driver)  # type: ignore[arg-type]
    with DeviceCopier("cpu", staging_bytes=1 << 16, lanes=lanes) as copier:
        fake.log.clear()
        yield copier


def split(count: int, nbytes: int) -> tuple[Any, Any, Copies]:
    """(host, device, ranges from the one to every other place of the other)."""
    host = np.random.default_rng(count).integers(0, 256, count * nbytes, dtype=np.uint8)
    device = torch.zeros(2 * count * nbytes, dtype=torch.uint8)
    at = np.arange(count) * nbytes
    return host, device, Copies(device, host, 2 * at, at, np.full(count, nbytes))


def test_six_streams_of_the_lowest_priority(copier: DeviceCopier, fake: FakeTorch) -> None:
    assert [stream.priority for stream in fake.cuda.streams] == [0] * 6


def test_staged_copies_alternate_between_two_streams(copier: DeviceCopier, fake: FakeTorch) -> None:
    host, device, copies = split(32, 4096)
    with Pinned(host, "cpu"):
        copier.submit([[copies]]).wait(1.0)
    link, gather = 0, 1
    first = [("empty", 1 << 16, link), ("record", link), ("wait", gather, link)]  # a slot's buffer
    piece = [
        ("single", 1, link), ("record", link), ("wait", gather, link),
        ("kernel", 16, 32, gather), ("record", gather),
    ]  # fmt: skip
    end = [("record", gather), ("wait", link, gather), ("record", link)]
    assert fake.log == first + piece + first + piece + end
    assert np.array_equal(device.numpy().reshape(-1, 2, 4096)[:, 0].ravel(), host)


def test_an_events_order_is_the_devices(copier: DeviceCopier, fake: FakeTorch) -> None:
    host, device, _ = split(1, 4096)
    engine = FakeStream(fake.log, 99, 0)
    with Pinned(host, "cpu"):
        transfer = copier.submit([[(device[:4096], host)]], after=engine.record_event())
    transfer.stream_wait(engine)
    assert fake.log == [
        ("record", 99), ("wait", 0, 99), ("wait", 1, 99), ("single", 1, 0), ("record", 0),
        ("record", 1), ("wait", 0, 1), ("record", 0), ("wait", 99, 0),
    ]  # fmt: skip


def test_middle_ranges_are_batched_and_bounced_ones_pass_pinned_buffers(
    copier: DeviceCopier, fake: FakeTorch
) -> None:
    host, device, copies = split(20, 40_000)
    with Pinned(host, "cpu"):
        copier.submit([[copies]]).wait(1.0)
    assert ("batch", 20, 0) in fake.log
    fake.log.clear()
    back = np.zeros_like(host)
    swapped = (copies.source_offsets, copies.target_offsets, copies.lengths)
    copier.submit([[Copies(back, device, *swapped)]]).wait(1.0)
    assert fake.log.count(("empty", 1 << 16, "pinned")) == 2
    assert np.array_equal(back, host)


def test_a_device_that_is_full_or_broken_says_so(
    copier: DeviceCopier, fake: FakeTorch, driver: FakeDriver
) -> None:
    host, device, copies = split(32, 4096)
    fake.full = True
    with pytest.raises(DeviceMemoryError, match="no staging"):
        copier.submit([[copies]])
    fake.full, driver.fails = False, True
    with pytest.raises(CudaError, match="illegal memory"):
        copier.submit([[(device[: len(host)], host)]])


def test_other_vendors_and_missing_devices_are_refused() -> None:
    fake = FakeTorch()
    fake.version.hip = "6.2"
    with pytest.raises(DeviceUnavailable, match="ROCm"):
        CudaLanes(fake, torch.device("cpu"), FakeDriver([]))  # type: ignore[arg-type]
