"""A simulated cluster that answers a trace, and the conductor's core that decides for it.

The conductor is the one of the service, with its settings: it knows nothing but what it is told,
and everything that it is told comes `late_s` late.
"""

from __future__ import annotations

import functools
import random
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Protocol

from tiffin.conductor.admission.counterfactual import ShadowCounts
from tiffin.conductor.core import Conductor
from tiffin.conductor.cost import latency_profiles
from tiffin.conductor.events.index_updates import Added, Removed
from tiffin.conductor.records import (
    InstanceSpec,
    Load,
    Objectives,
    Rejection,
    Request,
    Role,
)

from ...traces.turns import previous_turns
from ..clock import VirtualClock
from ..instances.decode_instance import DecodeInstance
from ..instances.prefill_instance import PrefillInstance, PrefillParts
from ..instances.prefill_work import pipelined, prefill_work, slowed
from ..instances.sim_request import SimRequest
from ..nodes.network import Network
from ..nodes.node_cache import NodeCache, TierChange
from .holding_gateway import HoldingGateway
from .load_series import LoadSeries
from .options import SimulationOptions as SimulationOptions  # noqa: TC001 # others take it here
from .order_carrier import OrderCarrier
from .request_reports import RequestReports
from .role_changes import CALLED, RoleChanges

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from tiffin.conductor.cost.latency_profiles import Profile
    from tiffin.conductor.pool.role_flip import Flip
    from tiffin.conductor.records import Decision

    from ...traces.trace import Trace
    from ..nodes.network import CompletedTransfer

    Profiles = Callable[[str], Profile]

_MODEL = "simulated"


@dataclass(slots=True)
class SimulationOutcome:
    """All jobs in order of arrival; bytes that were sent, by sender and receiver; all transfers in
    the order of their ends; of what was sent, the KV that was handed over to decode; how often an
    answer was preempted; the load of both pools at each heartbeat; the conductor's estimate of what
    became of the refused; the role flips, those under way at the end last."""

    options: SimulationOptions
    jobs: list[SimRequest] = field(default_factory=list)
    moved_bytes: dict[tuple[str, str], int] = field(default_factory=dict)
    transfers: list[CompletedTransfer] = field(default_factory=list)
    handed_over_bytes: int = 0
    preempted: int = 0
    loads: LoadSeries = field(default_factory=LoadSeries)
    shadow: ShadowCounts = field(default_factory=ShadowCounts)
    flips: list[Flip] = field(default_factory=list)


def conductor_of(options: SimulationOptions, profiles: Profiles) -> Conductor:
    """The core, with these settings and the seed's dice, which knows the instances by `profiles`.
    Raises InvalidRequest."""
    return Conductor(options.settings(), dice=random.Random(options.seed), profile=profiles)


class Scheduler(Protocol):
    """What decides; the conductor's core is one."""

    def schedule(self, request: Request, now: float) -> Decision | Rejection:
        """Where a request runs, or that it does not."""


@dataclass(frozen=True, slots=True)
class TrueState:
    """The cluster as it is at any moment, for a scheduler that knows more than a conductor can.
    `running`: admitted requests that have not ended."""

    trace: Trace
    options: SimulationOptions
    prefills: Mapping[str, PrefillInstance]
    decodes: Mapping[str, DecodeInstance]
    network: Network
    running: Mapping[str, SimRequest]


def simulate(
    trace: Trace,
    options: SimulationOptions,
    tell: Callable[[float], None] = lambda share: None,
    *,
    scheduler: Callable[[TrueState], Scheduler] | None = None,
    core: Callable[[SimulationOptions, Profiles], Conductor] = conductor_of,
    profiles: Profiles = latency_profiles.load,
) -> SimulationOutcome:
    """Replay the trace: requests come when it says so. The same arguments give the same outcome.
    `tell` is told the share of requests that has ended. `scheduler` makes what decides in place of
    the conductor, `core` makes the conductor, which knows the instances by their profiles as it is
    given them. `profiles` finds those of the simulated hardware. Raises InvalidRequest."""
    return _Simulation(trace, options, tell, scheduler, core, profiles).run()


class _Simulation:
    def __init__(
        self,
        trace: Trace,
        options: SimulationOptions,
        tell: Callable[[float], None],
        scheduler: Callable[[TrueState], Scheduler] | None,
        core: Callable[[SimulationOptions, Profiles], Conductor],
        profiles: Profiles,
    ) -> None:
        self._trace, self._options, self._tell_share = trace, options, tell
        self._clock = clock = VirtualClock()
        self._network = Network(clock, options.bandwidth_bytes_s, options.latency_s)
        self._objectives = Objectives(options.ttft_s, options.tbt_s)
        self._profiles = profiles

        def known(name: str) -> Profile:
            found = profiles(name)
            return pipelined(found, options.stages) if name == options.profile else found

        self._core = core(options, known)
        self._chance = random.Random(options.seed)
        self._outcome = SimulationOutcome(options)
        self._left = len(trace.requests)
        self._age_s = options.load_late_s if options.load_age_told else None
        self._gateway = HoldingGateway(self._core, clock, self._late_s, self._preempted)
        self._reports = RequestReports(self._core, clock, self._late_s, self._gateway.look)
        self._coming: dict[str, int] = {}  # by job: parts of its KV that have not come
        self._next_turns = _next_turns(trace) if options.closed else {}
        self._roles = RoleChanges(self._core, clock, options.flip_s, self._take_role)
        # Nodes keep their blocks when their instances no longer prefill.
        self._caches: dict[str, NodeCache] = {}
        self._prefills: dict[str, PrefillInstance] = {}
        self._decodes: dict[str, DecodeInstance] = {}
        for number in range(options.prefill):
            self._take_role(f"prefill-{number}", Role.PREFILL)
        for number in range(options.decode):
            self._take_role(f"decode-{number}", Role.DECODE)
        self._carrier = OrderCarrier(
            self._network,
            self._caches,
            trace.block_tokens * options.token_bytes,
            lambda outcome: self._reports.later(
                functools.partial(self._core.steering.ended, outcome)
            ),
        )
        state = TrueState(
            trace, options, self._prefills, self._decodes, self._network, self._reports.running
        )
        self._scheduler: Scheduler = scheduler(state) if scheduler else self._core

    def _take_role(self, name: str, role: Role) -> None:
        """An instance prefills, or decodes, from now on; it has no requests."""
        if role is Role.PREFILL:
            if name in self._decodes:
                self._outcome.preempted += self._decodes.pop(name).preempted
            self._prefills[name] = self._prefill_instance(name)
        else:
            self._prefills.pop(name, None)
            self._decodes[name] = self._decode_instance(name)

    def _prefill_instance(self, name: str) -> PrefillInstance:
        options, tokens = self._options, self._trace.block_tokens
        ways = options.settings().transfers
        load_byte_s = {
            "hbm": 0.0,
            "dram": 1 / ways.dram_bandwidth_bytes_s,
            "nvme": 1 / ways.nvme_bandwidth_bytes_s,
        }
        profile = self._slowed(name, self._profiles(self._profile(Role.PREFILL)))
        parts = PrefillParts(self._clock, profile, options, tokens, load_byte_s, self._noisy)
        choose = self._next_prefill if options.order == "conductor" else None
        if name not in self._caches:
            self._caches[name] = NodeCache(
                hbm_blocks=options.hbm_cache_tokens // tokens,
                dram_blocks=options.cache_tokens // tokens,
                nvme_blocks=options.nvme_cache_tokens // tokens,
                policy=options.eviction,
                changed=functools.partial(self._blocks_changed, name),
            )
        return PrefillInstance(
            name, parts, self._caches[name], self._began, self._prefilled, choose
        )

    def _decode_instance(self, name: str) -> DecodeInstance:
        options, profile = self._options, self._profiles(self._profile(Role.DECODE))
        return DecodeInstance(
            name,
            self._clock,
            self._slowed(name, profile),
            options.kv_capacity_tokens,
            options.batch_max,
            self._ended,
            self._comes_back(profile),
        )

    def _comes_back(self, profile: Profile) -> Callable[[int], float] | None:
        """Seconds for a preempted request to come back, by tokens of its context."""
        options = self._options
        if options.preemption == "none":
            return None
        if options.preemption == "recompute":
            return lambda tokens: prefill_work(profile, tokens, 0, 0, 1).gpu_s
        # To memory and back.
        byte_s = 2 / options.settings().transfers.dram_bandwidth_bytes_s
        return lambda tokens: tokens * options.token_bytes * byte_s

    def run(self) -> SimulationOutcome:
        """See `simulate`."""
        for role, names in ((Role.PREFILL, self._prefills), (Role.DECODE, self._decodes)):
            for name in names:
                self._core.register(self._spec(name, role), 0.0)
        self._beat()
        if self._options.order == "held":
            self._gateway.tick()
        self._reports.keep_alive()
        self._report()
        later_turns = {number for numbers in self._next_turns.values() for number in numbers}
        for number, request in enumerate(self._trace.requests):
            if number not in later_turns:
                self._clock.at(request.arrival_s, functools.partial(self._arrive, number))
        self._clock.run(lambda: self._left > 0)
        heard_s = self._clock.now_s + self._options.late_s + self._options.late_jitter_s
        # The conductor hears of the last ones.
        self._clock.run(lambda: self._clock.now_s <= heard_s)
        self._outcome.moved_bytes = dict(self._network.moved_bytes)
        self._outcome.transfers = self._network.completed
        self._outcome.preempted += sum(one.preempted for one in self._decodes.values())
        self._outcome.shadow = self._core.shadow.counts
        self._outcome.flips = self._core.steering.flips()
        return self._outcome

    def _spec(self, name: str, role: Role) -> InstanceSpec:
        options, block_tokens = self._options, self._trace.block_tokens
        return InstanceSpec(
            *(name, _MODEL, role, self._profile(role)),
            node=name,
            block_tokens=block_tokens,
            block_bytes=block_tokens * options.token_bytes,
            kv_capacity_tokens=options.kv_capacity_tokens,
            batch_max=options.batch_max,
            fetches=options.fetches,
            prefix_caching=options.hbm_cache_tokens > 0,
            labels=CALLED if options.planner == "act" else {},
        )

    def _slowed(self, name: str, profile: Profile) -> Profile:
        """The profile of an instance's hardware, which may not be the one that it registers."""
        return slowed(profile, self._options.slowness.get(name, 1.0))

    def _noisy(self, seconds: float) -> float:
        sigma = self._options.noise
        if not sigma:
            return seconds
        return seconds * self._chance.lognormvariate(-sigma * sigma / 2, sigma)

    def _profile(self, role: Role) -> str:
        options = self._options
        return options.decode_profile or options.profile if role is Role.DECODE else options.profile

    # -- what the conductor is told ----------------------------------------------------------------

    def _late_s(self) -> float:
        late_s = self._options.late_s
        if self._options.late_jitter_s:
            late_s += self._chance.uniform(0, self._options.late_jitter_s)
        return late_s

    def _blocks_changed(self, name: str, change: TierChange) -> None:
        if change.tier != "hbm" and not self._options.knows_nodes:
            return
        for kind, keys in ((Added, change.added), (Removed, change.removed)):
            if keys:
                update = kind(name, change.tier, keys)
                self._reports.later(functools.partial(self._core.apply, update))

    def _beat(self) -> None:
        """All instances tell their load, and the conductor's time goes on."""
        now = self._clock.now_s
        for name, one in self._prefills.items():
            tokens = self._heard(one.queued_tokens)
            self._tell_load(name, Load(tokens, one.queued, age_s=self._age_s))
        for name, other in self._decodes.items():
            tokens = self._heard(other.context_tokens)
            load = Load(running=other.batch, context_tokens=tokens, age_s=self._age_s)
            self._tell_load(name, load)
        self._core.tick(now)
        if self._options.replication or self._options.planner == "act":
            self._steer(now)
        rows = self._core.cluster.rows_for(_MODEL, prefill=True)
        waits_s = self._core.queues.wait_s(rows, "normal", 0.0, now)
        steps_s = [one.step_s for one in self._decodes.values()]
        self._outcome.loads.sample(now, waits_s, steps_s, self._objectives)
        self._clock.after(self._options.heartbeat_s, self._beat)

    def _steer(self, now: float) -> None:
        """The conductor's slow loop."""
        spaces = self._carrier.spaces() if self._options.replication else None
        steered = self._core.steering.tick(spaces, now)
        for order in steered.orders:
            self._reports.later(lambda _, order=order: self._carrier.carry(order))  # type: ignore[misc]
        self._roles.carry_out(steered.actions)

    def _tell_load(self, name: str, load: Load) -> None:
        late_s = self._options.load_late_s
        if not late_s:
            self._core.heartbeat(name, load, self._clock.now_s)
            return
        self._clock.after(late_s, lambda: self._core.heartbeat(name, load, self._clock.now_s))

    def _heard(self, tokens: int) -> int:
        """What an instance says of its tokens."""
        sigma = self._options.load_noise
        return round(tokens * self._chance.lognormvariate(0, sigma)) if sigma else tokens

    def _report(self) -> None:
        """As a gateway does: how many tokens have come since the last time."""
        for instance in self._decodes.values():
            for name, tokens in instance.answered().items():
                self._reports.answered(self._reports.running[name], tokens)
        self._clock.after(self._options.report_s, self._report)

    def _next_prefill(self, instance: PrefillInstance) -> str | None:
        return self._core.next_prefill(instance.name, self._clock.now_s)

    # -- the life of a request ---------------------------------------------------------------------

    def _arrive(self, number: int) -> None:
        request, now = self._trace.requests[number], self._clock.now_s
        keys = tuple(block.to_bytes(16) for block in self._trace.full_blocks(request))
        job = SimRequest(f"r{number}", replace(request, arrival_s=now), keys)
        self._outcome.jobs.append(job)
        self._schedule(job)

    def _schedule(self, job: SimRequest) -> None:
        now = self._clock.now_s
        request = Request(
            *(job.name, _MODEL, job.trace.prompt_tokens, job.keys),
            objectives=self._objectives,
            priority=self._options.priority(job.trace),
            tenant=job.trace.tenant,
        )
        outcome = self._scheduler.schedule(request, now)
        if isinstance(outcome, Rejection):
            job.rejected = outcome.reason
            self._over(job)
            return
        job.decision = outcome
        job.cut_at(outcome.output_tokens_max)
        self._reports.begin(job)
        self._gateway.send(job.name, lambda: self._start(job, outcome))

    def _preempted(self, name: str, reason: str) -> None:
        """A held request had to leave a full queue."""
        job = self._reports.running[name]
        job.rejected = reason
        self._reports.drop(job)
        self._over(job)

    def _start(self, job: SimRequest, decision: Decision) -> None:
        """Queue the prompt, and fetch its blocks as the conductor has decided."""
        instance = self._prefills[decision.prefill]
        own = have = instance.cache.match(job.keys)
        parts: list[tuple[str, int]] = []
        for fetch in sorted(decision.fetches, key=lambda fetch: fetch.start):
            stop = min(fetch.stop, self._caches[fetch.source].match(job.keys))
            if fetch.start <= have < stop:  # what the conductor believed may be evicted meanwhile
                parts.append((fetch.source, stop - have))
                have = stop
        job.fetched_blocks = have - own
        instance.enqueue(job, fetching=bool(parts))
        coming = len(parts)

        def arrived() -> None:
            nonlocal coming
            coming -= 1
            if not coming:
                self._reports.event(job, "fetched")
                instance.cache.put(job.keys[:have])
                instance.fetched(job)

        block_bytes = self._trace.block_tokens * self._options.token_bytes
        for source, blocks in parts:
            self._network.send(source, instance.name, blocks * block_bytes, arrived)

    def _began(self, instance: PrefillInstance, job: SimRequest, seconds: float) -> None:
        """Its prefill has begun: with overlap, the KV of all layers but the last goes to the
        instance that decodes meanwhile."""
        computed = job.trace.prompt_tokens - job.cached_tokens
        self._reports.event(job, "prefill_began", computed)
        if self._options.layerwise and job.trace.output_tokens > 1:
            self._coming[job.name] = 2
            self._hand_over(instance, job, 1 - 1 / self._options.layers)

    def _prefilled(self, instance: PrefillInstance, job: SimRequest) -> None:
        """The first token is there, and the prompt's KV goes to the instance that decodes."""
        job.first_token_s = self._clock.now_s
        instance.cache.put(job.keys)
        if self._options.admission == "baseline" and self._rejected_late(job):
            return
        self._reports.event(job, "prefill_done")
        self._reports.event(job, "first_token")
        if job.trace.output_tokens <= 1:  # nothing is left to decode
            self._ended(job)
            return
        self._hand_over(instance, job, 1 / self._options.layers if self._options.layerwise else 1.0)

    def _hand_over(self, instance: PrefillInstance, job: SimRequest, share: float) -> None:
        assert job.decision is not None
        decode = self._decodes[job.decision.decode]

        def arrived() -> None:
            left = self._coming.pop(job.name, 1) - 1
            if left:
                self._coming[job.name] = left
            else:
                self._reports.event(job, "handed_over")
                decode.join(job)

        nbytes = share * job.trace.prompt_tokens * self._options.token_bytes
        self._outcome.handed_over_bytes += round(nbytes)
        self._network.send(instance.name, decode.name, nbytes, arrived)

    def _rejected_late(self, job: SimRequest) -> bool:
        """The second check of "baseline": whether the request is refused after its prefill."""
        rejection = self._core.recheck(job.name, self._clock.now_s)
        if rejection is None:
            return False
        job.rejected = rejection.reason
        self._reports.drop(job)
        self._over(job)
        return True

    def _ended(self, job: SimRequest) -> None:
        job.ended_s = self._clock.now_s
        self._reports.finished(job)
        self._over(job)

    def _over(self, job: SimRequest) -> None:
        now = self._clock.now_s
        for number in self._next_turns.get(int(job.name[1:]), ()):
            at_s = max(now, self._trace.requests[number].arrival_s)
            self._clock.at(at_s, functools.partial(self._arrive, number))
        self._left -= 1
        self._tell_share(1 - self._left / len(self._trace.requests))


def _next_turns(trace: Trace) -> dict[int, list[int]]:
    """By request, those that go on with it."""
    found: dict[int, list[int]] = {}
    for number, before in enumerate(previous_turns(trace)):
        if before is not None:
            found.setdefault(before, []).append(number)
    return found
