"""A small engine that schedules as vLLM 0.32 does, with the real tracker and the real worker side.

It has what makes saves dangerous: chunks of prompts, pages that requests share, preemption, aborts,
loads that fail, tokens taken back after that, and a step in flight while the next is planned.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from fakepool import (
    BLOCK,
    BLOCK_PAGES,
    GARBAGE,
    PAGE,
    SCHEMA,
    BrokenPromise,
    FakeLink,
    FakePool,
    PageMemory,
    content_of,
)
from modelpages import ModelRequest, ModelStep, PageCache, Status, StepOutput

from tiffin.kvstore.connectors.vllm.held_leases import HeldLeases
from tiffin.kvstore.connectors.vllm.orders import StepReport
from tiffin.kvstore.connectors.vllm.request_tracker import RequestTracker, TrackerOptions
from tiffin.kvstore.connectors.vllm.settings import Settings
from tiffin.kvstore.connectors.vllm.worker_side import WorkerSide

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from random import Random

    from tiffin.kvstore import Prefix
    from tiffin.kvstore.connectors.vllm.held_leases import HeldBlocks
    from tiffin.kvstore.connectors.vllm.settings import Layerwise

LOOKUP_STEPS = 4
LAYER = "the layer"


@dataclass(frozen=True)
class EngineOptions:
    """What a schedule is like. `layerwise`: see `Settings`. `pace`: the probability that a worker's
    threads go on when they can. Those after it are probabilities per step or per call of the pool.
    """

    pages: int = 40
    ranks: int = 1
    step_tokens: int = 12
    overlapped: bool = False
    loading: str = "auto"
    layerwise: Layerwise = "auto"
    recompute: bool = True
    pace: float = 0.5
    failures: float = 0.0
    aborts: float = 0.0
    preemptions: float = 0.0
    evictions: float = 0.0
    restarts: float = 0.0


class ModelEngine:
    """One engine. `tracker`, `leases`: make these. The pool may be used by others."""

    def __init__(
        self,
        random: Random,
        options: EngineOptions,
        pool: FakePool,
        tracker: Callable[[TrackerOptions], RequestTracker] = RequestTracker,
        leases: Callable[[int], HeldLeases] = HeldLeases,
    ) -> None:
        self.options = options
        self.pool = pool
        self.requests: dict[str, ModelRequest] = {}
        self.finished: list[ModelRequest] = []
        self._random = random
        self.tracker = tracker(TrackerOptions(BLOCK, PAGE, options.ranks, loading=options.loading))
        self.cache = PageCache(options.pages)
        self._waiting: list[ModelRequest] = []
        self._holding: list[ModelRequest] = []  # those that wait and have pages
        self._running: list[ModelRequest] = []
        self._received: set[str] = set()
        self._failed: set[str] = set()
        self._lookups: dict[str, Prefix] = {}
        self._holds: dict[str, HeldBlocks | None] = {}
        self.leases = leases(options.ranks)
        self.synchronous = 0  # how many loads were
        self._deferred: list[tuple[int, list[int]]] = []
        self._planned = self._processed = 0
        self._saved_by: dict[str, int] = {}
        self._loaded_by: dict[str, int] = {}
        self._memories = [PageMemory(options.pages) for _ in range(options.ranks)]
        settings = Settings(url="embedded:", block_tokens=BLOCK, layerwise=options.layerwise)
        self._workers: list[Any] = []
        for rank, memory in enumerate(self._memories):
            worker = WorkerSide(settings, FakeLink(pool, rank), rank, options.ranks)  # type: ignore[arg-type]
            worker.register(memory, [LAYER])  # type: ignore[arg-type]
            self._workers.append(worker)

    # -- what the tracker asks ---------------------------------------------------------------------

    def pages_of(self, request_id: str) -> Sequence[int]:
        request = self.requests[request_id]
        if request.status is Status.FINISHED:
            return request.pages[: -(-request.computed // PAGE)]
        return request.pages

    def tokens_of(self, request_id: str) -> Sequence[int]:
        return self.requests[request_id].tokens

    def holds(self, _: str) -> bool:
        return True

    # -- arrivals and ends -------------------------------------------------------------------------

    def add(self, name: str, prompt: list[int], outputs: int) -> None:
        request = ModelRequest(name, list(prompt), len(prompt) + outputs)
        self.requests[name] = request
        self._waiting.append(request)
        prefix = SCHEMA.prefix(prompt)
        self.pool.expect(prefix, prompt)
        self.tracker.add(name, prefix, self._lookup_until())
        self._lookups[name] = prefix

    def abort_one(self) -> None:
        """Abort some request, rather one that loads, also one in a step."""
        alive = [one for one in self.requests.values() if one.status is not Status.FINISHED]
        loading = [one for one in alive if one.status is Status.LOADING]
        if alive:
            self._fail(self._random.choice(loading or alive))

    def _fail(self, request: ModelRequest) -> None:
        request.aborted = True
        self._finish(request)

    def _finish(self, request: ModelRequest) -> None:
        for queue in (self._waiting, self._holding, self._running):
            if request in queue:
                queue.remove(request)
        delay = request.status is Status.LOADING and request.name not in self._received
        self._received.discard(request.name)
        self._failed.discard(request.name)
        request.status = Status.FINISHED
        self._forget(request.name)
        self.leases.drop(request.name)
        confirmed = request.computed - request.in_flight
        keeps = self.tracker.finished(request.name, confirmed, self)
        if not (delay or keeps):
            self._free(request)

    def _free(self, request: ModelRequest) -> None:
        """Free the pages of a finished request; later, if a step in flight may write them."""
        if self.requests.pop(request.name, None) is None:
            raise BrokenPromise(f"the pages of {request.name} were freed twice")
        self.finished.append(request)
        if request.last_step <= self._processed:
            self.cache.release(request.pages)
        else:
            self._deferred.append((self._planned, request.pages))

    # -- planning ----------------------------------------------------------------------------------

    def plan(self) -> ModelStep:
        """Schedule a step, and ask the tracker for its orders."""
        self._planned += 1
        step = ModelStep(self._planned, self.options.step_tokens)
        self._answer_lookups()
        if self._random.random() < self.options.preemptions and self._running:
            self._preempt_last(step)
        self._plan_running(step)
        if not step.preempted:
            self._plan_waiting(step)
        confirmed = [
            (name, request.computed - request.in_flight) for name, request in step.requests.items()
        ]
        step.orders = orders = self.tracker.plan(confirmed, self, step.preempted)
        self.leases.ordered(orders.loads)
        for name in self.leases.expire(self._planned):
            self.tracker.unheld(name)
        orders.left_regions = self.leases.leave_regions()
        self.synchronous += sum(load.synchronous for load in orders.loads)
        for name in step.preempted:
            self._forget(name)
            self.leases.drop(name)
            prefix = self.tracker.look_again(name, self._lookup_until())
            if prefix is not None:
                self._lookups[name] = prefix[: len(prefix)]
        self.tracker.decoding = any(count == 1 for _, count in step.scheduled.values())
        for name, (_, count) in step.scheduled.items():
            self._advance(step, self.requests[name], count)
        return step

    def _advance(self, step: ModelStep, request: ModelRequest, count: int) -> None:
        request.computed += count
        request.in_flight += count
        request.last_step = step.number
        step.pages[request.name] = list(request.pages)
        step.epochs[request.name] = request.epoch
        if request.computed >= len(request.tokens) + request.placeholders:
            request.placeholders += 1
            step.samples.add(request.name)

    def _lookup_until(self) -> float:
        return self._planned + LOOKUP_STEPS

    def _answer_lookups(self) -> None:
        for name, prefix in list(self._lookups.items()):
            if self._random.random() < 0.6:
                del self._lookups[name]
                hit, tier = (
                    self.pool.hit(prefix),
                    self._random.choice(["dram", "dram", "dram", "nvme", "peer"]),
                )
                self.tracker.answered(name, hit, (tier,) * hit)

    def _plan_running(self, step: ModelStep) -> None:
        for request in list(self._running):
            if not step.budget or request not in self._running:
                break
            ahead = request.computed + 2 - request.placeholders
            if request.placeholders and ahead >= request.tokens_max:
                continue
            known = len(request.tokens) + request.placeholders
            count = min(known - request.computed, step.budget)
            if count > 0 and not self._extend(step, request, count):
                break

    def _extend(self, step: ModelStep, request: ModelRequest, count: int) -> bool:
        """Give a running request the pages for `count` more tokens; preempt the last for them."""
        while True:
            lacking = max(0, -(-(request.computed + count) // PAGE) - len(request.pages))
            if self.cache.room_for(lacking):
                break
            if not self._preempt_last(step) or request not in self._running:
                return False
        pages = self.cache.take(lacking)
        step.taken += pages
        request.pages += pages
        self.cache.cache(request, request.computed + count)
        self._schedule(step, request, count)
        return True

    def _schedule(self, step: ModelStep, request: ModelRequest, count: int) -> None:
        step.budget -= count
        step.scheduled[request.name] = request.computed, count
        step.requests[request.name] = request

    def _preempt_last(self, step: ModelStep) -> bool:
        victim = self._running[-1]
        if victim.last_step > self._processed:
            return False  # a step in flight may write its pages
        self._running.pop()
        self.cache.release(victim.pages)
        victim.pages, victim.cached_pages = [], 0
        victim.computed = victim.placeholders = 0
        victim.sampled = list(victim.tokens)
        victim.status = Status.WAITING
        self._waiting.insert(0, victim)
        step.preempted.append(victim.name)
        return True

    def _plan_waiting(self, step: ModelStep) -> None:
        for request in [*self._holding, *self._waiting]:
            if not step.budget:
                break
            if request.status is Status.LOADING and not self._promote(request):
                continue
            if not self._admit(step, request):
                break

    def _promote(self, request: ModelRequest) -> bool:
        """Whether an asynchronous load has ended; if so, the request can be scheduled."""
        if request.name not in self._received:
            return False
        self._received.remove(request.name)
        failed = request.name in self._failed
        self._failed.discard(request.name)
        if failed and not request.computed:
            self.cache.release(request.pages)
            request.pages, request.cached_pages = [], 0
            self._holding.remove(request)
            self._waiting.insert(0, request)
        else:
            self.cache.cache(request, request.computed)
        request.status = Status.WAITING
        return True

    def _admit(self, step: ModelStep, request: ModelRequest) -> bool:
        """Begin a waiting request; False if there are no pages for it, and so for none after it."""
        hits: list[int] = []
        external: int | None = 0
        asynchronous = False
        if not request.computed:
            hits = self.cache.hits(request.tokens)
            external, asynchronous = self._match(request, len(hits) * PAGE)
        if external is None:
            return True
        computed = request.computed + len(hits) * PAGE + external
        count = 0 if asynchronous else min(len(request.tokens) - computed, step.budget)
        if not self._allocate(step, request, hits, computed + count):
            return False
        loaded = request.pages[len(hits) : computed // PAGE] if external else []
        request.loaded_pages = frozenset(loaded)
        self._forget(request.name)
        self.tracker.allocated(request.name, request.pages, external, request.computed)
        if not external:
            self.leases.drop(request.name)
        (self._holding if request in self._holding else self._waiting).remove(request)
        request.computed = computed
        if asynchronous:
            request.status = Status.LOADING
            self._holding.append(request)
            return True
        self.cache.cache(request, computed + count)
        request.status = Status.RUNNING
        self._running.append(request)
        self._schedule(step, request, count)
        return True

    def _match(self, request: ModelRequest, local: int) -> tuple[int | None, bool]:
        """What the tracker offers beyond `local` tokens."""
        known = len(request.tokens)
        self._hold(request.name, local, known)
        external, asynchronous = self.tracker.matched(request.name, local, known, self._planned)
        if external is not None:
            self._check_offer(request, local, external)
        return external, asynchronous

    def _hold(self, name: str, local: int, known: int) -> None:
        """What `SchedulerSide.matched` does about leases."""
        prefix = self.tracker.to_hold(name, local, known)
        if prefix is not None and self.leases.readable():
            self.tracker.hold_asked(name, prefix, self._planned + LOOKUP_STEPS)
            self._holds[name] = None if self.pool.fails() else self.pool.lease(prefix)
        if name in self._holds and self._random.random() < 0.6:
            held = self._holds.pop(name)
            kept = held is not None and self.leases.keep(name, held, self._planned)
            self.tracker.held(name, held.places if held is not None and kept else None)

    def _forget(self, name: str) -> None:
        self._lookups.pop(name, None)
        held = self._holds.pop(name, None)
        if held is not None:
            held.leased.release()

    def _allocate(
        self, step: ModelStep, request: ModelRequest, hits: list[int], tokens: int
    ) -> bool:
        """Give a waiting request the cached pages `hits`, and new ones for so many tokens."""
        lacking = max(0, -(-tokens // PAGE) - len(hits) - len(request.pages))
        if not self.cache.room_for(lacking + self._reserved_by_others(request), hits):
            return False
        self.cache.touch(hits)
        pages = self.cache.take(lacking)
        step.taken += pages
        if hits:
            request.cached_pages = len(hits)
        request.pages += hits + pages
        return True

    def _reserved_by_others(self, request: ModelRequest) -> int:
        """Pages that requests in `_holding` will need: they can't be preempted."""
        if request in self._holding:
            return 0
        return sum(max(0, -(-len(one.tokens) // PAGE) - len(one.pages)) for one in self._holding)

    def _check_offer(self, request: ModelRequest, local: int, external: int) -> None:
        if external and local + external > request.offer_limit:
            raise BrokenPromise(
                f"{request.name}: {local} + {external} tokens were offered, of which those from "
                f"{request.offer_limit} on could not be loaded before"
            )
        if external and local + external >= len(request.tokens):
            raise BrokenPromise(f"{request.name}: no token is left to compute")

    # -- in the workers ----------------------------------------------------------------------------

    def execute(self, step: ModelStep) -> None:
        """Run a step in all workers, as vLLM's model runner does."""
        assert step.orders is not None
        if step.preempted:
            for worker in self._workers:
                worker.drain(step.orders.preempted)
        for memory in self._memories:
            for page in step.taken:
                memory.content[page] = [GARBAGE] * PAGE
        before = any(load.synchronous for load in step.orders.loads)
        if before:
            self._begin(step)
        self._forward(step)
        if not before:
            self._begin(step)
        self.work()
        step.output = self._collect()

    def _begin(self, step: ModelStep) -> None:
        for worker in self._workers:
            self.work()
            worker.begin(step.orders, layers_wait=True)
        self.work()

    def work(self) -> None:
        """Run some of the workers' saves and asynchronous loads, also none."""
        for worker in self._workers:
            for executor in (worker._savers, worker._loaders):
                while len(executor) and self._random.random() < self.options.pace:
                    executor.run_one()
        if self.pool.broken:
            raise BrokenPromise(self.pool.broken[0])

    def _forward(self, step: ModelStep) -> None:
        for worker in self._workers:
            worker.wait_for_layer(LAYER)
        for name, (first, count) in step.scheduled.items():
            request, pages = step.requests[name], step.pages[name]
            right = content_of(request.sampled)
            sound = all(
                memory.content[pages[at // PAGE]][at % PAGE] == right[at]
                for memory in self._memories
                for at in range(min(first, len(right)))
            )
            for at in range(first, first + count):
                value = right[at] if sound and at < len(right) else GARBAGE
                for memory in self._memories:
                    memory.content[pages[at // PAGE]][at % PAGE] = value
            current = request.epoch == step.epochs[name]
            if name in step.samples and current and len(request.sampled) == first + count:
                request.sampled.append(self._random.randrange(3))

    def _collect(self) -> StepOutput:
        report, bad_pages = StepReport(), set()
        saved, loaded = [], []
        for worker in self._workers:
            for names, counts, ended in zip(
                worker.ended(), (self._saved_by, self._loaded_by), (saved, loaded), strict=True
            ):
                for name in names:
                    counts[name] = counts.get(name, 0) + 1
                    if counts[name] == len(self._workers):
                        del counts[name]
                        ended.append(name)
            bad_pages |= worker.take_bad_pages()
            report = report.joined(worker.take_report())
        return StepOutput(saved, loaded, bad_pages, report)

    # -- outputs -----------------------------------------------------------------------------------

    def update(self, step: ModelStep) -> None:
        """Take in a step's output, in vLLM's order."""
        output = step.output
        assert output is not None
        self._processed = step.number
        while self._deferred and self._deferred[0][0] <= self._processed:
            self.cache.release(self._deferred.pop(0)[1])
        taken_back = self._take_back(step, output.bad_pages) if output.bad_pages else set()
        for name, (_, count) in step.scheduled.items():
            request = step.requests[name]
            request.in_flight -= count
            if name not in taken_back and request.status is not Status.FINISHED:
                self._take_output(step, request)
        if not self.options.recompute:
            for name in taken_back:
                self._fail(self.requests[name])
        self.leases.mapped(output.report.mapped)
        self.leases.ended(output.report.ended_loads)
        self.tracker.reported(output.report)
        for name in output.loaded:
            request = self._request(name)
            if request.status is Status.LOADING:
                self._received.add(name)
            else:
                self._free(request)
        for name in output.saved:
            self._free(self._request(name))

    def _request(self, name: str) -> ModelRequest:
        if name not in self.requests:
            raise BrokenPromise(f"{name} is reported after its end")
        return self.requests[name]

    def _take_output(self, step: ModelStep, request: ModelRequest) -> None:
        if request.name not in step.samples or step.epochs[request.name] != request.epoch:
            return
        request.placeholders -= 1
        request.tokens.append(request.sampled[len(request.tokens)])
        if not len(request.tokens) % BLOCK:
            self.pool.expect(SCHEMA.prefix(request.tokens), request.tokens)
        self.cache.cache(request, request.computed - request.placeholders)
        if len(request.tokens) >= request.tokens_max:
            self._finish(request)

    def _take_back(self, step: ModelStep, bad: set[int]) -> set[str]:
        """vLLM's `_handle_invalid_blocks`: the requests whose outputs of this step do not count."""
        for request in self.requests.values():
            self._limit_offers(request, bad)
        loading = [one for one in self._holding if one.status is Status.LOADING]
        failed, _ = self._roll_back(step, loading, bad)
        names, evicted = self._roll_back(step, self._running, bad)
        if not self.options.recompute:
            self.cache.evict(evicted)
            return failed | names
        self._failed |= failed
        for name in names:
            request = self.requests[name]
            request.epoch += 1
            request.placeholders = 0
            request.sampled = list(request.tokens)
        return names

    def _limit_offers(self, request: ModelRequest, bad: set[int]) -> None:
        for index, page in enumerate(request.pages):
            if page in bad and page in request.loaded_pages:
                limit = index // BLOCK_PAGES * BLOCK
                request.offer_limit = min(request.offer_limit, limit)

    def _roll_back(
        self, step: ModelStep, requests: list[ModelRequest], bad: set[int]
    ) -> tuple[set[str], set[int]]:
        """vLLM's `_update_requests_with_invalid_blocks`."""
        affected, marked, evicted = set(), set(), set()
        for request in requests:
            _, count = step.scheduled.get(request.name, (0, 0))
            computed, cut = request.computed - count, False
            table = request.pages[: -(-computed // PAGE)]
            for index, page in enumerate(table):
                if page not in bad:
                    continue
                affected.add(request.name)
                if page not in marked and not cut:
                    cut = True
                    request.computed = index * PAGE
                    evicted.update(request.pages[index:])
                marked.add(page)
            if request.name in affected and not cut:
                # vLLM does not take back a step in flight here; one token is left to compute.
                request.computed = min(computed, len(request.tokens) - 1)
        return affected, evicted
