"""Compile the kernels of `quant` for GPUs that need not be here, and say what came out, as JSON.

Run as a process of its own, for Triton's interpreter can't be left once it was chosen.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import triton
from triton import language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from tiffin.kernels import quant_kernel

TARGETS = {"sm_80": ("cuda", 80, 32), "sm_90": ("cuda", 90, 32), "gfx942": ("hip", "gfx942", 64)}
CONSTANTS = {"PAGE_TOKENS": 16, "DIM": 128, "WIDTH": 128, "CACHE_ALIGN": 16, "RUN_ALIGN": 16}
POINTERS = ("lanes", "table")


def compile_for(target: str, name: str, **chosen: Any) -> str:
    """The code in the words of the target's assembler."""
    kernel = getattr(quant_kernel, name)
    constants = {**CONSTANTS, "NUMBER": tl.bfloat16, "NATIVE": target == "sm_90", **chosen}
    kinds = {"page_stride": "i64", "token_stride": "i64", "scale_max": "fp32"}
    kinds |= dict.fromkeys(POINTERS, "*i64") | dict.fromkeys(constants, "constexpr")
    source = ASTSource(
        fn=kernel,
        signature={argument: kinds.get(argument, "i32") for argument in kernel.arg_names},
        constexprs={(kernel.arg_names.index(n),): value for n, value in constants.items()},
    )
    options = {"num_warps": 8, "enable_fp_fusion": False}
    compiled = triton.compile(source, target=GPUTarget(*TARGETS[target]), options=options)
    assert "cubin" in compiled.asm or "hsaco" in compiled.asm
    return str(compiled.asm["ptx" if "ptx" in compiled.asm else "amdgcn"])


def main() -> None:
    codes = {}
    for target in TARGETS:
        small = {"GROUP": 16, "TOGETHER": 4, "STEP": 16}
        codes[f"{target} e4m3"] = compile_for(
            target, "quantise_pages", STORED="float8_e4m3", LIMIT=448.0, **small
        )
        large = {"GROUP": 512, "TOGETHER": 1, "STEP": 64}
        codes[f"{target} int8"] = compile_for(
            target, "quantise_pages", STORED="int8", LIMIT=127.0, **large
        )
        codes[f"{target} back"] = compile_for(
            target, "dequantise_pages", STORED="float8_e4m3", GROUP=512, STEP=64
        )
    json.dump(codes, sys.stdout)


if __name__ == "__main__":
    main()
