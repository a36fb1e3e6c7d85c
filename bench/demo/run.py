"""Run the demo: the trace without and with the pool and a conductor, then an overload.

Prefill worker i and decode worker i are at home at node i modulo nodes, as if each node were a
machine with its own engines: blocks computed at one node are read over TCP at another.

Nothing outlives `run`: this process holds the other end of the workers' stdin, the nodes, their
Redis and the conductor end with it (kvstore/cli/local/tether.py), and all files are in temporary
folders.
"""

from __future__ import annotations

import contextlib
import tempfile
import time
from collections import Counter
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from tiffin.conductor.client import ConductorClient
from tiffin.conductor.errors import ConductorError
from tiffin.conductor.wire.schema_text import parse_schema
from tiffin.kvstore import Client, TiffinError
from tiffin.kvstore.cli.local.local_pool import LocalPool, LocalPoolOptions
from tiffin.kvstore.errors import NodeUnavailable
from tiffin.kvstore.sizes import parse_bytes

from ..demo import overload
from ..serving.conducting import PROFILE, conductor, fitted
from ..serving.errors import ProcessFailed
from .engines.children import Crew, EngineProcess
from .engines.model import FULL, QUICK, VOCAB, ModelSize
from .engines.trace import load_slice, tokens_of
from .engines.worker import Job, Membership
from .router import DemoPrompt, Router, ServedRequest

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from rich.console import Console

    from tiffin.conductor.cost.latency_profiles import Profile
    from tiffin.conductor.wire.models import EntryReply

    from ..serving.conducting import ConductorProcess

START_S = 120.0  # four processes that import torch on a busy machine
STALL_S = 120.0  # the longest that one request may take
LOG_MAX = 1000  # decisions in one answer of the conductor
CANDIDATES = 8

# A multiple of the p90 without the pool: enough for every prompt on an idle machine.
OBJECTIVE_OF_P90 = 2.0


@dataclass(frozen=True, slots=True)
class Options:
    """Options of the command line. `workers` is the number of prefill workers, and of decode
    workers. `overload_s`: how long requests arrive; None is by `overload.LASTS_OBJECTIVES`.
    `record`: the conductor's recording."""

    requests: int
    workers: int = 2
    nodes: int = 2
    seed: int = 0
    dram: str = "32MiB"
    nvme: str = "512MiB"
    overload_s: float | None = None
    size: ModelSize = FULL
    record: str = ""

    @classmethod
    def quick(cls, **changes: Any) -> Options:
        """Half a minute, for tests: fewer requests, fewer layers, a pool that is as tight."""
        defaults = {
            "requests": 24, "dram": "8MiB", "nvme": "128MiB", "overload_s": 3.0, "size": QUICK,
        }  # fmt: skip
        return cls(**{**defaults, **{k: v for k, v in changes.items() if v is not None}})

    @classmethod
    def full(cls, **changes: Any) -> Options:
        """The whole slice."""
        chosen = {k: v for k, v in changes.items() if v is not None}
        return cls(**{"requests": len(load_slice()), **chosen})


@dataclass(frozen=True, slots=True)
class Alone:
    """One request that a single process answered, without pool and conductor."""

    request: int
    worker: str
    prompt_tokens: int
    ttft_s: float
    tokens: list[int]


@dataclass(slots=True)
class DemoOutcome:
    """All measurements. `counters`: sums over the nodes after the conducted pass. `network`: the
    blocks, and their bytes with headers, that the workers of each role read over TCP. `decisions`:
    the conductor's log, by request."""

    options: Options
    alone: list[Alone] = field(default_factory=list)
    conducted: list[ServedRequest] = field(default_factory=list)
    overload: list[overload.Pass] = field(default_factory=list)
    decisions: dict[str, EntryReply] = field(default_factory=dict)
    profile: Profile | None = None
    ttft_objective_s: float = 0.0
    overload_rate_s: float = 0.0
    counters: dict[str, int] = field(default_factory=dict)
    network: dict[str, dict[str, int]] = field(default_factory=dict)
    pool_failures: int = 0
    pass_s: dict[str, float] = field(default_factory=dict)
    elapsed_s: float = 0.0


def run(options: Options, console: Console) -> DemoOutcome:
    """Run the whole demo, with progress on `console`. Raises ProcessFailed."""
    outcome, started_s = DemoOutcome(options), time.perf_counter()
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="tiffin-demo-")))
        demo = _Demo(options, outcome, stack, folder, stack.enter_context(shown_progress(console)))
        try:
            demo.run()
        except ConductorError as error:
            demo.look()  # if the conductor has ended, raises an error that says how
            raise ProcessFailed(f"the conductor failed: {type(error).__name__}: {error}") from error
    outcome.alone.sort(key=lambda one: one.request)
    outcome.conducted.sort(key=lambda one: one.request)
    outcome.elapsed_s = time.perf_counter() - started_s
    return outcome


class _Demo:
    """The phases, one after the other. Everything that they start is ended by `stack`."""

    def __init__(
        self,
        options: Options,
        outcome: DemoOutcome,
        stack: contextlib.ExitStack,
        folder: Path,
        progress: Progress,
    ) -> None:
        self._options, self._outcome = options, outcome
        self._stack, self._folder, self._progress = stack, folder, progress
        self._conductor: ConductorProcess | None = None
        self._names = {
            role: [f"{role}-{number}" for number in range(1, options.workers + 1)]
            for role in ("prefill", "decode")
        }

    def run(self) -> None:
        """All phases. Raises ProcessFailed, ConductorError."""
        with self._shown("starting nodes and engines"):
            self._pool = self._stack.enter_context(_pool(self._options, self._folder))
            children = self._stack.enter_context(self._children())
            self._crew = Crew(children, self.look)
            self._crew.wait_for("ready", list(self._crew.children), START_S)
        self._alone()
        with self._shown("measuring, starting the conductor"):
            self._start_conductor()
        self._conduct()
        self._overload()
        for entry in self._client.decisions(LOG_MAX, candidates=CANDIDATES):
            self._outcome.decisions[entry.request_id] = entry
        self._outcome.pool_failures = sum(self._router.failures.values())

    # -- phases ------------------------------------------------------------------------------------

    def _alone(self) -> None:
        """Each prefill worker answers its share of the requests, without pool and conductor."""
        options, names = self._options, self._names["prefill"]
        task = self._progress.add_task("without the pool", total=options.requests, note="")
        started_s = time.perf_counter()
        for number, name in enumerate(names):
            share = list(range(number, options.requests, options.workers))
            self._crew.send(name, {"alone": share})
        working = len(names)
        while working:
            _, message = self._crew.next(STALL_S)
            if "done" in message:
                working -= 1
            else:
                self._outcome.alone.append(Alone(**message["alone"]))
                self._progress.update(task, advance=1)
        self._outcome.pass_s["without the pool"] = time.perf_counter() - started_s

    def _start_conductor(self) -> None:
        """Start the conductor with a profile of this machine; then all workers join."""
        measured = {
            role: self._crew.ask(names, {"measure": role}, STALL_S)
            for role, names in self._names.items()
        }
        prefill, decode = (
            [row for rows in measured[role] for row in rows] for role in ("prefill", "decode")
        )
        profile = self._outcome.profile = fitted(prefill, decode)
        record = Path(self._options.record) if self._options.record else None
        self._conductor = self._stack.enter_context(
            conductor(self._pool, profile, self._folder, START_S, record)
        )
        url, pool = self._conductor.url, self._pool
        for names in self._names.values():
            for number, name in enumerate(names):
                node = number % self._options.nodes
                home = pool.url_at_home(pool.socket(node))
                membership = Membership(home, pool.names[node], url, PROFILE)
                self._crew.send(name, {"join": asdict(membership)})
        schemas = self._crew.wait_for("done", list(self._crew.children), STALL_S)
        self._client = self._stack.enter_context(ConductorClient(url))
        schema = parse_schema(next(iter(schemas.values())))
        self._router = Router(self._crew, self._client, schema)

    def _conduct(self) -> None:
        """The same requests, prefilled and decoded where the conductor says."""
        options, outcome = self._options, self._outcome
        requests = load_slice()[: options.requests]
        prompts = [
            DemoPrompt(index, tokens_of(request, seed=options.seed, vocab=VOCAB).tolist())
            for index, request in enumerate(requests)
        ]
        outcome.ttft_objective_s = objective_s([one.ttft_s for one in outcome.alone])
        task = self._progress.add_task("with pool and conductor", total=len(prompts), note="")
        found: Counter[str] = Counter()

        def ended(served: ServedRequest) -> None:
            found.update(hit=served.hit_tokens, all=served.prompt_tokens)
            share = found["hit"] / found["all"]
            self._progress.update(task, advance=1, note=f"{share:.0%} of the tokens found")

        started_s = time.perf_counter()
        outcome.conducted = self._router.replay(
            "chat",
            prompts,
            clients=options.workers,
            ttft_s=outcome.ttft_objective_s,
            ended=ended,
        )
        outcome.pass_s["with the pool"] = time.perf_counter() - started_s
        try:
            outcome.counters = _counters(self._pool)
        except ProcessFailed:
            self.look()  # an error about a node that died is better than one about no answer
            raise
        for role, names in self._names.items():
            said = self._crew.ask(names, {"network": None}, STALL_S)
            outcome.network[role] = {n: sum(one[n] for one in said) for n in ("blocks", "bytes")}

    def _overload(self) -> None:
        """More requests than the workers can serve, in both modes of admission."""
        options, outcome = self._options, self._outcome
        assert self._conductor is not None
        served_s = options.requests / outcome.pass_s["with the pool"]
        outcome.overload_rate_s = overload.OVERLOAD * served_s
        lasts_s = options.overload_s or overload.LASTS_OBJECTIVES * outcome.ttft_objective_s
        times_s = overload.arrivals(outcome.overload_rate_s, lasts_s, options.seed)
        tasks = {
            mode: self._progress.add_task(
                f"overload, admission {mode}", total=len(times_s), note="", start=False
            )
            for mode in overload.MODES
        }
        rejected: Counter[str] = Counter()

        def ended(mode: str, served: ServedRequest) -> None:
            rejected[mode] += bool(served.rejected)
            self._progress.start_task(tasks[mode])
            note = f"{rejected[mode]} rejected" if rejected[mode] else ""
            self._progress.update(tasks[mode], advance=1, note=note)

        started_s = time.perf_counter()
        outcome.overload = overload.overload(
            self._router,
            self._client,
            self._conductor.url,
            times_s,
            outcome.ttft_objective_s,
            options.seed,
            ended,
        )
        outcome.pass_s["overload"] = time.perf_counter() - started_s

    # -- processes ---------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _children(self) -> Iterator[list[EngineProcess]]:
        children: list[EngineProcess] = []
        try:
            for role, names in self._names.items():
                for name in names:
                    children.append(
                        EngineProcess(name, ["tiffin.bench.demo.engines.worker"], self._folder)
                    )
                    job = Job(name, role, self._options.seed, self._options.size)
                    children[-1].send(asdict(job))
            yield children
        finally:
            for child in children:
                child.process.terminate()
            for child in children:
                child.stop()

    def look(self) -> None:
        """Raises ProcessFailed if a node, its Redis or the conductor has died."""
        for happening in self._pool.look():
            if happening.kind == "ended":
                last = "\n".join(happening.lines)
                raise ProcessFailed(f"{happening.name} {happening.words}; its last words:\n{last}")
        if self._conductor is not None:
            self._conductor.look()

    @contextlib.contextmanager
    def _shown(self, words: str) -> Iterator[None]:
        task = self._progress.add_task(words, total=None, note="")
        yield
        self._progress.remove_task(task)


def objective_s(ttfts_s: Sequence[float]) -> float:
    """The objective for the time to first token: twice the p90 of idle processes, in tenths of a
    second."""
    ordered = sorted(ttfts_s)
    p90_s = ordered[min(len(ordered) * 9 // 10, len(ordered) - 1)]
    return max(round(OBJECTIVE_OF_P90 * p90_s, 1), 0.1)


@contextlib.contextmanager
def _pool(options: Options, folder: Path) -> Iterator[LocalPool]:
    """Nodes for the demo, with a Redis if there are several."""
    pool = LocalPool(
        LocalPoolOptions(
            nodes=options.nodes,
            dram=options.dram,
            nvme=(folder / "nvme", parse_bytes(options.nvme)),
            redis=options.nodes > 1,
            flush_s=0.0,  # the pool is never read again
        )
    )
    try:
        try:
            pool.start(timeout_s=START_S)
        except NodeUnavailable as error:
            raise ProcessFailed(str(error)) from error
        yield pool
    finally:
        pool.stop()


def _counters(pool: LocalPool) -> dict[str, int]:
    """The sums of all nodes' counters."""
    total: Counter[str] = Counter()
    for index, name in enumerate(pool.names):
        try:
            with Client.open(f"unix:{pool.socket(index)}", name="demo") as client:
                total.update(client.statistics()["counters"])
        except TiffinError as error:
            raise ProcessFailed(f"{name} gave no statistics: {error}") from error
    return dict(total)


def shown_progress(console: Console) -> Progress:
    """Bars for the phases; their tasks have a field `note`."""
    return Progress(
        TextColumn("{task.description:33}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.fields[note]}"),
        console=console,
    )
