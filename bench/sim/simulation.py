"""A simulated cluster that answers a trace, and the conductor's core that decides for it.

The conductor is the one of the service, with its settings: it knows nothing but what it is told,
and everything that it is told comes `late_s` late.
"""

from __future__ import annotations

import contextlib
import random
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from tiffin.conductor.admission.counterfactual import ShadowCounts
from tiffin.conductor.core import Conductor
from tiffin.conductor.core.settings import Settings, patched
from tiffin.conductor.cost import latency_profiles
from tiffin.conductor.errors import UnknownRequest
from tiffin.conductor.events.index_updates import Added, Removed
from tiffin.conductor.records import (
    InstanceSpec,
    Load,
    Objectives,
    Rejection,
    Request,
    RequestEvent,
    Role,
)

from .block_cache import BlockCache
from .clock import VirtualClock
from .decode_instance import DecodeInstance
from .load_series import LoadSeries
from .network import Network
from .prefill_instance import PrefillInstance
from .sim_request import SimRequest

if TYPE_CHECKING:
    from collections.abc import Callable

    from tiffin.conductor.records import Decision

    from ..traces.trace import Trace, TraceRequest

_MODEL = "simulated"


@dataclass(frozen=True, slots=True)
class SimulationOptions:
    """A cluster and its conductor.

    The defaults are Mooncake's test-bed (FAST '25, section 5): Llama-3-70B on nodes of eight A800
    with four cards of 200 Gb/s, of which its transfer engine gets 87 GB/s (figure 12), 327,680
    bytes of KV per token, and 3 million tokens of memory per node (figure 10).
    """

    prefill: int = 8
    decode: int = 8
    policy: str = "kvcache_centric"
    admission: str = "off"
    profile: str = latency_profiles.DEFAULT
    token_bytes: int = 327_680
    cache_tokens: int = 3_000_000
    kv_capacity_tokens: int = 1_000_000
    batch_max: int = 256
    bandwidth_bytes_s: float = 87e9
    latency_s: float = 1e-3
    late_s: float = 0.1
    heartbeat_s: float = 1.0
    ttft_s: float | None = None
    tbt_s: float | None = None
    seed: int = 0
    use_lengths: bool = True  # of answers, in the conductor's forecast of decode; else all are one
    fetches: bool = True  # whether instances fetch blocks from each other's nodes

    def settings(self) -> Settings:
        """Of the conductor. Raises InvalidRequest for a policy that does not exist."""
        admission = {"mode": self.admission, "use_lengths": self.use_lengths}
        changes = {"policy": {"name": self.policy}, "admission": admission}
        links = {"link_bandwidth_bytes_s": self.bandwidth_bytes_s, "link_latency_s": self.latency_s}
        return patched(Settings(), {**changes, "transfers": links})


@dataclass(slots=True)
class SimulationOutcome:
    """All jobs in order of arrival; bytes that were sent, by sender and receiver; the load of both
    pools at each heartbeat; the conductor's estimate of what became of the refused."""

    options: SimulationOptions
    jobs: list[SimRequest] = field(default_factory=list)
    moved_bytes: dict[tuple[str, str], int] = field(default_factory=dict)
    loads: LoadSeries = field(default_factory=LoadSeries)
    shadow: ShadowCounts = field(default_factory=ShadowCounts)


def simulate(
    trace: Trace, options: SimulationOptions, tell: Callable[[float], None] = lambda share: None
) -> SimulationOutcome:
    """Replay the trace: requests come when it says so. The same arguments give the same outcome.
    `tell` is told the share of requests that has ended. Raises InvalidRequest."""
    return _Simulation(trace, options, tell).run()


class _Simulation:
    def __init__(
        self, trace: Trace, options: SimulationOptions, tell: Callable[[float], None]
    ) -> None:
        self._trace, self._options, self._tell_share = trace, options, tell
        self._clock = clock = VirtualClock()
        self._network = Network(clock, options.bandwidth_bytes_s, options.latency_s)
        self._objectives = Objectives(options.ttft_s, options.tbt_s)
        self._core = Conductor(options.settings(), dice=random.Random(options.seed))
        self._outcome = SimulationOutcome(options)
        self._left = len(trace.requests)
        self._running: dict[str, SimRequest] = {}
        self._held: dict[str, list[Callable[[], None]]] = {}  # by the job that is waited for
        profile = latency_profiles.load(options.profile)
        blocks = options.cache_tokens // trace.block_tokens
        self._prefills = {
            name: PrefillInstance(
                name, clock, profile, BlockCache(blocks), trace.block_tokens, self._prefilled
            )
            for name in (f"prefill-{number}" for number in range(options.prefill))
        }
        self._decodes = {
            name: DecodeInstance(
                name, clock, profile, options.kv_capacity_tokens, options.batch_max, self._ended
            )
            for name in (f"decode-{number}" for number in range(options.decode))
        }

    def run(self) -> SimulationOutcome:
        """See `simulate`."""
        for role, names in ((Role.PREFILL, self._prefills), (Role.DECODE, self._decodes)):
            for name in names:
                self._core.register(self._spec(name, role), 0.0)
        self._beat()
        self._keep_alive()
        for number, request in enumerate(self._trace.requests):
            self._clock.at(request.arrival_s, self._arrival(number, request))
        self._clock.run(lambda: self._left > 0)
        self._outcome.moved_bytes = dict(self._network.moved_bytes)
        self._outcome.shadow = self._core.shadow.counts
        return self._outcome

    def _spec(self, name: str, role: Role) -> InstanceSpec:
        options, block_tokens = self._options, self._trace.block_tokens
        return InstanceSpec(
            *(name, _MODEL, role, options.profile),
            node=name,
            block_tokens=block_tokens,
            block_bytes=block_tokens * options.token_bytes,
            kv_capacity_tokens=options.kv_capacity_tokens,
            batch_max=options.batch_max,
            fetches=options.fetches,
        )

    # -- what the conductor is told ----------------------------------------------------------------

    def _later(self, say: Callable[[float], None]) -> None:
        """Tell the conductor something, `late_s` late."""
        self._clock.after(self._options.late_s, lambda: say(self._clock.now_s))

    def _event(self, job: SimRequest, kind: str, tokens: int = 0) -> None:
        event = RequestEvent(job.name, kind, tokens)

        def say(now: float) -> None:
            with contextlib.suppress(UnknownRequest):  # it has expired meanwhile
                self._core.observe(event, now)

        self._later(say)

    def _beat(self) -> None:
        """All instances tell their load, and the conductor's time goes on."""
        now = self._clock.now_s
        for name, one in self._prefills.items():
            load = Load(queued=one.queued, queued_prefill_tokens=one.queued_tokens)
            self._core.heartbeat(name, load, now)
        for name, other in self._decodes.items():
            load = Load(running=other.batch, context_tokens=other.context_tokens)
            self._core.heartbeat(name, load, now)
        self._core.tick(now)
        rows = self._core.cluster.rows_for(_MODEL, prefill=True)
        waits_s = self._core.queues.wait_s(rows, "normal", 0.0, now)
        steps_s = [one.step_s for one in self._decodes.values()]
        self._outcome.loads.sample(now, waits_s, steps_s, self._objectives)
        self._clock.after(self._options.heartbeat_s, self._beat)

    def _keep_alive(self) -> None:
        """As a gateway does: or the conductor would take long requests for lost."""
        now = self._clock.now_s
        for name in self._running:
            with contextlib.suppress(UnknownRequest):
                self._core.observe(RequestEvent(name, "alive"), now)
        self._clock.after(self._core.settings.core.decision_ttl_s / 3, self._keep_alive)

    # -- the life of a request ---------------------------------------------------------------------

    def _arrival(self, number: int, request: TraceRequest) -> Callable[[], None]:
        def arrive() -> None:
            blocks = self._trace.full_blocks(request)
            job = SimRequest(f"r{number}", request, tuple(block.to_bytes(16) for block in blocks))
            self._outcome.jobs.append(job)
            self._schedule(job)

        return arrive

    def _schedule(self, job: SimRequest) -> None:
        now = self._clock.now_s
        request = Request(
            job.name, _MODEL, job.trace.prompt_tokens, job.keys, objectives=self._objectives
        )
        outcome = self._core.schedule(request, now)
        if isinstance(outcome, Rejection):
            job.rejected = outcome.reason
            self._over()
            return
        job.decision = outcome
        self._running[job.name] = job
        self._held[job.name] = []
        if outcome.wait_for in self._held and outcome.wait_for != job.name:
            self._held[outcome.wait_for].append(lambda: self._start(job, outcome))
        else:
            self._start(job, outcome)

    def _start(self, job: SimRequest, decision: Decision) -> None:
        """Queue the prompt, and fetch its blocks as the conductor has decided."""
        instance = self._prefills[decision.prefill]
        have = instance.cache.match(job.keys)
        parts: list[tuple[str, int]] = []
        for fetch in sorted(decision.fetches, key=lambda fetch: fetch.start):
            source = fetch.source.rpartition("/")[0]
            stop = min(fetch.stop, self._prefills[source].cache.match(job.keys))
            if fetch.start <= have < stop:  # what the conductor believed may be evicted meanwhile
                parts.append((source, stop - have))
                have = stop
        instance.enqueue(job, fetching=bool(parts))
        coming = len(parts)

        def arrived() -> None:
            nonlocal coming
            coming -= 1
            if not coming:
                self._stored(instance, job, have)

        block_bytes = self._trace.block_tokens * self._options.token_bytes
        for source, blocks in parts:
            self._network.send(source, instance.name, blocks * block_bytes, arrived)

    def _stored(self, instance: PrefillInstance, job: SimRequest, blocks: int) -> None:
        self._tell_blocks(instance, job.keys[:blocks])
        instance.fetched(job, blocks)

    def _tell_blocks(self, instance: PrefillInstance, keys: tuple[bytes, ...]) -> None:
        """Store the blocks in the memory of the instance's node, which tells the conductor."""
        added, removed = instance.cache.put(keys)
        for kind, changed in ((Added, added), (Removed, removed)):
            if changed:
                update = kind(instance.name, "dram", changed)
                self._later(lambda now, update=update: self._core.apply(update, now))  # type: ignore[misc]

    def _prefilled(self, instance: PrefillInstance, job: SimRequest) -> None:
        """The first token is there, and the prompt's KV goes to the instance that decodes."""
        job.first_token_s = self._clock.now_s
        assert job.decision is not None
        self._tell_blocks(instance, job.keys)
        for start in self._held.pop(job.name, ()):
            start()
        if self._options.admission == "baseline" and self._rejected_late(job):
            return
        self._event(job, "prefill_done")
        self._event(job, "first_token")
        decode = self._decodes[job.decision.decode]
        nbytes = job.trace.prompt_tokens * self._options.token_bytes
        self._network.send(instance.name, decode.name, nbytes, lambda: decode.join(job))

    def _rejected_late(self, job: SimRequest) -> bool:
        """The second check of "baseline": whether the request is refused after its prefill."""
        rejection = self._core.recheck(job.name, self._clock.now_s)
        if rejection is None:
            return False
        job.rejected = rejection.reason
        del self._running[job.name]
        self._over()
        return True

    def _ended(self, job: SimRequest) -> None:
        job.ended_s = self._clock.now_s
        del self._running[job.name]
        self._event(job, "tokens", job.trace.output_tokens - 1)
        self._event(job, "finished")
        self._over()

    def _over(self) -> None:
        self._left -= 1
        self._tell_share(1 - self._left / len(self._trace.requests))
