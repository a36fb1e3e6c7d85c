"""Compile every kernel through its own launcher, for GPUs that this machine need not have, and
print the results as JSON.

Run as a process of its own: Triton's interpreter can't be left once it was chosen. The launchers
run unchanged, on host tensors in place of a GPU's. Replaced are Triton's driver (which device
there is) and the launch itself, which `warmup` leaves out. So the arguments are the real ones, and
a second call with other sizes shows whether it compiles again.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

from tiffin.kernels import backend
from tiffin.kernels.checksum import segment_checksum
from tiffin.kernels.layout.block_layout import BlockLayout, BlockShape
from tiffin.kernels.layout.engine_cache import PagedCache
from tiffin.kernels.layout.transfer_plan import PageMap
from tiffin.kernels.paged import gather_scatter
from tiffin.kernels.paged.reshard import reshard
from tiffin.kernels.quant import quantised_gather
from tiffin.kernels.quant.quantised_gather import (
    QuantisedLayout,
    gather_quantised,
    scatter_dequantised,
)
from tiffin.kernels.ranges import copy_ranges
from tiffin.kvstore.format.schema import KVSchema

if TYPE_CHECKING:
    from collections.abc import Callable

TARGETS = {
    "sm_90": GPUTarget("cuda", 90, 32),
    "sm_80": GPUTarget("cuda", 80, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
}
# Compiled for other GPUs than an H100: one case of each kernel, each in its widest form.
CHIEF = ("gather 16", "scatter 16", "quantise e4m3", "dequantise e4m3", "checksum 16", "ranges 16")


class Driver:
    """The parts of Triton's driver that compiling needs. Each target is a device of its own."""

    def __init__(self) -> None:
        self.target = "sm_90"

    def get_current_target(self) -> GPUTarget:
        return TARGETS[self.target]

    def get_current_device(self) -> int:
        return list(TARGETS).index(self.target)

    def get_current_stream(self, _device: int) -> int:
        return 0

    def set_current_device(self, _device: int) -> None:
        pass

    def get_active_torch_device(self) -> Any:
        return torch.device("cpu")


driver = Driver()
made: list[tuple[str, Any]] = []  # kernels in the order of their calls, and the compiled code


def pretend() -> None:
    """Make launchers find a GPU from now on."""
    triton.runtime.driver.set_active(driver)
    run = JITFunction.run

    def compiled(self: Any, *arguments: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        assert not warmup
        assert len(grid) <= 3
        kernel = run(self, *arguments, grid=grid, warmup=True, **options)
        made.append((self.fn.__name__, kernel))
        return kernel

    JITFunction.run = compiled
    backend.interpreted = lambda: True
    quantised_gather._native = lambda _device: driver.target == "sm_90"


# -- what is launched: each with `more` for other numbers of layers, pages and blocks --------------


def cache_of(more: bool, *, page: int = 16, dim: int = 128, heads: int = 2) -> PagedCache:
    layers, pages = (3, 96) if more else (1, 64)
    shape = (2, pages * 16 // page, page, heads, dim)
    return PagedCache.vllm([torch.zeros(shape, dtype=torch.bfloat16) for _ in range(layers)])


def schema_of(cache: PagedCache, **options: Any) -> KVSchema:
    heads, dim = cache.layers[0][0].shape[2:]
    sizes = {"layers": len(cache.layers), "kv_heads": heads, "head_dim": dim, "block_tokens": 512}
    return KVSchema.gqa(model="compiled", **sizes, **options)


def map_of(cache: PagedCache, more: bool) -> PageMap:
    tokens = 512 + 500 if more else 512
    needed = np.arange(-(-tokens // cache.page_tokens))
    return PageMap.of_sequence(
        needed, tokens=tokens, block_tokens=512, page_tokens=cache.page_tokens
    )


def move(verb: Any, **sizes: int) -> Callable[[bool], None]:
    def call(more: bool) -> None:
        cache = cache_of(more, **sizes)
        layout = BlockLayout.canonical(BlockShape.of_schema(schema_of(cache, dtype="bfloat16")))
        pages = map_of(cache, more)
        blocks = torch.zeros(len(pages), layout.nbytes, dtype=torch.uint8)
        verb(cache, pages, blocks, layout, backend="triton")

    return call


def move_quantised(verb: Any, dtype: str, scale_tokens: int) -> Callable[[bool], None]:
    def call(more: bool) -> None:
        cache = cache_of(more)
        schema = schema_of(cache, dtype=dtype, scale_tokens=scale_tokens)
        layout, pages = QuantisedLayout.of_schema(schema), map_of(cache, more)
        blocks = torch.zeros(len(pages), layout.nbytes, dtype=torch.uint8)
        verb(cache, pages, blocks, layout, backend="triton")

    return call


def between_ranks(more: bool) -> None:
    layers, count = (5, 3) if more else (2, 1)
    shape = BlockShape.gqa(layers=layers, kv_heads=8, head_dim=128, itemsize=2, tokens=512)
    blocks = torch.zeros(2, count, BlockLayout.canonical(shape).nbytes, dtype=torch.uint8)
    orders = [BlockLayout.rank_major(shape, ranks) for ranks in (2, 4)]
    reshard(blocks[0], orders[0], blocks[1], orders[1], backend="triton")


def checked(align: int) -> Callable[[bool], None]:
    def call(more: bool) -> None:
        spans = [(align * (1 + 2 * i), 80_000) for i in range(17 if more else 1)]
        segment_checksum.segment_checksums_async(
            torch.zeros(100_000, dtype=torch.uint8), spans, backend="triton"
        )

    return call


def copied(align: int) -> Callable[[bool], None]:
    def call(more: bool) -> None:
        memory = np.zeros(1 << 19, np.uint8)
        start = -(-memory.ctypes.data // 16) * 16
        steps = (np.arange(16 if more else 1, dtype=np.int64) + 1) * 16_384 + align
        lengths = np.full(len(steps), 16_384 - (16 if align == 16 else align), np.int64)
        copy_ranges.copy_ranges(start + steps, start + (1 << 18) + steps, lengths, device="cpu")

    return call


CASES: dict[str, Callable[[bool], None]] = {
    "gather 16": move(gather_scatter.gather),
    "gather 8": move(gather_scatter.gather, dim=20, heads=1),
    "gather 2": move(gather_scatter.gather, dim=3, heads=1),
    "gather pages of 48": move(gather_scatter.gather, page=48),
    "scatter 16": move(gather_scatter.scatter),
    "scatter 2": move(gather_scatter.scatter, dim=3, heads=1),
    "reshard 16": between_ranks,
    "quantise e4m3": move_quantised(gather_quantised, "float8_e4m3", 16),
    "quantise int8": move_quantised(gather_quantised, "int8", 512),
    "dequantise e4m3": move_quantised(scatter_dequantised, "float8_e4m3", 512),
    "dequantise int8": move_quantised(scatter_dequantised, "int8", 16),
    "checksum 16": checked(16),
    "checksum 8": checked(8),
    "checksum 1": checked(1),
    "ranges 16": copied(16),
    "ranges 8": copied(8),
    "ranges 1": copied(1),
}


# -- results ---------------------------------------------------------------------------------------


def stack_bytes(kernel: Any) -> int:
    """A thread's local memory (outside registers), to which a compiler spills."""
    if "hsaco" in kernel.asm:
        sizes = re.findall(r"\.private_segment_fixed_size:\s*(\d+)", kernel.asm["amdgcn"])
        return max(map(int, sizes))
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        Path(file.name).write_bytes(kernel.asm["cubin"])
        command = [triton.knobs.nvidia.cuobjdump.path, "-res-usage", file.name]
        told = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    usage = re.search(r"STACK:(\d+) SHARED:\d+ LOCAL:(\d+)", told)
    assert usage is not None, told
    return int(usage[1]) + int(usage[2])


def main() -> None:
    pretend()
    results = []
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for driver.target in TARGETS:
            for case in CASES if driver.target == "sm_90" else CHIEF:
                made.clear()
                CASES[case](False)
                first = dict.fromkeys(kernel for _, kernel in made)
                name, kernel = made[0]
                made.clear()
                CASES[case](True)
                anew = sum(kernel not in first for _, kernel in made)
                text = kernel.asm["ptx" if "ptx" in kernel.asm else "amdgcn"]
                results.append(
                    {
                        "target": driver.target, "case": case, "kernel": name, "text": text,
                        "stack_bytes": max(map(stack_bytes, first)), "compiled_anew": anew,
                    }
                )  # fmt: skip
    json.dump(results, sys.stdout)


if __name__ == "__main__":
    main()
