"""The pieces of the first run on a GPU, most telling first, each in a process of its own with a
time limit. See `first_run.sh`, which calls this."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import platform
import shutil
import signal
import subprocess
import sys
import time
import zipfile
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[2]
WHEELS = ROOT / "tests" / "gpu" / "wheels"
WHEELS_FOR = (3, 12), "x86_64"  # as in collect_wheels.sh
HERE = sys.version_info[:2], platform.machine()
PACKAGES = ROOT / "build" / "gpu-packages"
# `-m ""`: those marked `slow` too.
_TESTS = ("-m", "pytest", "-vrs", "-m", "", "--tb=short", "-p", "no:cacheprovider")
NO_GPU = "no GPU"
_BENCH = ("tests/gpu/benchmarks.py", "bench")
_ABORT_S = 5.0  # for the stacks of a piece that is late
_TAIL_CHARS = 2000  # of what a failed piece said; all of it is in the log


class Piece(NamedTuple):
    """`arguments` of Python, and `tests`, ids of pytest. What a piece leaves of its limit is added
    to the next one's. What `needs_gpu` proves nothing without one: it runs there too, and counts as
    skipped."""

    name: str
    limit_s: int
    arguments: tuple[str, ...]
    tests: tuple[str, ...] = ()
    needs_gpu: bool = False


PIECES = (
    Piece("driver", 50, ("tests/gpu/driver.py",), needs_gpu=True),
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
        90,
        _TESTS,
        (
            "tests/kernels/test_ranges.py::test_ranges_longer_than_a_chunk",
            "tests/kernels/test_checksum.py::test_segments_of_every_kind_in_one_call",
            "tests/kernels/test_paged.py::test_blocks_of_whole_pages",
            "tests/kernels/test_reshard.py::test_from_p_ranks_to_d_and_back",
            "tests/kernels/test_quant.py::test_a_window_of_a_block",
        ),
    ),
    Piece("transformers", 90, ("tests/gpu/llama.py",)),
    Piece("bench-kernels", 110, (*_BENCH, "kernels", "--quick")),
    Piece("bench-hbm", 70, (*_BENCH, "hbm", "--quick")),
)


def unpack(wheels: Path, packages: Path) -> None:
    """Unpack into `packages` what this Python lacks; what it has, it keeps."""
    shutil.rmtree(packages, ignore_errors=True)
    for wheel in sorted(wheels.glob("*.whl")):
        try:
            metadata.version(wheel.name.partition("-")[0])
        except metadata.PackageNotFoundError:
            with zipfile.ZipFile(wheel) as packed:
                packed.extractall(packages)
    if packages.exists() and HERE != WHEELS_FOR:
        sys.exit(f"tests/gpu/wheels are for Python 3.12 on x86_64, not {HERE}: install them here")
    if not packages.exists() and importlib.util.find_spec("msgspec") is None:
        sys.exit("no msgspec here, and no wheels: run tests/gpu/collect_wheels.sh, with a network")


def result(piece: Piece, code: int | str, *, gpu: bool) -> str:
    """`passed`, `failed` or `skipped`, of a piece that ended with `code`."""
    if code != 0:
        return "failed"
    return "passed" if gpu or not piece.needs_gpu else "skipped"


def run(piece: Piece, out: Path, limit_s: float) -> dict[str, Any]:
    """Run a piece; its line. `said`: the last JSON that it printed, or the rows of a benchmark's
    report, which is written measurement by measurement, or else its last line."""
    arguments = [*piece.arguments, *piece.tests]
    report = out / f"{piece.name}.json"
    report.unlink(missing_ok=True)  # of an earlier run
    if piece.name.startswith("bench"):
        arguments += ["--out", str(out)]
    with (out / "first_run.log").open("ab+") as log:
        log.write(f"\n== {piece.name}\n".encode())
        log.flush()
        began, at = time.monotonic(), log.tell()
        code = _run(arguments, log, limit_s)
        log.seek(at)
        said = log.read().decode(errors="replace")
    seconds = round(time.monotonic() - began, 1)
    figures = _figures(said)
    with contextlib.suppress(OSError, ValueError):
        figures = {row["name"]: _brief(row) for row in json.loads(report.read_text())["rows"]}
    line = {"piece": piece.name, "exit": code, "seconds": seconds, "said": figures}
    return line if code == 0 else {**line, "tail": said[-_TAIL_CHARS:]}


def _run(arguments: list[str], log: Any, limit_s: float) -> int | str:
    """The exit status of Python with these arguments, or that it took too long. Not
    `subprocess.run`, which waits for ever for a process that hangs in a driver."""
    process = subprocess.Popen(
        [sys.executable, *arguments], cwd=ROOT, stdout=log, stderr=subprocess.STDOUT
    )
    try:
        return process.wait(limit_s)
    except subprocess.TimeoutExpired:
        for ending in (signal.SIGABRT, signal.SIGKILL):  # first its stacks (faulthandler)
            process.send_signal(ending)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_ABORT_S)
        return f"more than {limit_s:.0f} s"


def _figures(said: str) -> Any:
    lines = said.splitlines() or [""]
    for line in reversed(lines):
        if line.startswith("{"):
            with contextlib.suppress(ValueError):
                return json.loads(line)
    return lines[-1]


def _brief(row: dict[str, Any]) -> str:
    return f"{row['value']['p50']:.4g} {row['unit']}, {row['ratio']:.2f} of the limit"


def main() -> int:
    out = Path(os.environ.get("OUT", "out/gpu")).resolve()
    out.mkdir(parents=True, exist_ok=True)
    unpack(WHEELS, PACKAGES)
    paths = [str(ROOT / "build" / "links"), str(PACKAGES), os.environ.get("PYTHONPATH", "")]
    os.environ |= {
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        "HF_HUB_OFFLINE": "1",
        "PYTHONUNBUFFERED": "1",  # of a piece that is aborted, everything it said
        "PYTHONFAULTHANDLER": "1",
    }
    (out / "first_run.log").unlink(missing_ok=True)
    card, passed, ends = "unknown", True, time.monotonic()
    with (out / "first_run.jsonl").open("w") as lines:
        for piece in PIECES:
            ends += piece.limit_s
            line = run(piece, out, ends - time.monotonic())
            if piece.name == "driver" and isinstance(line["said"], dict):
                card = line["said"]["card"]
            ended = result(piece, line["exit"], gpu=card != NO_GPU)
            passed &= ended != "failed"
            text = json.dumps({"result": ended, "card": card, **line})
            lines.write(text + "\n")
            lines.flush()
            print(text, flush=True)
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
