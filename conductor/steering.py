"""What the conductor does about the pool as a whole, beside single requests. Pure.

Three things, each decided by a module of its own, and brought together here once a second: copies
of hot prefixes (`replication.py`), the emptying of nodes and instances (`draining.py`), and how
many instances do what (`planner.py`, `flips.py`). What comes out are orders for nodes and actions
on instances; whoever has connections carries them out and says how it went.
"""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass, field, replace
from itertools import count
from typing import TYPE_CHECKING

from .cluster import INSTANCES_MAX
from .draining import ENDED, InstanceDrain, NodeDrain, unique_in_hbm
from .errors import ConductorError, Conflict, InvalidRequest, UnknownNode
from .flips import Assign, Member, SetRole, Verify
from .leading import FlipsElsewhere
from .orders import LOST_S, Pool
from .planner import Meter, Planner
from .records import Status
from .replication import Replication
from .transfers import TIERS

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from .core import Conductor
    from .draining import Progress
    from .flips import Action, Flip
    from .leading import Lease
    from .orders import Ended, NodeSpace, Order
    from .planner import Plan
    from .records import Role

log = logging.getLogger("tiffin.conductor")

_DRAM = TIERS.index("dram")
# Drains that have ended stay to be looked at; the oldest leave. Each node's looks at all hot
# prefixes every second, so there may not be many; an instance's is a few numbers.
_NODE_DRAINS_MAX = 256
# What only an instance's HBM has is counted for people to look at; it costs a look at each hot
# block, which are up to `popularity.TRACKED_MAX`.
_COUNT_S = 10.0
# A model that has had neither instances nor requests for so long is forgotten: longer than a season
# of a day, and names of models that come and go do not add up.
_FORGET_S = 2 * 86_400.0

_LATENCY = ("c0", "c1", "c2", "d0", "d1", "d2")


@dataclass(slots=True)
class Steered:
    """What to do now: orders for nodes, and actions that need the instance itself."""

    orders: list[Order] = field(default_factory=list)
    actions: list[Action] = field(default_factory=list)


@dataclass(slots=True)
class _Planned:
    """One model's planner, and the interval that it is in. At `alive_at` it
    had instances, or a request."""

    planner: Planner
    meter: Meter
    next_at: float
    alive_at: float
    plan: Plan | None = None


class Steering:
    """For one conductor; call `tick` every second or so. Not thread-safe.

    Of several conductors the one that has the `lease` leads: only that one orders what nobody has
    asked for, copies of hot prefixes and flips that the planner wants. The others plan all the
    same, so that each of them can lead at once. Drains and flips that were asked for, and flips
    that have begun, are carried out by whoever has them, and flips of the dead by who leads.
    Without a lease this conductor is alone, and leads. `elsewhere` are the flips of others.
    """

    def __init__(self, core: Conductor) -> None:
        self._core = core
        self.lease: Lease | None = None
        self.elsewhere = FlipsElsewhere()
        self.replication = Replication(core.settings.replication)
        self._nodes: Mapping[str, NodeSpace] = {}  # as the directory had them last
        self._node_drains: dict[str, NodeDrain] = {}
        self._instance_drains: dict[str, InstanceDrain] = {}
        # Instances that were drained since their last flip began: no flip gives them work again.
        self._kept_out: set[str] = set()
        self._unique: dict[str, int] = {}  # hot blocks in an instance's HBM only, at `_counted_at`
        self._counted_at = -math.inf
        self._planned: dict[str, _Planned] = {}
        self._said_planning = False
        self._numbers = count(1)
        # Whose order each number is, what its owner calls it, and until when it is believed in.
        self._owners: dict[int, tuple[Replication | NodeDrain, int, float]] = {}

    def configure(self) -> None:
        """Settings have changed."""
        self._said_planning = False
        self.replication.settings = self._core.settings.replication
        for planned in self._planned.values():
            planned.planner.configure(self._core.settings.planner)

    # -- what is observed --------------------------------------------------------------------------

    def came(self, model: str, prompt_tokens: int, computed_tokens: int, now: float) -> None:
        """A request was placed."""
        self._plans_of(model, now).meter.came(prompt_tokens, computed_tokens)

    def answered(self, model: str, output_tokens: int, now: float) -> None:
        """A request has ended, with so many tokens."""
        self._plans_of(model, now).meter.answered(output_tokens)

    def flips_elsewhere(self, instance: str, role: Role | None, by: str, now: float) -> None:
        """Another conductor says later than anybody that it, `by`, gives an instance this role; or
        (None) that nobody flips it. A flip of our own gives way: two would end at odds."""
        if role is not None:
            self.elsewhere.put(instance, role, by, now)
            for planned in self._planned.values():
                planned.planner.flips.forget(instance, now, f"{by} flips it")
        elif self.elsewhere.pop(instance):
            spec = self._core.cluster.spec(instance)
            self._plans_of(spec.model, now).planner.flipped_elsewhere(now)

    def keep_out(self, instance: str, now: float) -> None:
        """Somebody drains an instance: no flip gives it work again, and one of which it was not
        told is given up."""
        self._kept_out.add(instance)
        for planned in self._planned.values():
            planned.planner.flips.cancel(instance, now, "it is drained")

    # -- what is wanted ----------------------------------------------------------------------------

    def drain_node(self, node: str, now: float, deadline_s: float | None = None) -> None:
        """Empty a node: it takes nothing new, its hot and unique blocks first, then the rest. One
        that is being emptied goes on as it was asked to. Raises UnknownNode, Conflict while it is
        still being told to take new blocks again, and InvalidRequest when too many are drained."""
        self._check_node(node)
        drain = self._node_drains.get(node)
        if drain is not None and drain.opening:
            raise Conflict(f"{node!r} is just being told to take new blocks again: ask in a second")
        if drain is None or drain.phase in ENDED:
            going = sum(one.phase not in ENDED for one in self._node_drains.values())
            if going >= _NODE_DRAINS_MAX:
                raise InvalidRequest(
                    f"{_NODE_DRAINS_MAX} nodes are being drained, which is the limit: wait for one"
                )
            self._begin_drain(node, now, deadline_s)

    def undrain_node(self, node: str, now: float) -> None:
        """A node is to take new blocks again, whether its drain is under way here, has ended, or
        was asked for elsewhere. Raises UnknownNode."""
        if node not in self._node_drains:
            self._check_node(node)
            self._begin_drain(node, now)
        self._node_drains[node].cancel()

    def drain_instance(self, instance: str, now: float, deadline_s: float | None = None) -> None:
        """Follow an instance that is given nothing new until its requests have ended."""
        self.keep_out(instance, now)
        self.elsewhere.pop(instance)  # whoever flips it hears that it is drained
        drain = self._instance_drains.get(instance)
        if drain is None or drain.phase in ENDED:
            _make_room(self._instance_drains, instance, INSTANCES_MAX)
            settings = self._core.settings.draining
            self._instance_drains[instance] = InstanceDrain(
                instance, now, settings, deadline_s=deadline_s
            )

    def flip(self, instance: str, role: Role, now: float, why: str = "asked for") -> list[Action]:
        """Change an instance's role by the protocol: nothing new, drain, commit, verify. Raises
        UnknownInstance, and Conflict if it can't be now."""
        model = self._core.cluster.spec(instance).model
        planned = self._plans_of(model, now)
        actions = planned.planner.flips.begin(instance, role, self.fleet(model), now, why)
        return self._carried(planned, actions, now)

    def committed(self, instance: str, now: float, error: str = "") -> list[Action]:
        """What came of a SetRole that was handed out."""
        planned = self._plans_of(self._core.cluster.spec(instance).model, now)
        return self._carried(planned, planned.planner.flips.committed(instance, now, error), now)

    def verified(self, instance: str, now: float, error: str = "") -> list[Action]:
        """What came of a Verify that was handed out."""
        planned = self._plans_of(self._core.cluster.spec(instance).model, now)
        return self._carried(planned, planned.planner.flips.verified(instance, now, error), now)

    def node_drain(self, node: str, now: float) -> Progress:
        """How far a node's is, or was. Raises UnknownNode if there is none."""
        drain = self._node_drains.get(node)
        if drain is None:
            raise UnknownNode(f"{node!r} was not drained here")
        return drain.progress(now)

    def drains(self, now: float) -> list[Progress]:
        """How far all drains are, also those that have ended."""
        nodes = [drain.progress(now) for drain in self._node_drains.values()]
        return nodes + [drain.progress(now) for drain in self._instance_drains.values()]

    def plans(self) -> dict[str, Plan]:
        """The last plan of each model, with every number behind it."""
        return {model: one.plan for model, one in self._planned.items() if one.plan is not None}

    def flips(self) -> list[Flip]:
        """Flips of ours that have ended, then those under way, each oldest first."""
        every = [planned.planner.flips for planned in self._planned.values()]
        return [flip for one in every for flip in one.ended] + self._under_way()

    def flipping(self) -> dict[str, tuple[Role, str]]:
        """Instances that are given another role, by whom: by a conductor's name, "" for us."""
        found = {name: flip for name in self.elsewhere if (flip := self.elsewhere.get(name))}
        return found | {flip.instance: (flip.new, "") for flip in self._under_way()}

    def leads(self, now: float) -> bool:
        """Whether what is planned here is ordered."""
        return self.lease is None or self.lease.holds(now)

    # -- time --------------------------------------------------------------------------------------

    def tick(self, nodes: Mapping[str, NodeSpace] | None, now: float) -> Steered:
        """What to do now, with the nodes as the directory has them. None: it does not answer, and
        nothing is ordered of nodes."""
        steered = Steered()
        self._core.arrivals.count(now)
        if nodes is not None:
            self._nodes = nodes
        pool = self._pool(self._nodes, now)
        self._give_up_lost(now)
        leads = self.leads(now)
        if nodes and leads:
            steered.orders += self._numbered(
                self.replication, self.replication.plan(pool, now), now
            )
        for drain in self._node_drains.values():
            orders = drain.step(None if nodes is None else pool, now)
            steered.orders += self._numbered(drain, orders, now)
        self._step_instances(pool, now)
        self._kept_out = {name for name in self._kept_out if name in self._core.cluster}
        for name in self.elsewhere:
            if name not in self._core.cluster:
                self.elsewhere.pop(name)
        if leads:
            steered.actions += self._go_on_for_the_dead(now)
        steered.actions += self._plan_all(now)
        return steered

    def ended(self, outcome: Ended, now: float) -> None:
        """An order was carried out, or failed."""
        owner, number, _ = self._owners.pop(outcome.number, (None, 0, 0.0))
        if owner is not None:
            owner.ended(replace(outcome, number=number), now)

    def fleet(self, model: str) -> list[Member]:
        """A model's instances, with the requests that each has in flight."""
        return self._fleets((model,))[model]

    # -- inside ------------------------------------------------------------------------------------

    def _check_node(self, node: str) -> None:
        """Raises UnknownNode."""
        if node not in self._nodes:
            why = "" if self._nodes else ": the conductor knows no nodes (`--directory`)"
            raise UnknownNode(f"no node {node!r} is in the pool now{why}")

    def _begin_drain(self, node: str, now: float, deadline_s: float | None = None) -> None:
        _make_room(self._node_drains, node, _NODE_DRAINS_MAX)
        settings = self._core.settings.draining
        numbers = count(1)  # its own begin anew; ours tell them apart
        self._node_drains[node] = NodeDrain(
            node, now, lambda: next(numbers), settings, deadline_s=deadline_s
        )

    def _under_way(self) -> list[Flip]:
        every = self._planned.values()
        return [flip for planned in every for flip in planned.planner.flips.under_way]

    def _go_on_for_the_dead(self, now: float) -> list[Action]:
        """Flips whose conductor has died are ours: nobody else would give their instances work."""
        actions: list[Action] = []
        for name, role in self.elsewhere.orphans(now):
            self.elsewhere.pop(name)
            model = self._core.cluster.spec(name).model
            planned = self._plans_of(model, now)
            why = "the conductor that had begun it is dead"
            todo = planned.planner.flips.resume(name, role, self.fleet(model), now, why)
            actions += self._carried(planned, todo, now)
        return actions

    def _plans_of(self, model: str, now: float) -> _Planned:
        planned = self._planned.get(model)
        if planned is None:
            settings = self._core.settings.planner
            planner = Planner(settings, self.elsewhere)
            planned = _Planned(planner, Meter(now), now + settings.interval_s, now)
            self._planned[model] = planned
        planned.alive_at = now
        return planned

    def _fleets(self, models: Collection[str]) -> dict[str, list[Member]]:
        """The instances of each of these models, in one pass over all."""
        cluster = self._core.cluster
        columns = [getattr(cluster, name).tolist() for name in _LATENCY]
        fleets: dict[str, list[Member]] = {model: [] for model in models}
        for row, spec in enumerate(cluster.specs):
            fleet = fleets.get(spec.model) if spec is not None else None
            if spec is not None and fleet is not None:
                fleet.append(
                    Member(
                        spec.id,
                        cluster.role(row),
                        cluster.status[row] is Status.READY,
                        self._core.requests_at(spec.id),
                        tuple([column[row] for column in columns]),
                        spec.kv_capacity_tokens,
                        spec.batch_max,
                        cluster.status[row] is Status.LOST,
                    )
                )
        return fleets

    def _plan_all(self, now: float) -> list[Action]:
        """Go on with flips, and plan for the models whose interval has ended."""
        due = {
            model: planned
            for model, planned in self._planned.items()
            if now >= planned.next_at or planned.planner.flips.under_way
        }
        if not due:
            return []
        actions: list[Action] = []
        for model, fleet in self._fleets(due).items():
            planned = due[model]
            actions += self._carried(planned, planned.planner.flips.tick(fleet, now), now)
            if fleet:
                planned.alive_at = now
            elif now > planned.alive_at + _FORGET_S:
                del self._planned[model]
            if now >= planned.next_at:
                actions += self._plan(model, planned, fleet, now)
        return actions

    def _plan(
        self, model: str, planned: _Planned, fleet: Sequence[Member], now: float
    ) -> list[Action]:
        planner = planned.planner
        planned.next_at = now + self._core.settings.planner.interval_s
        planner.observe(planned.meter.close(now))
        plan, trouble = None, ""
        try:
            plan = planner.plan(fleet, now, leads=self.leads(now))
            if planner.forecast_error:
                trouble = f"the constant predictor stands in: {planner.forecast_error}"
        except (ConductorError, ValueError, ArithmeticError) as error:
            # Advice that can't be given must not keep nodes from being drained.
            trouble = f"no plan: {str(error) or type(error).__name__}"
        if trouble and not self._said_planning:
            self._said_planning = True
            log.warning("planning for %s: %s", model, trouble)
        if plan is None:
            return []
        planned.plan = plan
        return self._carried(planned, list(plan.actions), now)

    def _carried(self, planned: _Planned, actions: Sequence[Action], now: float) -> list[Action]:
        """Do what can be done here; what is left needs the instance. One that does not say where it
        is told its role (label "role_url") needs not to be told."""
        left: list[Action] = []
        todo = list(actions)
        while todo:
            action = todo.pop(0)
            if action.instance not in self._core.cluster:
                continue
            if isinstance(action, Assign):
                self._assign(action)
                continue
            if isinstance(action, SetRole):
                row = self._core.cluster.row(action.instance)
                self._core.cluster.set_role(row, action.role)
            if self._core.cluster.spec(action.instance).labels.get("role_url"):
                left.append(action)
            elif isinstance(action, Verify):
                todo += planned.planner.flips.verified(action.instance, now)
            else:
                todo += planned.planner.flips.committed(action.instance, now)
        return left

    def _assign(self, action: Assign) -> None:
        name = action.instance
        if not action.on:
            # It was ready, so whoever had drained it before has let it work again.
            self._kept_out.discard(name)
            self._core.cluster.assign(name, on=False)
        elif name not in self._kept_out:
            self._core.cluster.assign(name, on=True)

    def _pool(self, nodes: Mapping[str, NodeSpace], now: float) -> Pool:
        core = self._core

        def seconds(source: str, target: str, nbytes: int) -> float:
            numbers = core.cluster.find_node(source), core.cluster.find_node(target)
            return float(core.transfers.seconds(numbers[0], _DRAM, numbers[1], nbytes, now))

        def serving(model: str) -> set[str]:
            specs = map(core.cluster.spec, core.cluster.names)
            return {spec.node for spec in specs if spec.node and model in ("", spec.model)}

        return Pool(nodes, core.index, core.popularity, seconds, serving)

    def _step_instances(self, pool: Pool, now: float) -> None:
        going = [drain for drain in self._instance_drains.values() if drain.phase not in ENDED]
        if not going:
            return
        if now >= self._counted_at + _COUNT_S:
            self._counted_at = now
            hot = self._core.popularity.hot(self._core.settings.draining.hot_max, now)
            self._unique = unique_in_hbm(hot, pool)
        for drain in going:
            name = drain.instance
            here = name in self._core.cluster
            if here and self._core.cluster.status[self._core.cluster.row(name)] is Status.LOST:
                here = False  # nobody knows whether its requests go on
            requests = self._core.requests_at(name) if here else None
            drain.step(requests, now, unique_blocks=self._unique.get(name, 0))

    def _numbered(
        self, owner: Replication | NodeDrain, orders: Sequence[Order], now: float
    ) -> list[Order]:
        """The orders under numbers that are unique here."""
        numbered = []
        for order in orders:
            number = next(self._numbers)
            self._owners[number] = owner, order.number, now + 2 * LOST_S
            numbered.append(replace(order, number=number))
        return numbered

    def _give_up_lost(self, now: float) -> None:
        """Their owners have given them up before."""
        while self._owners:
            number, (_, _, until) = next(iter(self._owners.items()))
            if until > now:
                return
            del self._owners[number]


def _make_room(
    drains: dict[str, NodeDrain] | dict[str, InstanceDrain], name: str, most: int
) -> None:
    """For one more, as the latest: what this one was before leaves, and the oldest that has ended;
    if none has, the oldest, for there are more than there can be instances."""
    drains.pop(name, None)
    if len(drains) >= most:
        ended = (one for one, drain in drains.items() if drain.phase in ENDED)
        del drains[next(ended, next(iter(drains)))]
