"""The kernels compiled for GPUs, each by its own launcher; this needs no GPU.

The tests check the width of loads and stores, spills and recompilation. Whether the code runs can
be tested only on a GPU.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("triton")
pytestmark = pytest.mark.slow  # a quarter of a minute, all of it in compilers

if TYPE_CHECKING:
    from collections.abc import Callable

Compiled = dict[tuple[str, str], dict[str, Any]]

# Case: (loads, stores) on sm_90: the width of most of them, and how many of that width a thread has
# at least. Fewer means that the accesses are narrower than intended.
WIDE = {
    "gather 16": ("v2.b64", 4, "v2.b64", 4),
    "gather 8": ("b64", 8, "b64", 8),
    "gather 2": ("b16", 16, "b16", 16),
    "gather pages of 48": ("v2.b64", 4, "v2.b64", 4),
    "scatter 16": ("v2.b64", 4, "v2.b64", 4),
    "scatter 2": ("b16", 16, "b16", 16),
    "reshard 16": ("v2.b64", 4, "v2.b64", 4),
    "quantise e4m3": ("v4.b32", 4, "v4.b32", 2),
    # One scale of 4 bytes behind each head's rows: the next head begins at a multiple of 4 only.
    "quantise int8": ("v4.b32", 8, "b32", 9),
    "dequantise e4m3": ("b32", 8, "v4.b32", 4),
    "dequantise int8": ("v4.b32", 2, "v4.b32", 4),
    "checksum 16": ("v2.b64", 16, "b64", 1),
    "checksum 8": ("b64", 32, "b64", 1),
    "checksum 1": ("b64", 64, "b64", 1),
    "ranges 16": ("v2.b64", 4, "v2.b64", 4),
    "ranges 8": ("b64", 8, "b64", 8),
    "ranges 1": ("b8", 64, "b8", 64),
}


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Compiled:
    """The output of compiling.py, by target and case; warnings are errors there."""
    environment = os.environ | {
        "TRITON_INTERPRET": "0",
        "TRITON_CACHE_DIR": str(tmp_path_factory.mktemp("triton")),
    }
    environment.pop("TRITON_DEFAULT_FP_FUSION", None)
    worker = Path(__file__).with_name("compiling.py")
    done = subprocess.run(
        [sys.executable, str(worker)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return {(one["target"], one["case"]): one for one in json.loads(done.stdout)}


def widths(text: str, verb: str) -> list[str]:
    """The width of each load (ld) or store (st) of global memory in PTX: `v2.b64` is 16 bytes."""
    return re.findall(rf"\b{verb}\.global\S*?\.((?:v\d\.)?b\d+)\b", text)


def of_kernels(compiled: Compiled, chosen: Callable[[str, str], bool]) -> dict[str, str]:
    found = {
        f"{target} {case}": one["text"]
        for (target, case), one in compiled.items()
        if chosen(target, one["kernel"])
    }
    assert found
    return found


def test_every_case_was_compiled(compiled: Compiled) -> None:
    assert {case for target, case in compiled if target == "sm_90"} == set(WIDE)
    assert {target for target, _ in compiled} == {"sm_90", "sm_80", "gfx942"}


def test_other_sizes_compile_nothing_anew(compiled: Compiled) -> None:
    """Numbers of layers, pages, blocks and ranges (1 and 16 among them) differ from call to call,
    and must not cost seconds of compiling each."""
    anew = {key: one["compiled_anew"] for key, one in compiled.items() if one["compiled_anew"]}
    assert not anew


def test_registers_are_enough(compiled: Compiled) -> None:
    spilled = {key: one["stack_bytes"] for key, one in compiled.items() if one["stack_bytes"]}
    assert not spilled


@pytest.mark.parametrize("case", WIDE)
def test_loads_and_stores_are_as_wide_as_can_be(compiled: Compiled, case: str) -> None:
    load, loads, store, stores = WIDE[case]
    for target in ("sm_90", "sm_80"):
        if (target, case) in compiled:
            text = compiled[target, case]["text"]
            assert widths(text, "ld").count(load) >= loads, target
            assert widths(text, "st").count(store) >= stores, target
            # Of quantised blocks the scales are stored as well.
            narrower = [width for width in widths(text, "st") if width != store]
            assert not narrower or narrower == ["b32"], target


def test_pages_are_moved_with_no_thread_waiting_for_another(compiled: Compiled) -> None:
    for name, text in of_kernels(
        compiled,
        lambda target, kernel: target != "gfx942" and kernel in ("move_lanes", "copy_rows"),
    ).items():
        assert "bar.sync" not in text, name


def test_amd_has_wide_loads_and_stores(compiled: Compiled) -> None:
    for name, text in of_kernels(compiled, lambda target, kernel: target == "gfx942").items():
        assert re.search(r"_load_dwordx4\b", text), name
        assert "checksum" in name or re.search(r"_store_dwordx4\b", text), name


def test_quantised_numbers_are_rounded_as_is_meant(compiled: Compiled) -> None:
    for name, text in of_kernels(
        compiled, lambda target, kernel: target != "gfx942" and kernel.endswith("quantise_pages")
    ).items():
        assert not re.search(r"\bfma\.|\.ftz\b|div\.(full|approx)", text), name
    assert "div.rn.f32" in compiled["sm_80", "quantise e4m3"]["text"]
    assert "cvt.rn.satfinite.e4m3x2.f32" in compiled["sm_90", "quantise e4m3"]["text"]
    assert "e4m3" not in compiled["sm_80", "quantise e4m3"]["text"]
