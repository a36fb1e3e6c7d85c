"""What each launch of a kernel needs: a device and its stream, tables on the device, a grid."""

from __future__ import annotations

import functools
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import torch

from .errors import DeviceError

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

    from .layout.lanes import LaneGroup
    from .layout.transfer_plan import PageMap

_INTERPRETED_PROGRAMS: Final = 3  # few, but more than one: tests see programs share the work


def on_stream(device: Any, stream: Any = None) -> ExitStack:
    """A context in which CUDA work goes to this device, and to this stream if one is given; it does
    nothing on a CPU. Raises DeviceError for a stream of another device."""
    stack = ExitStack()
    if device.type == "cuda":
        if stream is not None and stream.device != device:
            raise DeviceError(f"a stream of {stream.device} for work on {device}")
        stack.enter_context(torch.cuda.device(device))
        if stream is not None:
            stack.enter_context(torch.cuda.stream(stream))
    return stack


def upload(numbers: NDArray[Any], device: Any) -> Any:
    """The numbers on the device, by one copy in the current stream that the host does not wait for.

    The source is pinned memory from torch's cache, which torch reuses only when the copy has ended:
    a copy from pageable memory may make the driver wait for the stream.
    """
    tensor = torch.from_numpy(numbers)
    return tensor if device.type == "cpu" else tensor.pin_memory().to(device, non_blocking=True)


@functools.cache
def multiprocessors(device: Any) -> int:
    """The number of SMs (on AMD: compute units) of a GPU."""
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def lane_table(group: LaneGroup, device: Any) -> Any:
    """A group's addresses and offsets on the device, int64 [2, lanes], copied once."""
    table = group.memo.get(device)
    if table is None:
        host = torch.from_numpy(np.stack((group.addresses, group.offsets)))
        table = group.memo[device] = host.to(device)
    if device.type == "cuda":
        # The table is made on one stream, used on any, and dropped when there are too many plans:
        # its memory must not be reused before this stream has passed the launch.
        table.record_stream(torch.cuda.current_stream(device))
    return table


@dataclass(frozen=True, slots=True, eq=False)
class LaunchCall:
    """The arguments that all launches of a move between pages and blocks share.

    Made in the stream that the launches go to. `addresses`: int64 [blocks]. `programs`: the most
    that run, or None for as many as fill the device. `table`: the table of blocks and pages that
    `move_lanes` (paged/kernel.py) reads, on the device.
    """

    pages: PageMap
    addresses: NDArray[np.int64]
    device: Any
    gather: bool
    programs: int | None
    table: Any = field(init=False)

    def __post_init__(self) -> None:
        numbers = np.concatenate((self.addresses, self.pages.table))
        object.__setattr__(self, "table", upload(numbers, self.device))

    def grid(self, items: int, filling: Callable[[int], int]) -> tuple[int]:
        """How many programs share `items` of work; `filling`: of a number of SMs, the number of
        programs that fill them."""
        programs = self.programs
        if programs is None:
            on_gpu = self.device.type == "cuda"
            programs = filling(multiprocessors(self.device)) if on_gpu else _INTERPRETED_PROGRAMS
        return (max(1, min(programs, items)),)

    def arguments(self, group: LaneGroup, items: int, per_run: int) -> tuple[Any, ...]:
        """The first arguments of every kernel over lanes; `per_run`: items of a lane in a block."""
        return (
            lane_table(group, self.device),
            self.table,
            items,
            len(group),
            group.together,
            len(self.pages),
            self.pages.pages.shape[1],
            per_run,
        )
