"""Run the demo: a node, two or more workers, one pass without the pool and one with it.

Nothing outlives `run`: every child has this process at the other end of its stdin, and the node's
memory, its slab file and the workers' stderr lie in one temporary directory.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from tiffin.kvstore import Client, TiffinError

from .model import FULL, QUICK, ModelSize
from .trace import load_slice
from .worker import Job, Row

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from rich.console import Console
    from rich.progress import TaskID

START_S = 120.0  # two processes that import torch on a busy machine
STOP_S = 10.0
STALL_S = 120.0  # the longest that one request may take
STDERR_TAIL_BYTES = 4000


class DemoFailed(Exception):
    """A child process died or stopped answering; the message has the end of its stderr."""


@dataclass(frozen=True, slots=True)
class Options:
    """What the command line chooses."""

    requests: int
    workers: int = 2
    seed: int = 0
    dram: str = "32MiB"
    nvme: str = "512MiB"
    size: ModelSize = FULL

    @classmethod
    def quick(cls, **changes: Any) -> Options:
        """Half a minute, for tests: fewer requests, fewer layers, a pool that is as tight."""
        defaults = {"requests": 24, "dram": "8MiB", "nvme": "128MiB", "size": QUICK}
        return cls(**{**defaults, **{k: v for k, v in changes.items() if v is not None}})

    @classmethod
    def full(cls, **changes: Any) -> Options:
        """The whole slice."""
        chosen = {k: v for k, v in changes.items() if v is not None}
        return cls(**{"requests": len(load_slice()), **chosen})


@dataclass(slots=True)
class Outcome:
    """Everything that was measured. `counters` are the node's after the pass with the pool."""

    options: Options
    rows: list[Row] = field(default_factory=list)
    counters: dict[str, int] = field(default_factory=dict)
    pass_s: dict[str, float] = field(default_factory=dict)
    elapsed_s: float = 0.0


def run(options: Options, console: Console) -> Outcome:
    """Both passes. Raises DemoFailed; shows progress on `console`."""
    outcome, started_s = Outcome(options), time.perf_counter()
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="tiffin-demo-")))
        progress = stack.enter_context(_progress(console))
        preparing = progress.add_task("starting a node and the workers", total=None, hits="")
        node, url = stack.enter_context(_node(options, folder))
        crew = stack.enter_context(_crew(options, folder, node, url))
        crew.wait_for_all("ready", START_S)
        progress.remove_task(preparing)
        for name, pool in (("without the pool", False), ("with the pool", True)):
            task = progress.add_task(name, total=options.requests, hits="")
            pass_started_s = time.perf_counter()
            outcome.rows += crew.replay(pool, progress, task)
            outcome.pass_s[name] = time.perf_counter() - pass_started_s
        outcome.counters = _counters(node, url)
    outcome.rows.sort(key=lambda row: (row.pool, row.request))
    outcome.elapsed_s = time.perf_counter() - started_s
    return outcome


def _counters(node: Child, url: str) -> dict[str, int]:
    try:
        with Client.open(url, name="demo") as client:
            counters: dict[str, int] = client.statistics()["counters"]
            return counters
    except TiffinError as error:
        raise node.failed(f"gave no statistics ({error})") from error


def _progress(console: Console) -> Progress:
    return Progress(
        TextColumn("{task.description:32}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.fields[hits]}"),
        console=console,
    )


class Child:
    """A process of ours that ends when its stdin does, or when asked, or when killed."""

    def __init__(self, arguments: Sequence[str], stderr: Path) -> None:
        self._stderr = stderr
        with stderr.open("wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", *arguments],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                env={
                    **os.environ,
                    "OMP_NUM_THREADS": "1",
                    "TORCHINDUCTOR_CACHE_DIR": str(stderr.parent / "inductor"),
                },
                # Ctrl-C is for the demo, which then stops its children in order.
                start_new_session=True,
            )

    def send(self, message: dict[str, Any]) -> None:
        """One JSON line. Raises DemoFailed if nobody reads it any more."""
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(json.dumps(message) + "\n")
            self.process.stdin.flush()
        except OSError as error:
            raise self.failed("stopped reading") from error

    def failed(self, what: str) -> DemoFailed:
        """The error to raise, with what the process said last."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(1.0)
        code = self.process.poll()
        state = "is still running" if code is None else f"ended with status {code}"
        tail = self._stderr.read_bytes()[-STDERR_TAIL_BYTES:].decode(errors="replace")
        return DemoFailed(f"{self._stderr.stem} {what} and {state}; its last words:\n{tail}")

    def stop(self) -> None:
        """End it and collect it."""
        self.process.terminate()
        try:
            self.process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                with contextlib.suppress(OSError):
                    pipe.close()


@contextlib.contextmanager
def _node(options: Options, folder: Path) -> Iterator[tuple[Child, str]]:
    """A daemon of our own, and its URL."""
    path, slab = folder / "node.sock", folder / "nvme"
    slab.mkdir()
    command = ["tiffin.bench.demo.daemon", "node", "--socket", str(path), "--name", "demo"]
    tiers = ["--dram", options.dram, "--nvme", f"{slab}:{options.nvme}"]
    child = Child([*command, *tiers], folder / "node.log")
    try:
        deadline = time.monotonic() + START_S
        while not path.exists():
            if child.process.poll() is not None or time.monotonic() > deadline:
                raise child.failed("did not start")
            time.sleep(0.05)
        yield child, f"unix:{path}"
    finally:
        child.stop()


@contextlib.contextmanager
def _crew(options: Options, folder: Path, node: Child, url: str) -> Iterator[Crew]:
    children: list[Child] = []
    try:
        for worker in range(options.workers):
            log = folder / f"worker-{worker}.log"
            children.append(Child(["tiffin.bench.demo.worker"], log))
            job = Job(url, worker, options.workers, options.requests, options.seed, options.size)
            children[-1].send(asdict(job))
        yield Crew(children, node)
    finally:
        for child in children:
            child.process.terminate()
        for child in children:
            child.stop()


class Crew:
    """The workers, and one queue of what they say and of who died, the node included."""

    def __init__(self, children: list[Child], node: Child) -> None:
        self._children = children
        self._events: queue.Queue[tuple[Child, dict[str, Any] | None]] = queue.Queue()
        for child in (*children, node):
            threading.Thread(target=self._listen, args=(child,), daemon=True).start()

    def wait_for_all(self, event: str, timeout_s: float) -> None:
        """Until every worker said `event`; raises DemoFailed if one dies or stays silent."""
        for _ in self._children:
            message = self._next(timeout_s)
            assert event in message

    def replay(self, pool: bool, progress: Progress, task: TaskID) -> list[Row]:
        """One pass of all workers."""
        for child in self._children:
            child.send({"pool": pool})
        rows: list[Row] = []
        working = len(self._children)
        while working:
            message = self._next(STALL_S)
            if "done" in message:
                working -= 1
                continue
            rows.append(Row(**message))
            progress.update(task, advance=1, hits=_hits_in_words(rows) if pool else "")
        return rows

    def _next(self, timeout_s: float) -> dict[str, Any]:
        try:
            child, message = self._events.get(timeout=timeout_s)
        except queue.Empty:
            raise self._children[0].failed(
                f"and the others said nothing for {timeout_s} s"
            ) from None
        if message is None:
            raise child.failed("died")
        return message

    def _listen(self, child: Child) -> None:
        assert child.process.stdout is not None
        with contextlib.suppress(ValueError, OSError):  # closed or cut in the middle of a line
            for line in child.process.stdout:
                self._events.put((child, json.loads(line)))
        self._events.put((child, None))


def _hits_in_words(rows: Sequence[Row]) -> str:
    found = sum(row.hit_tokens for row in rows)
    return f"{found / sum(row.prompt_tokens for row in rows):.0%} of the tokens found"
