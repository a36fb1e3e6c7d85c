"""Rows about the overhead of a call: launches, and the host's time."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from tiffin.kernels.layout.block_addresses import block_memory
from tiffin.kernels.layout.lanes import lanes
from tiffin.kernels.paged.gather_scatter import gather, scatter, tile_work

from ..store.rows import MICROSECONDS, Row, Side, Target, interleave, single, times
from .case import latents, llama, small_pages

if TYPE_CHECKING:
    from collections.abc import Callable

    from .case import Case
    from .device import Machine
    from .setting import Setting

_MOST_LAUNCHES, _MOST_HOST_US = 2, 100
# The host's time depends on lanes, pages and blocks, not on the length of a row. Rows are short so
# that 64 blocks are not 4 GiB.
_SHORT_DIM = 8


def launches(setting: Setting) -> list[Row]:
    """Launches per call. On a GPU counted by torch's profiler, else the planned ones: one per group
    of lanes."""
    rows = []
    for model, name in ((llama(setting.sizes), "gqa"), (latents(setting.sizes), "mla")):
        case = small_pages(setting, model, blocks=2)
        planned = len(lanes(case.cache, case.layout))
        found, copies = planned, "not counted"
        if setting.machine.on_gpu:
            case.gather()  # compiles, and uploads the table of lanes
            found, copied = _profiled(setting.machine, case.gather)
            copies = f"{copied} copies"
        how = "counted by torch's profiler" if setting.machine.on_gpu else "planned, not run"
        rows.append(
            Row(
                f"launches-{name}",
                f"launches of a gather of {model.layers} layers, {how}",
                "launches",
                single(found),
                "one launch",
                single(1.0),
                (Target("p50", "<=", _MOST_LAUNCHES),),
                note=f"{planned} planned; {copies} beside",
            )
        )
    return rows


def host(setting: Setting) -> list[Row]:
    """The host's time per call: plans and checks before a launch, from the page table on; on a GPU
    also whole calls, which return when their work is queued."""
    count = setting.sizes.call_blocks
    sizes = setting.sizes
    model = replace(llama(sizes), dim=_SHORT_DIM)
    case = small_pages(setting, model, blocks=count)
    extents = list(case.blocks)  # as from an HBM tier, each at an address of its own
    pages = f"{len(case.page_ids):,} pages of {case.page_tokens} tokens, {model.layers} layers"
    target = (Target("p50", "<=", _MOST_HOST_US),)
    sides = [Side(partial(_plan, case, extents)), Side(partial(_sort, case))]
    planned, sorted_ = interleave(sides, rounds=sizes.calls)
    rows = [
        Row(
            f"host-plan-{count}",
            f"planning and checks of a gather of {count} blocks, {pages}; without the launch",
            "us",
            times(planned, MICROSECONDS),
            "sorting the page ids once, as a search for doubles must",
            times(sorted_, MICROSECONDS),
            target,
        )
    ]
    if setting.machine.on_gpu:
        rows += _queued(setting, case, extents, pages, target)
    return rows


def _queued(
    setting: Setting, case: Case, extents: list[Any], pages: str, target: tuple[Target, ...]
) -> list[Row]:
    """Whole calls on an idle GPU, so that the host never waits for room in a queue."""
    where, rows = setting.machine, []
    copy = Side(case.copy, where.synchronise)
    for verb in (gather, scatter):

        def call(verb: Callable[..., None] = verb) -> None:
            verb(case.cache, case.page_map(), extents, case.layout)

        sides = [Side(call, where.synchronise), copy]
        queued, copied = where.host_turns(sides, rounds=setting.sizes.calls)
        name = verb.__name__
        rows.append(
            Row(
                f"host-{name}-{len(extents)}",
                f"page map and {name} of {len(extents)} blocks, {pages}, until all is queued",
                "us",
                times(queued, MICROSECONDS),
                "queueing a plain copy (tensor.copy_)",
                times(copied, MICROSECONDS),
                target,
            )
        )
    return rows


def _plan(case: Case, extents: list[Any]) -> None:
    """The steps of `gather` before its launch, with a new page map."""
    pages = case.page_map()
    groups = lanes(case.cache, case.layout)
    pages.check_fits(case.cache, case.layout.tokens)
    memory = block_memory(
        extents,
        count=len(pages),
        nbytes=case.layout.nbytes,
        device=case.cache.device,
        written=True,
    )
    for group in groups:
        tile_work(group, memory.addresses, len(pages))
    np.concatenate((memory.addresses, pages.table))


def _sort(case: Case) -> None:
    np.sort(case.page_ids)


def _profiled(where: Machine, action: Callable[[], None]) -> tuple[int, int]:
    """The numbers of kernels and of copies that one call queues."""
    torch = where.torch
    kinds = torch.profiler.ProfilerActivity
    where.synchronise()
    with torch.profiler.profile(activities=[kinds.CPU, kinds.CUDA]) as profile:
        action()
        where.synchronise()
    on_device = torch.autograd.DeviceType.CUDA
    names = [event.name for event in profile.events() if event.device_type == on_device]
    copies = sum(name.startswith(("Memcpy", "Memset")) for name in names)
    return len(names) - copies, copies
