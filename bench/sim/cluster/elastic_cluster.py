"""A simulated cluster that changes: roles flip, instances start and leave, as the conductor wants.

The conductor is the one of the service, with its slow loop: it plans, flips roles (`planner.mode`
"act"), and advises how many instances there should be, which an autoscaler here follows. It is told
of tokens now and then while they come, as by the gateway. By default prompts share nothing, and
there are no caches; `simulation.py` has those of a cluster that stays as it is.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Literal

from tiffin.conductor.core import Conductor
from tiffin.conductor.core.settings import Settings, patched
from tiffin.conductor.cost import latency_profiles
from tiffin.conductor.cost.latency_model import prefill_s
from tiffin.conductor.pool.instance_orders import SaveBlocks
from tiffin.conductor.pool.role_flip import SetRole, Verify
from tiffin.conductor.records import (
    InstanceSpec,
    Load,
    Objectives,
    Rejection,
    Request,
    Role,
)

from ..clock import VirtualClock
from ..instances.mixed_instance import MixedInstance
from ..instances.sim_request import SimRequest
from ..nodes.network import Network
from .autoscaler import Autoscaler
from .elastic_caches import ElasticCaches
from .hand_overs import HandOvers
from .request_reports import RequestReports

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from tiffin.conductor.cost.latency_profiles import Profile
    from tiffin.conductor.decode.length_predictor import LengthPredictor
    from tiffin.conductor.pool.planner import FleetPlan
    from tiffin.conductor.pool.role_flip import Action, Flip

    from ...traces.trace import Trace, TraceRequest

    Profiles = Callable[[str], Profile]
    # Which of the instances that decode gets a request whose prefill is done.
    ChooseDecode = Callable[[Sequence[MixedInstance], random.Random], MixedInstance]

MODEL, SMALLER_MODEL = "simulated", "simulated-smaller"


@dataclass(frozen=True, slots=True)
class ElasticOptions:
    """A cluster and its conductor; what it shares with `SimulationOptions` means the same.

    `instances` at the start, by role; `changes` of the conductor's settings. `report_s`: between
    two reports of a request's tokens. `flip_s`: from the conductor's call until an empty instance
    has its new role; `orders`: which of the conductor's it carries out besides
    (`instance_orders.py`); `start_s`: from the order of an instance until it serves. `autoscale`:
    whether the planner's advice on their number is followed. `choose_decode`, if given, overrules
    the conductor's choice, for baselines. `output_class`: what the caller says of a request's
    answer, `priority` its class. `preemption`: answers join as far as there is room for their
    context, and are computed again if there is none later. `lengths` predicts them, in place of the
    settings'. `smaller`: instances of `SMALLER_MODEL`, by role, of `smaller_profile`.
    """

    instances: Mapping[Role, int]
    changes: Mapping[str, object] = field(default_factory=dict)
    profile: str = latency_profiles.DEFAULT
    token_bytes: int = 327_680
    kv_capacity_tokens: int = 1_000_000
    batch_max: int = 256
    bandwidth_bytes_s: float = 87e9
    latency_s: float = 1e-3
    late_s: float = 0.01
    heartbeat_s: float = 1.0
    report_s: float = 4.0
    flip_s: float = 5.0
    orders: str = ""
    start_s: float = 60.0
    autoscale: bool = False
    ttft_s: float | None = None
    tbt_s: float | None = None
    choose_decode: ChooseDecode | None = None
    output_class: Callable[[TraceRequest], str] = lambda request: ""
    priority: Callable[[TraceRequest], str] = lambda request: "normal"
    order: Literal["arrival", "conductor"] = "arrival"
    preemption: bool = False
    lengths: Callable[[Trace], LengthPredictor] | None = None
    hbm_cache_tokens: int = 0
    cache_tokens: int = 0
    smaller: Mapping[Role, int] = field(default_factory=dict)
    smaller_profile: str = latency_profiles.DEFAULT
    seed: int = 0

    def settings(self) -> Settings:
        """Of the conductor. Raises InvalidRequest."""
        links = {"link_bandwidth_bytes_s": self.bandwidth_bytes_s, "link_latency_s": self.latency_s}
        sent_at_once = {"ahead_max": 0}
        changes = {"admission": {"mode": "off"}, "transfers": links, "queue": sent_at_once}
        basic = patched(Settings(), changes)
        return patched(basic, dict(self.changes))


@dataclass(frozen=True, slots=True)
class FleetSample:
    """Instances that serve at a time, by role, and all that are paid for."""

    at_s: float
    prefill: int
    decode: int
    mixed: int
    paid: int


@dataclass(slots=True)
class ElasticOutcome:
    """All jobs in order of arrival; the fleet at each heartbeat, the plans, the flips that ended.
    `instance_s`: the seconds of all instances that were paid for. `preempted`: how often an answer
    had to leave. `lost_blocks`: of prompts, that were nowhere else when their instance changed its
    role. `moved_bytes`: by source and target."""

    jobs: list[SimRequest] = field(default_factory=list)
    fleet: list[FleetSample] = field(default_factory=list)
    plans: list[FleetPlan] = field(default_factory=list)
    flips: list[Flip] = field(default_factory=list)
    instance_s: float = 0.0
    preempted: int = 0
    lost_blocks: int = 0
    moved_bytes: dict[tuple[str, str], int] = field(default_factory=dict)


def conductor_of(options: ElasticOptions) -> Conductor:
    """The core, with these settings and the seed's dice. Raises InvalidRequest."""
    return Conductor(options.settings(), dice=random.Random(options.seed))


def simulate_elastic(
    trace: Trace,
    options: ElasticOptions,
    *,
    core: Callable[[ElasticOptions], Conductor] = conductor_of,
    profiles: Profiles = latency_profiles.load,
) -> ElasticOutcome:
    """Replay the trace; blocks of prompts are ignored without caches. The same arguments give the
    same outcome. `core` makes the conductor. `profiles` finds those of the simulated hardware."""
    return _Cluster(trace, options, core(options), profiles).run()


class _Cluster:
    def __init__(
        self, trace: Trace, options: ElasticOptions, core: Conductor, profiles: Profiles
    ) -> None:
        self._trace, self._options = trace, options
        self._clock = clock = VirtualClock()
        self._network = Network(clock, options.bandwidth_bytes_s, options.latency_s)
        self._core = core
        if options.lengths is not None:
            core.lengths.use(options.lengths(trace))
        self._dice = random.Random(options.seed)
        self._profiles = profiles
        self._autoscaler = Autoscaler(self._core)
        self._outcome = ElasticOutcome()
        self._left = len(trace.requests)
        self._reports = RequestReports(self._core, clock, lambda: options.late_s)
        self._decoding: dict[str, tuple[SimRequest, MixedInstance]] = {}
        self._instances: dict[str, MixedInstance] = {}
        self._hand_overs = HandOvers(
            *(self._network, options.token_bytes, self._instances, self._decoding),
            ended=lambda name, error: self._reports.later(
                lambda now: core.moves.ended(name, now, error)
            ),
        )
        self._caches = ElasticCaches(
            *(core, clock, self._network, self._reports, trace),
            *(options.hbm_cache_tokens, options.cache_tokens, options.token_bytes),
        )
        self._starting: dict[str, Role] = {}
        self._began_s: dict[str, float] = {}

    def run(self) -> ElasticOutcome:
        """See `simulate_elastic`."""
        options = self._options
        for model, counts in ((MODEL, options.instances), (SMALLER_MODEL, options.smaller)):
            for role, count in counts.items():
                for _ in range(count):
                    self._start(role, 0.0, model)
        self._clock.at(0.0, self._beat)
        self._clock.at(0.0, self._reports.keep_alive)
        self._clock.at(0.0, self._report)
        for number, request in enumerate(self._trace.requests):
            self._clock.at(request.arrival_s, self._arrival(number, request))
        self._clock.run(lambda: self._left > 0)
        for name in list(self._began_s):
            self._pay(name)
        self._outcome.preempted = sum(one.preempted for one in self._instances.values())
        self._outcome.moved_bytes = dict(self._network.moved_bytes)
        self._outcome.lost_blocks = len(self._caches.lost)
        self._outcome.flips = list(self._core.steering.flips())
        return self._outcome

    # -- the fleet ---------------------------------------------------------------------------------

    def _start(self, role: Role, after_s: float, model: str = MODEL) -> None:
        name = f"instance-{len(self._instances) + len(self._starting)}"
        self._starting[name] = role
        self._began_s[name] = self._clock.now_s
        if after_s:
            self._clock.after(after_s, lambda: self._started(name, model))
        else:
            self._started(name, model)

    def _started(self, name: str, model: str) -> None:
        options, role = self._options, self._starting.pop(name)
        profile = options.profile if model == MODEL else options.smaller_profile
        block_tokens = self._trace.block_tokens
        self._caches.add(name)
        self._instances[name] = MixedInstance(
            *(name, self._clock, self._profiles(profile)),
            *(options.kv_capacity_tokens, options.batch_max),
            began=self._began,
            prefilled=self._prefilled,
            done=self._ended,
            choose=self._next_prefill if options.order == "conductor" else None,
            comes_back_s=self._computed_again_s(profile) if options.preemption else None,
        )
        spec = InstanceSpec(
            *(name, model, role, profile),
            node=name,
            block_tokens=block_tokens,
            block_bytes=block_tokens * options.token_bytes,
            kv_capacity_tokens=options.kv_capacity_tokens,
            batch_max=options.batch_max,
            prefix_caching=options.hbm_cache_tokens > 0,
            labels={
                "role_url": "simulated",
                "orders_url": "simulated",
                "orders": options.orders,
            },
        )
        self._core.register(spec, self._clock.now_s)

    @staticmethod
    def _computed_again_s(profile: str) -> Callable[[int], float]:
        prefill = latency_profiles.load(profile).prefill
        return lambda tokens: float(prefill_s(*prefill, tokens, 0))

    def _pay(self, name: str) -> None:
        self._outcome.instance_s += self._clock.now_s - self._began_s.pop(name)

    def _steer(self) -> None:
        """The conductor's slow loop, and what follows of its plans."""
        now = self._clock.now_s
        steered = self._core.steering.tick(None, now)
        self._carry_out(steered.actions)
        for order in steered.hand_overs:
            self._hand_overs.carry(order)
        plan = self._core.steering.plans().get(MODEL)
        plans = self._outcome.plans
        if plan is not None and (not plans or plan is not plans[-1]):
            plans.append(plan)
            if self._options.autoscale:
                for role in self._autoscaler.follow(plan, list(self._starting.values()), now):
                    self._start(role, self._options.start_s)
        for name in self._autoscaler.empty():
            self._core.remove(name, now)
            self._pay(name)

    def _carry_out(self, actions: Iterable[Action]) -> None:
        steering = self._core.steering
        for action in actions:
            name = action.instance
            if isinstance(action, SetRole):
                self._clock.after(self._options.flip_s, partial(self._takes_role, name))
            elif isinstance(action, SaveBlocks):
                self._caches.save(name, partial(self._saved, name))
            elif isinstance(action, Verify):
                self._carry_out(steering.verified(name, self._clock.now_s))

    def _takes_role(self, name: str) -> None:
        self._caches.change_role(name)
        self._carry_out(self._core.steering.committed(name, self._clock.now_s))

    def _saved(self, name: str, left: int) -> None:
        error = f"{left} are left" if left else ""
        self._carry_out(self._core.steering.saved(name, self._clock.now_s, error))

    # -- what the conductor is told ----------------------------------------------------------------

    def _beat(self) -> None:
        """All instances tell their load, and the conductor's time goes on."""
        now, roles = self._clock.now_s, dict.fromkeys(Role, 0)
        for view in self._core.instances(now):
            one = self._instances[view.spec.id]
            load = Load(
                queued=one.queued,
                queued_prefill_tokens=one.queued_tokens,
                running=one.batch,
                context_tokens=one.context_tokens,
            )
            self._core.heartbeat(one.name, load, now)
            roles[view.role] += view.status == "ready"
        counts = (roles[Role.PREFILL], roles[Role.DECODE], roles[Role.MIXED])
        self._outcome.fleet.append(FleetSample(now, *counts, len(self._began_s)))
        self._core.tick(now)
        self._end_at_caps()
        self._steer()
        self._clock.after(self._options.heartbeat_s, self._beat)

    def _end_at_caps(self) -> None:
        """As a gateway does that asks for the instances at every heartbeat."""
        for view in self._core.instances(self._clock.now_s):
            if not view.output_caps:
                continue
            instance = self._instances[view.spec.id]
            for name, tokens in instance.answered().items():
                cap = view.output_caps.get(self._options.priority(self._decoding[name][0].trace))
                if cap is not None and tokens >= cap:
                    instance.end_now(name)

    def _report(self) -> None:
        answered = {name: one.answered() for name, one in self._instances.items()}
        for job, instance in self._decoding.values():
            self._reports.answered(job, answered[instance.name].get(job.name, 0))
        self._clock.after(self._options.report_s, self._report)

    # -- the life of a request ---------------------------------------------------------------------

    def _arrival(self, number: int, request: TraceRequest) -> Callable[[], None]:
        def arrive() -> None:
            job = SimRequest(f"r{number}", request, self._caches.keys(request))
            self._outcome.jobs.append(job)
            self._schedule(job)

        return arrive

    def _schedule(self, job: SimRequest) -> None:
        options = self._options
        request = Request(
            *(job.name, MODEL, job.trace.prompt_tokens, job.keys),
            objectives=Objectives(options.ttft_s, options.tbt_s),
            priority=options.priority(job.trace),
            output_class=options.output_class(job.trace),
        )
        outcome = self._core.schedule(request, self._clock.now_s)
        if isinstance(outcome, Rejection):
            job.rejected = outcome.reason
            self._left -= 1
            return
        job.decision = outcome
        job.cut_at(outcome.output_tokens_max)
        self._reports.begin(job)
        self._caches.fetch(job, lambda: self._instances[outcome.prefill].enqueue(job))

    def _began(self, job: SimRequest) -> None:
        self._reports.event(job, "prefill_began", self._caches.begin(job))

    def _next_prefill(self, instance: MixedInstance) -> str | None:
        return self._core.next_prefill(instance.name, self._clock.now_s)

    def _prefilled(self, instance: MixedInstance, job: SimRequest) -> None:
        """The first token is there, and the prompt's KV goes to the instance that decodes."""
        assert job.decision is not None
        job.first_token_s = self._clock.now_s
        self._reports.event(job, "prefill_done")
        self._reports.event(job, "first_token")
        decode = self._instances[job.decision.decode]
        if self._options.choose_decode is not None:
            able = [
                self._instances[view.spec.id]
                for view in self._core.instances(self._clock.now_s)
                if view.role is not Role.PREFILL
            ]
            decode = self._options.choose_decode(able, self._dice)
        self._decoding[job.name] = job, decode
        self._caches.put(instance.name, job)

        def arrived() -> None:
            self._reports.event(job, "handed_over")
            self._caches.put(decode.name, job)
            decode.join(job)

        nbytes = job.trace.prompt_tokens * self._options.token_bytes
        self._network.send(instance.name, decode.name, nbytes, arrived)

    def _ended(self, job: SimRequest) -> None:
        job.ended_s = self._clock.now_s
        del self._decoding[job.name]
        self._reports.finished(job)
        self._left -= 1
