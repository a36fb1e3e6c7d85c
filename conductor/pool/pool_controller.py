"""The conductor's control loop over the whole pool, apart from placing requests. Pure.

Once a second it combines three parts, each with a module of its own: replication of hot prefixes
(`replication.py`), draining of nodes and instances (`draining.py`), and the number of instances in
each role (`planner.py`, `role_flip.py`). The results are orders for nodes and actions on instances;
the service carries them out over its connections and reports the outcomes back.
"""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass, field, replace
from itertools import count
from typing import TYPE_CHECKING

import numpy as np

from ..cost.transfer_model import TIERS
from ..errors import ConductorError, Conflict, InvalidRequest, UnknownNode
from ..records import Status
from ..state.allowed_hosts import ROLE_LABEL
from ..state.instance_table import INSTANCES_MAX
from ..state.sliced_work import finished
from .draining import ENDED, InstanceDrain, NodeDrain, unique_in_hbm
from .instance_orders import SaveBlocks, carries_out
from .leader import FlipsElsewhere
from .orders import LOST_S, PoolView
from .planner import Meter, Planner
from .replication import Replication
from .role_flip import Assign, FleetMember, SetRole, Verify

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from ..core.conductor import Conductor
    from ..records import Role
    from ..state.sliced_work import Work
    from .demand_forecast import DemandForecast, DemandQuestion
    from .draining import Progress
    from .instance_orders import HandOverRequest, RebindRequest
    from .leader import LeaderLease
    from .orders import Ended, NodeSpace, Order
    from .planner import FleetPlan
    from .popularity import Group
    from .prompt_sums import PromptSums
    from .role_flip import Action, Flip

log = logging.getLogger("tiffin.conductor")

_DRAM = TIERS.index("dram")
# The most node drains that are kept. Ended drains stay listed, and the oldest of them leave first.
# Each node drain reads all hot prefixes every second, hence the limit; an instance drain is small.
_NODE_DRAINS_MAX = 256
# Between counts of the hot blocks that only an instance's HBM has, which are for operators; a count
# looks up each hot block, up to `popularity.TRACKED_MAX` of them.
_COUNT_S = 10.0
# Instances that a plan reads in one piece, before it yields.
_ROWS_AT_ONCE = 128
# A model without instances and requests for so long is forgotten, so that names of models do not
# accumulate; longer than a season of a day.
_FORGET_S = 2 * 86_400.0

_LATENCY = ("c0", "c1", "c2", "d0", "d1", "d2")


@dataclass(slots=True)
class Steered:
    """The results of a tick: orders for nodes, actions that need a call to the instance, orders to
    instances about requests, and forecasts that are too slow to run inside the tick."""

    orders: list[Order] = field(default_factory=list)
    actions: list[Action] = field(default_factory=list)
    hand_overs: list[HandOverRequest] = field(default_factory=list)
    rebinds: list[RebindRequest] = field(default_factory=list)
    # By model: its plan waits for the answer, which the caller passes to `forecasted`.
    questions: dict[str, DemandQuestion] = field(default_factory=dict)


@dataclass(slots=True)
class _Planned:
    """One model's planner, and its current interval. `alive_at` is when the model last had
    instances, or a request."""

    planner: Planner
    meter: Meter
    next_at: float
    alive_at: float
    plan: FleetPlan | None = None
    asked: bool = False  # a forecast was requested and has not arrived yet


class Steering:
    """The pool's control loop in one conductor; call `tick` every second or so. Not thread-safe.

    Of several conductors the one that holds the `lease` leads: only the leader begins replication
    of hot prefixes and flips that the planner wants. The others plan as well, so that each of them
    can lead at once. A conductor carries out the drains and flips that an operator requested of it,
    and the flips that it has begun; the leader continues the flips of conductors that have died.
    Without a lease object this conductor is alone, and leads. `elsewhere` has the flips of other
    conductors.
    """

    def __init__(self, core: Conductor) -> None:
        self._core = core
        self.lease: LeaderLease | None = None
        self.elsewhere = FlipsElsewhere()
        self.replication = Replication(core.settings.replication)
        self._nodes: Mapping[str, NodeSpace] = {}  # the directory's last answer
        self._node_drains: dict[str, NodeDrain] = {}
        self._instance_drains: dict[str, InstanceDrain] = {}
        # Instances drained since their last flip began: no flip may assign them requests again.
        self._kept_out: set[str] = set()
        self._unique: dict[str, int] = {}  # hot blocks in an instance's HBM only, at `_counted_at`
        self._counted_at = -math.inf
        self._planned: dict[str, _Planned] = {}
        self._said_planning = False
        self._numbers = count(1)
        # For each order's number: its owner, the owner's own number for it, and when it expires.
        self._owners: dict[int, tuple[Replication | NodeDrain, int, float]] = {}

    def configure(self) -> None:
        """Apply changed settings."""
        self._said_planning = False
        self.replication.settings = self._core.settings.replication
        for planned in self._planned.values():
            planned.planner.configure(self._core.settings.planner)

    # -- what is observed --------------------------------------------------------------------------

    def came(self, model: str, prompts: PromptSums, now: float) -> None:
        """Record requests that were offered here, or to another conductor, whether they were placed
        or refused."""
        self._plans_of(model, now).meter.came(prompts)

    def answered(self, model: str, output_tokens: int, now: float) -> None:
        """Record that a request has ended, with so many output tokens."""
        self._plans_of(model, now).meter.answered(output_tokens)

    def flips_elsewhere(self, instance: str, role: Role | None, by: str, now: float) -> None:
        """Record the latest report about an instance: the conductor `by` flips it to this role, or
        (None) no conductor flips it. A flip of our own is given up, because two flips of one
        instance would conflict."""
        if role is not None:
            self.elsewhere.put(instance, role, by, now)
            for planned in self._planned.values():
                planned.planner.flips.forget(instance, now, f"{by} flips it")
        elif self.elsewhere.pop(instance):
            spec = self._core.cluster.spec(instance)
            self._plans_of(spec.model, now).planner.flipped_elsewhere(now)

    def keep_out(self, instance: str, now: float) -> None:
        """An instance is being drained: no flip may assign it requests again, and a flip that has
        not sent its new role yet is cancelled."""
        self._kept_out.add(instance)
        for planned in self._planned.values():
            planned.planner.flips.cancel(instance, now, "it is drained")

    # -- what is wanted ----------------------------------------------------------------------------

    def drain_node(self, node: str, now: float, deadline_s: float | None = None) -> None:
        """Drain a node: it refuses new blocks, and its unique blocks are moved, the hot ones first.
        A drain that is under way continues unchanged. Raises UnknownNode, Conflict while the node
        is still being ordered to accept new blocks again after a cancelled drain, and
        InvalidRequest when too many nodes are being drained."""
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
        """Cancel a drain: the node accepts new blocks again, whether its drain is under way here,
        has ended, or was requested from another conductor. Raises UnknownNode."""
        if node not in self._node_drains:
            self._check_node(node)
            self._begin_drain(node, now)
        self._node_drains[node].cancel()

    def drain_instance(self, instance: str, now: float, deadline_s: float | None = None) -> None:
        """Follow the drain of an instance until its in-flight requests have ended."""
        self.keep_out(instance, now)
        self.elsewhere.pop(instance)  # a conductor that flips it learns of the drain by its record
        drain = self._instance_drains.get(instance)
        if drain is None or drain.phase in ENDED:
            _make_room(self._instance_drains, instance, INSTANCES_MAX)
            settings = self._core.settings.draining
            self._instance_drains[instance] = InstanceDrain(
                instance, now, settings, deadline_s=deadline_s
            )

    def flip(self, instance: str, role: Role, now: float, why: str = "asked for") -> list[Action]:
        """Begin a role flip: no new requests, drain, commit, verify. Raises UnknownInstance, and
        Conflict if the flip can't begin now."""
        model = self._core.cluster.spec(instance).model
        planned = self._plans_of(model, now)
        actions = planned.planner.flips.begin(instance, role, self.fleet(model), now, why)
        return self._carried(planned, actions, now)

    def saved(self, instance: str, now: float, error: str = "") -> list[Action]:
        """Record the outcome of a SaveBlocks action; returns the next actions."""
        planned = self._plans_of(self._core.cluster.spec(instance).model, now)
        return self._carried(planned, planned.planner.flips.saved(instance, now, error), now)

    def committed(self, instance: str, now: float, error: str = "") -> list[Action]:
        """Record the outcome of a SetRole action; returns the next actions."""
        planned = self._plans_of(self._core.cluster.spec(instance).model, now)
        return self._carried(planned, planned.planner.flips.committed(instance, now, error), now)

    def verified(self, instance: str, now: float, error: str = "") -> list[Action]:
        """Record the outcome of a Verify action; returns the next actions."""
        planned = self._plans_of(self._core.cluster.spec(instance).model, now)
        return self._carried(planned, planned.planner.flips.verified(instance, now, error), now)

    def node_drain(self, node: str, now: float) -> Progress:
        """Progress of a node's drain, also an ended one. Raises UnknownNode if there is none."""
        drain = self._node_drains.get(node)
        if drain is None:
            raise UnknownNode(f"{node!r} was not drained here")
        return drain.progress(now)

    def drains(self, now: float) -> list[Progress]:
        """Progress of all drains, also those that have ended."""
        nodes = [drain.progress(now) for drain in self._node_drains.values()]
        return nodes + [drain.progress(now) for drain in self._instance_drains.values()]

    def plans(self) -> dict[str, FleetPlan]:
        """The last plan of each model, with the reasons for it."""
        return {model: one.plan for model, one in self._planned.items() if one.plan is not None}

    def flips(self) -> list[Flip]:
        """This conductor's flips: the ended ones, then those under way, each oldest first."""
        every = [planned.planner.flips for planned in self._planned.values()]
        return [flip for one in every for flip in one.ended] + self._under_way()

    def flipping(self) -> dict[str, tuple[Role, str]]:
        """Instances in a role flip, each with its new role and the name of the conductor that flips
        it, "" for this one."""
        found = {name: flip for name in self.elsewhere if (flip := self.elsewhere.get(name))}
        return found | {flip.instance: (flip.new, "") for flip in self._under_way()}

    def leads(self, now: float) -> bool:
        """Whether this conductor leads, and so sends orders for what it plans."""
        return self.lease is None or self.lease.holds(now)

    # -- time --------------------------------------------------------------------------------------

    def tick(
        self, nodes: Mapping[str, NodeSpace] | None, now: float, *, ask: bool = False
    ) -> Steered:
        """The orders and actions due now, with the `nodes` that the directory lists; None if the
        directory does not answer, and then no orders for nodes are made. With `ask`, slow forecasts
        are returned as questions for the caller; otherwise they are computed here."""
        return finished(self.ticking(nodes, now, ask=ask))

    def ticking(
        self, nodes: Mapping[str, NodeSpace] | None, now: float, *, ask: bool = False
    ) -> Work[Steered]:
        """`tick` in pieces. Between two of them the caller may place requests and call any method
        but `ended`, which it calls only before or after the whole tick."""
        steered = Steered()
        yield from self._core.arrivals.counting(now)
        if nodes is not None:
            self._nodes = nodes
        pool = self._pool(self._nodes, now)
        self._give_up_lost(now)
        leads = self.leads(now)
        if nodes and leads:
            copies = yield from self.replication.planning(pool, now)
            steered.orders += self._numbered(self.replication, copies, now)
        for drain in list(self._node_drains.values()):
            orders = yield from drain.stepping(None if nodes is None else pool, now)
            steered.orders += self._numbered(drain, orders, now)
        yield from self._step_instances(pool, now)
        self._kept_out = {name for name in self._kept_out if name in self._core.cluster}
        for name in self.elsewhere:
            if name not in self._core.cluster:
                self.elsewhere.pop(name)
        if leads:
            steered.actions += self._go_on_for_the_dead(now)
        yield from self._plan_all(steered, now, ask=ask)
        yield from self._hand_over(steered, now)
        yield
        steered.rebinds += self._core.rebinder.due(now)
        return steered

    def ended(self, outcome: Ended, now: float) -> None:
        """Record the outcome of an order: carried out, or failed."""
        whole = None if outcome.error else now
        self._core.bookings.carried_out(outcome.number, outcome.blocks, whole)
        owner, number, _ = self._owners.pop(outcome.number, (None, 0, 0.0))
        if owner is not None:
            owner.ended(replace(outcome, number=number), now)

    def forecasted(self, model: str, forecast: DemandForecast, now: float) -> list[Action]:
        """Take the answer to a question of `tick`; returns the actions of the plan that waited."""
        return finished(self.taking_forecast(model, forecast, now))

    def taking_forecast(
        self, model: str, forecast: DemandForecast, now: float
    ) -> Work[list[Action]]:
        """`forecasted` in pieces."""
        planned = self._planned.get(model)
        if planned is None or not planned.asked:
            return []
        planned.asked = False
        fleets = yield from self._fleets((model,))
        return (yield from self._plan(model, planned, fleets[model], now, forecast))

    def fleet(self, model: str) -> list[FleetMember]:
        """A model's instances, with the number of in-flight requests of each."""
        return finished(self._fleets((model,)))[model]

    # -- inside ------------------------------------------------------------------------------------

    def _check_node(self, node: str) -> None:
        """Raises UnknownNode."""
        if node not in self._nodes:
            why = "" if self._nodes else ": the conductor knows no nodes (`--directory`)"
            raise UnknownNode(f"no node {node!r} is in the pool now{why}")

    def _begin_drain(self, node: str, now: float, deadline_s: float | None = None) -> None:
        _make_room(self._node_drains, node, _NODE_DRAINS_MAX)
        settings = self._core.settings.draining
        numbers = count(1)  # each drain counts from 1; `_numbered` makes its numbers unique
        self._node_drains[node] = NodeDrain(
            node, now, lambda: next(numbers), settings, deadline_s=deadline_s
        )

    def _under_way(self) -> list[Flip]:
        every = self._planned.values()
        return [flip for planned in every for flip in planned.planner.flips.under_way]

    def _go_on_for_the_dead(self, now: float) -> list[Action]:
        """Take over flips whose conductor has died: otherwise their instances would never be
        assigned requests again."""
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

    def _fleets(self, models: Collection[str]) -> Work[dict[str, list[FleetMember]]]:
        """The instances of each of these models, in one pass over all instances."""
        cluster = self._core.cluster
        columns = [getattr(cluster, name).tolist() for name in _LATENCY]
        fleets: dict[str, list[FleetMember]] = {model: [] for model in models}
        for row, spec in enumerate(list(cluster.specs)):
            if row % _ROWS_AT_ONCE == _ROWS_AT_ONCE - 1:
                yield
            if spec is None or cluster.specs[row] is not spec:
                continue  # the instance has left, maybe between two pieces
            fleet = fleets.get(spec.model)
            if fleet is not None:
                fleet.append(
                    FleetMember(
                        spec.id,
                        cluster.role(row),
                        cluster.status[row] is Status.READY,
                        self._core.requests_at(spec.id),
                        tuple([column[row] for column in columns]),
                        spec.kv_capacity_tokens,
                        spec.batch_max,
                        cluster.status[row] is Status.LOST,
                        carries_out(spec, "save"),
                    )
                )
        return fleets

    def _plan_all(self, steered: Steered, now: float, *, ask: bool) -> Work[None]:
        """Advance flips, and plan for the models whose interval has ended."""
        due = {
            model: planned
            for model, planned in self._planned.items()
            if now >= planned.next_at or planned.planner.flips.under_way
        }
        if not due:
            return
        fleets = yield from self._fleets(due)
        for model, fleet in fleets.items():
            yield
            planned = due[model]
            todo = planned.planner.flips.tick(fleet, now)
            steered.actions += self._carried(planned, todo, now)
            if fleet:
                planned.alive_at = now
            elif now > planned.alive_at + _FORGET_S:
                self._planned.pop(model, None)
            if now >= planned.next_at:
                planned.next_at = now + self._core.settings.planner.interval_s
                planned.planner.observe(planned.meter.close(now))
                question = planned.planner.question()
                if not (ask and question.slow):
                    steered.actions += yield from self._plan(model, planned, fleet, now)
                elif not planned.asked:
                    planned.asked = True
                    steered.questions[model] = question

    def _hand_over(self, steered: Steered, now: float) -> Work[None]:
        """Let our own requests at instances that change their roles go on elsewhere, whoever
        flips them."""
        if self._core.settings.planner.flips.requests == "hand_over":
            for name in self.flipping():
                yield
                if name in self._core.cluster:
                    steered.hand_overs += self._core.moves.begin(name, now)

    def _plan(
        self,
        model: str,
        planned: _Planned,
        fleet: Sequence[FleetMember],
        now: float,
        forecast: DemandForecast | None = None,
    ) -> Work[list[Action]]:
        planner = planned.planner
        plan, trouble = None, ""
        try:
            leads = self.leads(now)
            plan = yield from planner.planning(fleet, now, leads=leads, forecast=forecast)
            if planner.forecast_error:
                trouble = f"the constant predictor stands in: {planner.forecast_error}"
        except (ConductorError, ValueError, ArithmeticError) as error:
            # A planner that fails must not keep nodes from being drained.
            trouble = f"no plan: {str(error) or type(error).__name__}"
        if trouble and not self._said_planning:
            self._said_planning = True
            log.warning("planning for %s: %s", model, trouble)
        if plan is None:
            return []
        planned.plan = plan
        return self._carried(planned, list(plan.actions), now)

    def _carried(self, planned: _Planned, actions: Sequence[Action], now: float) -> list[Action]:
        """Carry out the actions that need no call to an instance; returns the others. An instance
        without the label "role_url" needs no call: its SetRole and Verify succeed at once."""
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
            told = self._core.cluster.spec(action.instance).labels.get(ROLE_LABEL)
            if told or isinstance(action, SaveBlocks):
                left.append(action)
            elif isinstance(action, Verify):
                todo += planned.planner.flips.verified(action.instance, now)
            else:
                todo += planned.planner.flips.committed(action.instance, now)
        return left

    def _assign(self, action: Assign) -> None:
        name = action.instance
        if not action.on:
            # It was ready when the flip began, so any earlier drain of it has been undone.
            self._kept_out.discard(name)
            self._core.unassign(name)
        elif name not in self._kept_out:
            self._core.cluster.assign(name, on=True)

    def _pool(self, nodes: Mapping[str, NodeSpace], now: float) -> PoolView:
        core = self._core

        def seconds(sources: Sequence[str], target: str, nbytes: int) -> list[float]:
            numbers = np.array([core.cluster.find_node(name) for name in sources])
            to = core.cluster.find_node(target)
            found: list[float] = core.transfers.seconds(numbers, _DRAM, to, nbytes, now).tolist()
            return found

        def serving(group: Group) -> set[str]:
            cluster = core.cluster
            return {
                spec.node
                for spec, space in zip(cluster.specs, cluster.key_spaces, strict=True)
                if spec is not None
                and spec.node
                and group.model in ("", spec.model)
                and group.space in ("", space)
            }

        return PoolView(nodes, core.index, core.popularity, seconds, serving)

    def _step_instances(self, pool: PoolView, now: float) -> Work[None]:
        going = [drain for drain in self._instance_drains.values() if drain.phase not in ENDED]
        if not going:
            return
        if now >= self._counted_at + _COUNT_S:
            self._counted_at = now
            hot = yield from pool.finding_hot(self._core.settings.draining.hot_max, now)
            self._unique = yield from unique_in_hbm(hot, pool)
        for drain in going:
            name = drain.instance
            here = name in self._core.cluster
            if here and self._core.cluster.status[self._core.cluster.row(name)] is Status.LOST:
                here = False  # without heartbeats it is unknown whether its requests go on
            requests = self._core.requests_at(name) if here else None
            drain.step(requests, now, unique_blocks=self._unique.get(name, 0))

    def _numbered(
        self, owner: Replication | NodeDrain, orders: Sequence[Order], now: float
    ) -> list[Order]:
        """The orders with new numbers that are unique among all owners."""
        numbered = []
        for order in orders:
            number = next(self._numbers)
            self._owners[number] = owner, order.number, now + 2 * LOST_S
            numbered.append(replace(order, number=number))
            self._core.bookings.ordered(numbered[-1], now)
        return numbered

    def _give_up_lost(self, now: float) -> None:
        """Forget expired orders; their owners have given them up before."""
        while self._owners:
            number, (_, _, until) = next(iter(self._owners.items()))
            if until > now:
                return
            del self._owners[number]
            self._core.bookings.carried_out(number, 0, None)


def _make_room(
    drains: dict[str, NodeDrain] | dict[str, InstanceDrain], name: str, most: int
) -> None:
    """Make room for a new drain of `name`: its previous drain is removed, and if the table is full,
    the oldest ended drain; if none has ended, the oldest, since there are then more drains than
    there can be instances."""
    drains.pop(name, None)
    if len(drains) >= most:
        ended = (one for one, drain in drains.items() if drain.phase in ENDED)
        del drains[next(ended, next(iter(drains)))]
