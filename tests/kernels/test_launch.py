"""What launchers check and keep around a launch, with test doubles in place of a GPU."""

from __future__ import annotations

import subprocess
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
triton = pytest.importorskip("triton")

from tiffin.kernels import backend, launching
from tiffin.kernels.errors import DeviceError, LayoutError
from tiffin.kernels.layout.lanes import LaneGroup
from tiffin.kernels.paged import gather_scatter
from tiffin.kernels.quant import quantised_gather
from tiffin.kernels.ranges import copy_ranges

GPU = SimpleNamespace(type="cuda", index=1)


def group_of(*, lanes: int = 1, rows: int = 1, row_bytes: int = 16) -> LaneGroup:
    return LaneGroup(
        addresses=np.full(lanes, 1 << 20, np.int64),
        offsets=np.zeros(lanes, np.int64),
        row_bytes=row_bytes,
        run_row_bytes=row_bytes,
        rows=rows,
        skip=0,
        page_stride_bytes=16,
        token_stride_bytes=16,
        together=1,
        alignment=16,
        stretches=(),
    )


def test_a_stream_of_another_device_is_refused() -> None:
    """Kernels would run on the stream's device, over memory of the other."""
    elsewhere = SimpleNamespace(device=SimpleNamespace(type="cuda", index=0))
    with pytest.raises(DeviceError, match="a stream of"), launching.on_stream(GPU, elsewhere):
        pytest.fail("nothing may be launched here")
    with launching.on_stream(torch.device("cpu"), elsewhere):
        pass  # there are no streams


def test_a_table_of_lanes_stays_for_every_stream_that_reads_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """torch reuses memory after the work of the stream that allocated it, and of no other."""
    read_by: list[object] = []
    table = SimpleNamespace(record_stream=read_by.append)
    group = group_of()
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: f"stream of {device.index}")
    device = _Hashable()
    group.memo[device] = table
    assert launching.lane_table(group, device) is table
    assert launching.lane_table(group, device) is table
    assert read_by == ["stream of 1"] * 2


class _Hashable:
    type, index = "cuda", 1


@pytest.mark.parametrize(
    ("group", "blocks"),
    [
        (group_of(lanes=1 << 10), (1 << 20) + 1),  # tiles
        (group_of(rows=1 << 27, row_bytes=16), 1),  # bytes of a run
    ],
)
def test_what_32_bits_cannot_count_is_refused(group: LaneGroup, blocks: int) -> None:
    with pytest.raises(LayoutError, match=r"too many|too long"):
        gather_scatter.tile_work(group, group.addresses, blocks)


@pytest.mark.parametrize(
    ("read_twice_bytes", "programs"),
    [(0, 4 * 132), (32 << 10, 4 * 132), (128 << 10, 256), (1 << 20, 132)],
)
def test_what_is_read_twice_fits_the_cache_between_all_programs(
    read_twice_bytes: int, programs: int
) -> None:
    """32 MiB are read twice at most, but never by fewer programs than an H100 has SMs."""
    work = quantised_gather._Work(
        width=128,
        step=64,
        together=1,
        units=1,
        items=1 << 20,
        read_twice_bytes=read_twice_bytes,
    )
    assert work.programs(132) == programs


@pytest.mark.parametrize(
    "failure",
    [
        RuntimeError("Failed to find C compiler."),
        subprocess.CalledProcessError(1, ["gcc"]),
        ImportError("no libcuda"),
    ],
)
def test_a_triton_that_cannot_launch_is_not_counted_on(
    monkeypatch: pytest.MonkeyPatch, failure: Exception
) -> None:
    class Driver:
        @property
        def active(self) -> Any:
            raise failure

    monkeypatch.setattr(triton.runtime, "driver", Driver())
    monkeypatch.setattr(backend, "interpreted", lambda: False)
    backend.can_launch.cache_clear()
    try:
        assert not copy_ranges.available("cuda")
    finally:
        backend.can_launch.cache_clear()
