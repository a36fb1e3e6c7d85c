"""Run the demo with vLLM: the trace at one instance alone, then prefilled and decoded apart.

One node is the pool. Nothing outlives `run`: all processes are tethered to this one
(kvstore/cli/local/tether.py), and all files are in a temporary folder.
"""

from __future__ import annotations

import contextlib
import statistics
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

from tiffin.conductor.client import ConductorClient
from tiffin.conductor.errors import ConductorError
from tiffin.conductor.records import Role
from tiffin.kvstore.cli.local.local_pool import LocalPool, LocalPoolOptions
from tiffin.kvstore.errors import NodeUnavailable

from ...serving.completions import ask
from ...serving.conducting import fitted
from ...serving.errors import ProcessFailed
from ...serving.split_service import START_S, front, started_instances
from ...vllm.engine.model import VOCABULARY
from ...vllm.engine_process import model
from ...vllm.setting import Setting, Sizes
from ..engines.trace import load_slice, tokens_of
from ..router import ServedRequest
from ..run import CANDIDATES, LOG_MAX, Alone, shown_progress

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress

    from tiffin.conductor.wire.models import EntryReply

    from ...serving.completions import Answer
    from ...serving.servers import Server

REQUESTS = 24
ANSWER_TOKENS = 16
_MEASURED_TOKENS = (600, 1500, 3000)  # of two prompts that are answered at a time
_MEASURED_ANSWER = 48


@dataclass(frozen=True, slots=True)
class VllmOptions:
    """Options of the command line. `workers`: prefill instances, and as many that decode."""

    python: Path
    requests: int = REQUESTS
    workers: int = 1
    seed: int = 0
    dram: str = "512MiB"


@dataclass(slots=True)
class VllmOutcome:
    """All measurements. `found_tokens`, `handed_tokens`: what the instances that prefill and that
    decode have loaded from the pool instead of computing it. `decisions`: by request, with what
    each counted on in the pool, and what was found."""

    options: VllmOptions
    alone: list[Alone] = field(default_factory=list)
    split: list[ServedRequest] = field(default_factory=list)
    decisions: dict[str, EntryReply] = field(default_factory=dict)
    found_tokens: int = 0
    handed_tokens: int = 0
    elapsed_s: float = 0.0


def run(options: VllmOptions, console: Console) -> VllmOutcome:
    """Run the demo, with progress on `console`. Raises ProcessFailed."""
    outcome, started_s = VllmOutcome(options), time.perf_counter()
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="tiffin-demo-")))
        progress = stack.enter_context(shown_progress(console))
        try:
            _Demo(outcome, stack, folder, progress).run()
        except (ConductorError, NodeUnavailable) as error:
            raise ProcessFailed(f"{type(error).__name__}: {error}") from error
    outcome.elapsed_s = time.perf_counter() - started_s
    return outcome


class _Demo:
    """The phases, one after the other. Everything that they start is ended by `stack`."""

    def __init__(
        self, outcome: VllmOutcome, stack: contextlib.ExitStack, folder: Path, progress: Progress
    ) -> None:
        self._options, self._outcome = outcome.options, outcome
        self._stack, self._folder, self._progress = stack, folder, progress
        requests = load_slice()[: outcome.options.requests]
        self._prompts = [
            tokens_of(one, seed=outcome.options.seed, vocab=VOCABULARY).tolist() for one in requests
        ]

    def run(self) -> None:
        """All phases. Raises ProcessFailed, ConductorError, NodeUnavailable."""
        self._start()
        self._alone()
        self._start_conductor()
        self._split()

    def _start(self) -> None:
        """The pool and all vLLM processes."""
        options = self._options
        task = self._progress.add_task("starting vLLM", total=2 * options.workers, note="")
        self._pool = LocalPool(LocalPoolOptions(nodes=1, dram=options.dram, redis=True))
        self._stack.callback(self._pool.stop)
        self._pool.start(timeout_s=START_S)
        weights = self._stack.enter_context(model(Setting(Sizes(), options.python)))
        self._instances = self._stack.enter_context(
            started_instances(self._pool, options.python, weights, self._folder, options.workers)
        )
        for one in [one for role in self._instances.values() for one in role]:
            one.wait("/health", START_S)
            self._progress.update(task, advance=1)

    def _alone(self) -> None:
        """One instance computes each prompt and its answer."""
        server = self._instances[Role.DECODE][0]
        _whole(server, self._prompts[0], "warm-up")
        task = self._progress.add_task("one instance alone", total=len(self._prompts), note="")
        prefill, decode = [], []
        for number, prompt in enumerate(self._prompts):
            answer = _whole(server, prompt, f"alone-{number}")
            ttft_s = answer.arrivals_s[0]
            alone = Alone(number, server.name, len(prompt), ttft_s, answer.tokens)
            self._outcome.alone.append(alone)
            prefill.append((len(prompt), 0, ttft_s))
            decode.append((1, len(prompt), _step_s(answer)))
            self._progress.update(task, advance=1)
        for tokens in _MEASURED_TOKENS:
            names = [f"measured-{tokens}-{number}" for number in range(2)]
            measured = partial(_whole, server, [1] * tokens, tokens=_MEASURED_ANSWER)
            with ThreadPoolExecutor(len(names)) as clients:
                both = list(clients.map(measured, names))
            decode += [(2, 2 * tokens, _step_s(answer)) for answer in both]
        self._profile = fitted(prefill, decode, engine="vllm")

    def _start_conductor(self) -> None:
        """The conductor, with a profile of this machine; all instances join; the gateway."""
        service = front(self._pool, self._profile, self._instances, "pool", self._folder)
        url, self._gateway = self._stack.enter_context(service)
        self._client = self._stack.enter_context(ConductorClient(url))

    def _split(self) -> None:
        """The same prompts through the gateway, by clients that each send the next one when they
        have an answer."""
        outcome, instances = self._outcome, self._instances
        task = self._progress.add_task(
            "prefill and decode apart", total=len(self._prompts), note=""
        )
        began = time.monotonic()

        def one(number: int) -> ServedRequest:
            prompt, at_s = self._prompts[number], time.monotonic() - began
            answer = ask(self._gateway, prompt, ANSWER_TOKENS, f"chat-{number}")
            self._progress.update(task, advance=1)
            served = ServedRequest(answer.request_id, number, at_s, len(prompt))
            served.prefill, served.decode = answer.prefill, answer.decode
            served.ttft_s, served.tokens = answer.arrivals_s[0], answer.tokens
            served.cached_tokens = answer.cached_tokens
            return served

        def loaded(role: Role) -> int:
            return sum(one.counter("tiffin_loaded_tokens") for one in instances[role])

        before = {role: loaded(role) for role in instances}
        # As many as instances that decode: with more, waits for each other would count.
        with ThreadPoolExecutor(len(instances[Role.DECODE])) as clients:
            outcome.split = list(clients.map(one, range(len(self._prompts))))
        outcome.found_tokens = loaded(Role.PREFILL) - before[Role.PREFILL]
        outcome.handed_tokens = loaded(Role.DECODE) - before[Role.DECODE]
        for entry in self._client.decisions(LOG_MAX, candidates=CANDIDATES):
            outcome.decisions[entry.request_id] = entry
        for served in outcome.split:
            entry = outcome.decisions[served.id]
            if entry.predicted_ttft_s is not None:
                served.predicted_ttft_s = entry.predicted_ttft_s


def _whole(server: Server, prompt: list[int], name: str, tokens: int = ANSWER_TOKENS) -> Answer:
    """An answer for which nothing is found anywhere: a salt of its own changes all keys."""
    return ask(server, prompt, tokens, name, cache_salt=name)


def _step_s(answer: Answer) -> float:
    return statistics.median(b - a for a, b in pairwise(answer.arrivals_s))
