"""The kernel compiles for GPUs that are not here, into the loads that it is written for."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from pathlib import Path

# In a process of its own: here Triton is its interpreter. The counts are those of `tile_work`.
SCRIPT = """
import json, sys
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from tiffin.kernels.paged_kernel import WORD_TYPES, move_lanes

backend, arch, warp, constants = json.loads(sys.argv[1])
constants["WORD_TYPE"] = WORD_TYPES[constants["WORD_BYTES"]]
names = move_lanes.arg_names
signature = {name: "i32" for name in names} | {"lanes": "*i64", "table": "*i64"}
signature |= {name: "constexpr" for name in constants}
values = {(names.index(name),): value for name, value in constants.items()}
attributes = {(names.index(name),): [["tt.divisibility", 16]] for name in ("lanes", "table")}
source = ASTSource(move_lanes, signature, values, attributes)
made = triton.compile(source, target=GPUTarget(backend, arch, warp), options={"num_warps": 4})
print(json.dumps(made.asm["ptx" if backend == "cuda" else "amdgcn"]))
"""

# Constants of the kernel, and what PTX calls a load of that width.
UNITS: dict[str, tuple[dict[str, Any], str]] = {
    "16 bytes": ({"WORD_BYTES": 8, "UNIT_WORDS": 2, "ROW_UNITS": 72}, "v2.b64"),
    "8 bytes": ({"WORD_BYTES": 8, "UNIT_WORDS": 1, "ROW_UNITS": 5}, "b64"),
    "2 bytes": ({"WORD_BYTES": 2, "UNIT_WORDS": 1, "ROW_UNITS": 3}, "b16"),
}


def compiled(tmp_path: Path, target: tuple[Any, ...], constants: dict[str, Any]) -> str:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"TRITON_CACHE_DIR": str(tmp_path), "TRITON_DEFAULT_FP_FUSION": "1"}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, json.dumps([*target, constants])],
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return str(json.loads(done.stdout.splitlines()[-1]))


@pytest.mark.parametrize("gather", [True, False], ids=["gather", "scatter"])
@pytest.mark.parametrize("unit", UNITS)
def test_loads_and_stores_on_nvidia(tmp_path: Path, unit: str, gather: bool) -> None:
    constants, width = UNITS[unit]
    shape = {**constants, "TILE_UNITS": 512, "PAGE_SHIFT": 4, "GATHER": gather}
    text = compiled(tmp_path, ("cuda", 90, 32), shape)
    loads = [line for line in text.splitlines() if "ld.global" in line]
    stores = [line for line in text.splitlines() if "st.global" in line]
    # 512 units for 128 threads: four of each, and nothing narrower.
    assert len(stores) == 4
    assert all(f"st.global.{width}" in line for line in stores)
    assert len([line for line in loads if f"ld.global.{width}" in line]) >= 4
    assert "ld.local" not in text, "registers were spilled"
    assert "bar.sync" not in text, "threads wait for each other"


def test_loads_and_stores_on_amd(tmp_path: Path) -> None:
    shape = {**UNITS["16 bytes"][0], "TILE_UNITS": 512, "PAGE_SHIFT": -1, "GATHER": True}
    text = compiled(tmp_path, ("hip", "gfx942", 64), shape)
    assert any("load_dwordx4" in line for line in text.splitlines())
    assert any("store_dwordx4" in line for line in text.splitlines())
