"""Run the demo: two nodes, two or more workers, one pass without the pool and one with it.

Worker i is at home at node i modulo nodes, as if each node were a machine with engines of its own:
what a worker at one node computed, one at another reads over TCP.

Nothing outlives `run`: the workers have this process at the other end of their stdin, the nodes and
their Redis end with it (`LocalPool`), and all files lie in temporary folders.
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
from collections import Counter
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from tiffin.kvstore import Client, TiffinError
from tiffin.kvstore.errors import NodeUnavailable
from tiffin.kvstore.localpool import LocalPool, LocalPoolOptions
from tiffin.kvstore.sizes import parse_bytes

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
LOOK_S = 0.5  # how soon the death of a node is noticed
STDERR_TAIL_BYTES = 4000


class DemoFailed(Exception):
    """A child process died or stopped answering; the message has the end of its stderr."""


@dataclass(frozen=True, slots=True)
class Options:
    """What the command line chooses."""

    requests: int
    workers: int = 2
    nodes: int = 2
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
    """Everything that was measured. `counters` are the nodes' after the pass with the pool, added
    up; `network` has the blocks, and their bytes with headers, that came over TCP to workers."""

    options: Options
    rows: list[Row] = field(default_factory=list)
    counters: dict[str, int] = field(default_factory=dict)
    network: dict[str, int] = field(default_factory=lambda: {"blocks": 0, "bytes": 0})
    pass_s: dict[str, float] = field(default_factory=dict)
    elapsed_s: float = 0.0


def run(options: Options, console: Console) -> Outcome:
    """Both passes. Raises DemoFailed; shows progress on `console`."""
    outcome, started_s = Outcome(options), time.perf_counter()
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="tiffin-demo-")))
        progress = stack.enter_context(_progress(console))
        preparing = progress.add_task("starting nodes and workers", total=None, hits="")
        pool = stack.enter_context(_pool(options, folder))
        crew = stack.enter_context(_crew(options, folder, pool))
        crew.wait_for_all("ready", START_S)
        progress.remove_task(preparing)
        for name, with_pool in (("without the pool", False), ("with the pool", True)):
            task = progress.add_task(name, total=options.requests, hits="")
            pass_started_s = time.perf_counter()
            outcome.rows += crew.replay(with_pool, progress, task, outcome.network)
            outcome.pass_s[name] = time.perf_counter() - pass_started_s
        outcome.counters = _counters(pool)
    outcome.rows.sort(key=lambda row: (row.pool, row.request))
    outcome.elapsed_s = time.perf_counter() - started_s
    return outcome


def _counters(pool: LocalPool) -> dict[str, int]:
    """All nodes' counters, added up."""
    total: Counter[str] = Counter()
    for index, name in enumerate(pool.names):
        try:
            with Client.open(f"unix:{pool.socket(index)}", name="demo") as client:
                total.update(client.statistics()["counters"])
        except TiffinError as error:
            raise DemoFailed(f"{name} gave no statistics: {error}") from error
    return dict(total)


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
def _pool(options: Options, folder: Path) -> Iterator[LocalPool]:
    """Nodes of our own, with a Redis if there are several."""
    pool = LocalPool(
        LocalPoolOptions(
            nodes=options.nodes,
            dram=options.dram,
            nvme=(folder / "nvme", parse_bytes(options.nvme)),
            redis=options.nodes > 1,
            flush_s=0.0,  # nobody will read it
        )
    )
    try:
        try:
            pool.start(timeout_s=START_S)
        except NodeUnavailable as error:
            raise DemoFailed(str(error)) from error
        yield pool
    finally:
        pool.stop()


@contextlib.contextmanager
def _crew(options: Options, folder: Path, pool: LocalPool) -> Iterator[Crew]:
    children: list[Child] = []
    try:
        for worker in range(options.workers):
            log = folder / f"worker-{worker}.log"
            children.append(Child(["tiffin.bench.demo.worker"], log))
            url = pool.url_at_home(pool.socket(worker % options.nodes))
            job = Job(url, worker, options.workers, options.requests, options.seed, options.size)
            children[-1].send(asdict(job))
        yield Crew(children, pool)
    finally:
        for child in children:
            child.process.terminate()
        for child in children:
            child.stop()


class Crew:
    """The workers, and one queue of what they say and of who died; it watches the nodes too."""

    def __init__(self, children: list[Child], pool: LocalPool) -> None:
        self._children = children
        self._pool = pool
        self._events: queue.Queue[tuple[Child, dict[str, Any] | None]] = queue.Queue()
        for child in children:
            threading.Thread(target=self._listen, args=(child,), daemon=True).start()

    def wait_for_all(self, event: str, timeout_s: float) -> None:
        """Until every worker said `event`; raises DemoFailed if one dies or stays silent."""
        for _ in self._children:
            message = self._next(timeout_s)
            assert event in message

    def replay(
        self, pool: bool, progress: Progress, task: TaskID, network: dict[str, int]
    ) -> list[Row]:
        """One pass of all workers; what came over the network is added to `network`."""
        for child in self._children:
            child.send({"pool": pool})
        rows: list[Row] = []
        working = len(self._children)
        while working:
            message = self._next(STALL_S)
            if "done" in message:
                working -= 1
                for name, amount in message["done"].items():
                    network[name] += amount
                continue
            rows.append(Row(**message))
            progress.update(task, advance=1, hits=_hits_in_words(rows) if pool else "")
        return rows

    def _next(self, timeout_s: float) -> dict[str, Any]:
        deadline = time.monotonic() + timeout_s
        while True:
            try:
                child, message = self._events.get(timeout=LOOK_S)
                break
            except queue.Empty:
                self._look_at_the_nodes()
            if time.monotonic() > deadline:
                raise self._children[0].failed(f"and the others said nothing for {timeout_s} s")
        if message is None:
            raise child.failed("died")
        return message

    def _look_at_the_nodes(self) -> None:
        for happening in self._pool.look():
            if happening.kind == "ended":
                last = "\n".join(happening.lines)
                raise DemoFailed(f"{happening.name} {happening.words}; its last words:\n{last}")

    def _listen(self, child: Child) -> None:
        assert child.process.stdout is not None
        with contextlib.suppress(ValueError, OSError):  # closed or cut in the middle of a line
            for line in child.process.stdout:
                self._events.put((child, json.loads(line)))
        self._events.put((child, None))


def _hits_in_words(rows: Sequence[Row]) -> str:
    found = sum(row.hit_tokens for row in rows)
    return f"{found / sum(row.prompt_tokens for row in rows):.0%} of the tokens found"
