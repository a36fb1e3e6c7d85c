"""The pieces of the first run on a GPU, most telling first, each in a process of its own with a
time limit. See `first_run.sh`, which calls this."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[2]
# `-m ""`: those marked `full` too.
_TESTS = (
    "-m",
    "pytest",
    "-q",
    "-m",
    "",
    "-p",
    "no:cacheprovider",
    "--import-mode=importlib",
    "-rs",
)
NO_GPU = "no GPU"
_BENCH = ("tests/gpu/benchmarks.py", "bench")


class Piece(NamedTuple):
    """`arguments` of Python, and `tests`, ids of pytest. All limits together: eight minutes.
    What `needs_gpu` proves nothing without one: it runs there too, and counts as skipped."""

    name: str
    limit_s: int
    arguments: tuple[str, ...]
    tests: tuple[str, ...] = ()
    needs_gpu: bool = False


PIECES = (
    Piece("driver", 20, ("tests/gpu/driver.py",), needs_gpu=True),
    Piece(
        "copies",
        60,
        _TESTS,
        (
            "tests/messenger/gpu/test_copier.py::test_a_gpu_moves_what_it_should",
            "tests/messenger/gpu/test_device_region.py::test_another_process_reads_and_writes",
            "tests/kvstore/hbm/test_store.py::test_the_pools_memory_is_pinned_while_the_store_is_open",
            "tests/kvstore/hbm/test_store.py::test_a_round_trip_through_the_pool",
        ),
        needs_gpu=True,
    ),
    Piece(
        "kernels",
        100,
        _TESTS,
        (
            "tests/kernels/test_ranges.py::test_ranges_longer_than_a_chunk",
            "tests/kernels/test_checksum.py::test_segments_of_every_kind_in_one_call",
            "tests/kernels/test_paged.py::test_blocks_of_whole_pages",
            "tests/kernels/test_reshard.py::test_from_p_ranks_to_d_and_back",
            "tests/kernels/test_quant.py::test_a_window_of_a_block",
        ),
    ),
    Piece("transformers", 110, ("tests/gpu/llama.py",)),
    Piece("bench-kernels", 120, (*_BENCH, "kernels", "--quick", "--json")),
    Piece("bench-hbm", 70, (*_BENCH, "hbm", "--quick", "--json")),
)


def result(piece: Piece, code: int | str, *, gpu: bool) -> str:
    """`passed`, `failed` or `skipped`, of a piece that ended with `code`."""
    if code != 0:
        return "failed"
    return "passed" if gpu or not piece.needs_gpu else "skipped"


def run(piece: Piece, out: Path, *, gpu: bool) -> dict[str, Any]:
    """Run a piece; its line. Its figures are its last line of output, in JSON, or
    a benchmark's report."""
    arguments = [*piece.arguments, *piece.tests]
    if piece.name.startswith("bench"):
        arguments += ["--out", str(out / piece.name)]
    shutil.rmtree(out / piece.name, ignore_errors=True)  # the report of an earlier run
    log, began = out / f"{piece.name}.log", time.monotonic()
    with log.open("wb") as said:
        try:
            code: int | str = subprocess.run(
                [sys.executable, *arguments],
                cwd=ROOT,
                stdout=said,
                stderr=subprocess.STDOUT,
                timeout=piece.limit_s,
                check=False,
            ).returncode
        except subprocess.TimeoutExpired:
            code = f"more than {piece.limit_s} s"
    lines = log.read_text(errors="replace").splitlines() or [""]
    seconds = round(time.monotonic() - began, 1)
    ended = result(piece, code, gpu=gpu)
    line = {"piece": piece.name, "result": ended, "exit": code, "seconds": seconds}
    report = next((out / piece.name).glob("*.json"), None)  # of a benchmark
    try:
        figures = json.loads(report.read_text() if report else lines[-1])
    except ValueError:
        figures = lines[-1][-300:]
    return {**line, "said": figures}


def machine() -> dict[str, str]:
    """The card and the versions."""
    import torch

    found = {"python": sys.version.split()[0], "torch": torch.__version__}
    for name in ("triton", "transformers"):
        try:
            found[name] = __import__(name).__version__
        except ImportError:
            found[name] = "missing"
    card = torch.cuda.get_device_name() if torch.cuda.is_available() else NO_GPU
    return {"card": card, **found}


def main() -> int:
    out = Path(os.environ.get("OUT", "out/gpu")).resolve()
    out.mkdir(parents=True, exist_ok=True)
    known, passed = machine(), True
    with (out / "first_run.jsonl").open("w") as lines:
        for piece in PIECES:
            line = {**run(piece, out, gpu=known["card"] != NO_GPU), **known}
            passed &= line["result"] != "failed"
            text = json.dumps(line)
            lines.write(text + "\n")
            lines.flush()
            print(text, flush=True)
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
