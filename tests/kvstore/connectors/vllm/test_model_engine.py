"""Random schedules of a model engine: what the connector promises holds in all of them, and each
part of the tracker that keeps a promise is missed when it is taken away."""

from __future__ import annotations

from random import Random
from typing import TYPE_CHECKING, Any

import pytest
from fakepool import PAGE, SCHEMA, BrokenPromise, FakePool, SteppedExecutor
from modelengine import EngineOptions, ModelEngine

from tiffin.kvstore.connectors.vllm import worker_side
from tiffin.kvstore.connectors.vllm.held_leases import HeldLeases
from tiffin.kvstore.connectors.vllm.request_tracker import RequestTracker

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from modelpages import ModelStep

    from tiffin.kvstore.connectors.vllm.orders import LoadOrder, StepOrders, StepReport
    from tiffin.kvstore.connectors.vllm.request_tracker import EngineState, TrackedRequest

STEPS_MAX = 1500
REQUESTS = 14


@pytest.fixture(autouse=True)
def _stepped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_side, "ThreadPoolExecutor", SteppedExecutor)


def prompts_of(random: Random) -> list[list[int]]:
    """Prompts that begin alike, and part at any token."""
    bases = [[random.randrange(3) for _ in range(40)] for _ in range(2)]
    found = []
    for _ in range(REQUESTS):
        base = random.choice(bases)
        same = random.randrange(1, len(base))
        own = [random.randrange(3) for _ in range(random.randrange(10))]
        found.append(base[:same] + own)
    return found


def run(engine: ModelEngine, random: Random) -> None:
    """Let all requests arrive and end. Raises BrokenPromise."""
    prompts = prompts_of(random)
    for prompt in random.sample(prompts, random.randrange(REQUESTS)):
        engine.pool.fill(prompt)
    queue: list[ModelStep] = []
    options = engine.options
    for _ in range(STEPS_MAX):
        while prompts and random.random() < 0.4:
            engine.add(f"r{len(prompts)}", prompts.pop(), random.randrange(1, 20))
        if random.random() < options.evictions:
            engine.pool.evict_one()
        if random.random() < options.restarts:
            engine.pool.restart()
        queue.append(engine.plan())
        if len(queue) == 1 and random.random() < 0.5:
            engine.execute(queue[0])
        if options.overlapped and len(queue) < 2 and random.random() < 0.8:
            continue
        finish_one(engine, queue, random)
        if not prompts and not engine.requests:
            while queue:
                finish_one(engine, queue, random)
            finish_loads(engine)
            return
    raise BrokenPromise(f"{len(engine.requests)} requests did not end")


def finish_loads(engine: ModelEngine) -> None:
    """Loads of aborted requests may still run."""
    for _ in range(STEPS_MAX):
        if not engine.pool.leased:
            return
        step = engine.plan()
        engine.execute(step)
        engine.update(step)
    raise BrokenPromise(f"{len(engine.pool.leased)} blocks stay leased")


def finish_one(engine: ModelEngine, queue: list[ModelStep], random: Random) -> None:
    step = queue.pop(0)
    if step.output is None:
        engine.execute(step)
    if random.random() < engine.options.aborts:
        engine.abort_one()
    engine.update(step)


def engine_of(
    seed: int, tracker: Any = RequestTracker, leases: Any = HeldLeases, **fixed: Any
) -> tuple[ModelEngine, Random]:
    random = Random(seed)
    chosen: dict[str, Any] = {
        "pages": random.choice([18, 24, 40]),
        "ranks": random.choice([1, 1, 2]),
        "overlapped": random.random() < 0.5,
        "loading": random.choice(["auto", "synchronous", "asynchronous"]),
        "pace": random.choice([0.5, 0.1, 0.03]),
        "failures": random.choice([0.05, 0.3]),
        "aborts": random.choice([0, 0.05, 0.3]),
        "preemptions": random.choice([0, 0.1, 0.3]),
        "evictions": random.choice([0, 0.2]),
        "restarts": random.choice([0, 0.02]),
        "layerwise": random.choice(["always", "never"]),
    }
    options = EngineOptions(**{**chosen, **fixed})
    pool = FakePool(options.ranks, random, options.failures)
    return ModelEngine(random, options, pool, tracker, leases), random


def breaks(seed: int, **how: Any) -> bool:
    """Whether a promise is broken in this schedule."""
    try:
        run(*engine_of(seed, **how))
    except BrokenPromise:
        return True
    return False


@pytest.mark.parametrize("seeds", range(0, 400, 50))
def test_whatever_happens_only_right_blocks_are_stored(seeds: int) -> None:
    for seed in range(seeds, seeds + 50):
        engine, random = engine_of(seed)
        try:
            run(engine, random)
        except Exception as error:
            raise AssertionError(f"seed {seed}: {engine.options}") from error
        assert not any(engine.cache.references), f"seed {seed}: pages were not freed"


@pytest.mark.slow
def test_an_engine_that_ends_requests_whose_loads_fail_stores_right_blocks() -> None:
    for seed in range(100):
        run(*engine_of(seed, recompute=False))


def test_loads_are_synchronous_in_these_schedules() -> None:
    """A control: else nothing of this tests them."""
    engines = [engine_of(seed, loading="synchronous", failures=0.05) for seed in range(20)]
    for engine, random in engines:
        run(engine, random)
    assert sum(engine.synchronous for engine, _ in engines) > 20


@pytest.mark.slow
@pytest.mark.parametrize("overlapped", [False, True])
@pytest.mark.parametrize("ranks", [1, 2])
def test_without_failures_every_block_is_stored(overlapped: bool, ranks: int) -> None:
    for seed in range(40):
        engine, random = engine_of(
            seed,
            pages=400,
            ranks=ranks,
            overlapped=overlapped,
            failures=0,
            aborts=0,
            preemptions=0,
            evictions=0,
        )
        run(engine, random)
        assert len(engine.finished) == REQUESTS
        for request in engine.finished:
            prefix = SCHEMA.prefix(request.tokens[:-1])  # the last token is not computed
            assert engine.pool.hit(prefix) == len(prefix), (seed, request)


# -- controls: trackers and leases without one of their precautions --------------------------------


class Unconfirmed(RequestTracker):
    """Saves what is scheduled, before its step has ended."""

    def plan(
        self, confirmed: Iterable[tuple[str, int]], engine: EngineState, *others: Any
    ) -> StepOrders:
        known = [
            (name, min(len(engine.pages_of(name)) * PAGE, len(engine.tokens_of(name))))
            for name, _ in confirmed
        ]
        return super().plan(known, engine, *others)


class Trusting(RequestTracker):
    """Saves what a request got from the engine's cache before the request computed anything."""

    def _due(self, request: TrackedRequest) -> float:
        began_with, request.began_with = request.began_with, 0
        due = super()._due(request)
        request.began_with = began_with
        return due


class Unkept(RequestTracker):
    """Lets the engine free pages that are still being saved."""

    def finished(self, request_id: str, confirmed: int, engine: EngineState) -> bool:
        super().finished(request_id, confirmed, engine)
        self._finished.clear()
        return False


class Undrained(RequestTracker):
    """Does not tell the workers which requests were preempted."""

    def plan(self, *arguments: Any) -> StepOrders:
        orders = super().plan(*arguments)
        orders.preempted = []
        return orders


class Lingering(RequestTracker):
    """Keeps pages for saves of a request that has lost them to a preemption."""

    def plan(
        self,
        confirmed: Iterable[tuple[str, int]],
        engine: EngineState,
        preempted: Iterable[str] = (),
    ) -> StepOrders:
        pending = {name: set(self._requests[name].pending_saves) for name in preempted}
        orders = super().plan(confirmed, engine, preempted)
        for name, saves in pending.items():
            self._requests[name].pending_saves |= saves
        return orders


class Stubborn(RequestTracker):
    """Offers a block again that could not be loaded."""

    def reported(self, report: StepReport) -> None:
        report.failed = {}
        super().reported(report)


# Requests that begin in one step and share pages, behind a load before the forward pass.
CROWDED = {"loading": "synchronous", "failures": 0.01, "pace": 0.9, "step_tokens": 60, "pages": 100}
HARSH = {"pace": 0.03, "aborts": 0.2, "preemptions": 0.3, "loading": "asynchronous"}


@pytest.mark.parametrize(
    ("tracker", "options"),
    [
        (Unconfirmed, {}),
        (Trusting, CROWDED),
        (Unkept, {}),
        (Undrained, {}),
        (Lingering, HARSH),
        (Stubborn, {}),
    ],
)
def test_a_tracker_without_one_precaution_is_caught(
    tracker: type[RequestTracker], options: dict[str, Any]
) -> None:
    assert any(breaks(seed, tracker=tracker, **options) for seed in range(400))


class Hasty(HeldLeases):
    """Gives leases back when their loads are ordered, before the workers have read the blocks."""

    def ordered(self, loads: Iterable[LoadOrder]) -> None:
        for load in loads:
            self.drop(load.request_id)

    def ended(self, loads: Mapping[int, int]) -> None:
        pass


class OfOneRank(HeldLeases):
    """Gives a lease back when the first worker has read the blocks."""

    def __init__(self, ranks: int) -> None:
        super().__init__(ranks)
        self._seen: set[int] = set()

    def ended(self, loads: Mapping[int, int]) -> None:
        first = dict.fromkeys(loads.keys() - self._seen, self._ranks)
        self._seen |= loads.keys()
        super().ended(first)


@pytest.mark.parametrize("leases", [Hasty, OfOneRank])
def test_leases_without_one_precaution_are_caught(leases: type[HeldLeases]) -> None:
    options = {"ranks": 2, "pace": 0.03, "failures": 0.01}
    assert any(breaks(seed, leases=leases, **options) for seed in range(400))
