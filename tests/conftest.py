"""For every test: shared helpers can be imported, and Hypothesis has one profile."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import os
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import HealthCheck, settings

if TYPE_CHECKING:
    from collections.abc import Iterator

# `--import-mode=importlib` puts no folder on the path. Helpers of the store's tests live in
# tests/kvstore/kvsupport.py, a module name that is used nowhere else.
sys.path.insert(0, str(Path(__file__).parent / "kvstore"))

# Without a GPU, kernels run in Triton's interpreter, which is chosen when Triton is imported.
if not any(os.path.exists(device) for device in ("/dev/nvidiactl", "/dev/kfd")):
    os.environ.setdefault("TRITON_INTERPRET", "1")

# Models and matrices of these tests are small: with a thread per core, most of the time would go
# into starting and waiting for each other. Read when torch and NumPy are imported, here and in
# processes of the tests.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# Where tests run in the background of a script, interrupts are ignored, and so would the processes
# that they start and interrupt.
signal.signal(signal.SIGINT, signal.default_int_handler)

# Tests set the width of a console themselves. The environment may have it already (pytest-xdist
# exports it for its workers), and a console that is created then keeps that width.
for variable in ("COLUMNS", "LINES"):
    os.environ.pop(variable, None)

# No deadline: a shared machine with two cores is slow at times. pytest-timeout ends hung tests.
settings.register_profile(
    "explore", deadline=None, print_blob=True, suppress_health_check=[HealthCheck.too_slow]
)
# The same examples in every run. `make test-all` looks for others (--hypothesis-profile=explore).
settings.register_profile(
    "fixed", settings.get_profile("explore"), derandomize=True, max_examples=30, database=None
)
settings.load_profile("fixed")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--skipped-to",
        metavar="FILE",
        help="write the names of tests that were skipped, a line each: `pytest @FILE` runs them, "
        "on a machine that has more",
    )


def pytest_configure(config: pytest.Config) -> None:
    # With pytest-xdist, workers report to the process that started them; it writes.
    if config.getoption("skipped_to") and not hasattr(config, "workerinput"):
        config.pluginmanager.register(_Skipped(Path(config.getoption("skipped_to"))))


class _Skipped:
    """Records which tests, and which whole files, were skipped."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._names: dict[str, None] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._note(report)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        self._note(report)

    def _note(self, report: pytest.TestReport | pytest.CollectReport) -> None:
        # Tests that are expected to fail are reported as skipped too.
        if report.skipped and not hasattr(report, "wasxfail"):
            self._names[report.nodeid] = None

    def pytest_sessionfinish(self) -> None:
        self._file.parent.mkdir(parents=True, exist_ok=True)
        self._file.write_text("".join(f"{name}\n" for name in self._names), encoding="utf-8")


def pytest_collection_finish() -> None:
    """Modules live until the end: keep the garbage collector from scanning them repeatedly."""
    gc.collect()
    gc.freeze()


# By process id, the test during which it was first seen.
_children: dict[int, str] = {}
# Python's own, which end with this process.
_STAYS = (b"multiprocessing.resource_tracker", b"multiprocessing.forkserver")


def _running() -> set[int]:
    """The processes that this one has started and that run."""
    found: set[int] = set()
    for thread in Path("/proc/self/task").iterdir():
        with contextlib.suppress(OSError):  # it has ended
            found.update(map(int, (thread / "children").read_bytes().split()))
    return found


@pytest.hookimpl(trylast=True)
def pytest_runtest_logfinish(nodeid: str) -> None:
    for process in _running():
        _children.setdefault(process, nodeid)


@pytest.fixture(scope="session", autouse=True)
def nothing_is_left_running() -> Iterator[None]:
    """The tests' processes end with them. It is torn down last, after all that tests share."""
    yield
    left = []
    for process in _running():
        with contextlib.suppress(OSError):
            command = Path(f"/proc/{process}/cmdline").read_bytes()  # nothing, if it has ended
            if command and not any(name in command for name in _STAYS):
                os.kill(process, signal.SIGKILL)
                shown = command.replace(b"\0", b" ").decode(errors="replace")
                left.append(f"{_children.get(process, 'the last test')} left {process}: {shown}")
    # vLLM's own processes end some time after its engines.
    assert not left or "vllm" in sys.modules, "\n".join(left)


def pytest_unconfigure() -> None:
    gc.unfreeze()


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Triton's interpreter follows each sum and product of 32 bits by one of 64, to see whether it
    overflowed: half of its time. Slow tests ask for that."""
    interpreter = sys.modules.get("triton.runtime.interpreter")
    if interpreter is not None:
        builder = interpreter.interpreter_builder
        checked = item.get_closest_marker("slow") is not None
        builder.options = dataclasses.replace(builder.options, sanitize_overflow=checked)
