"""What the conductor does about the pool as a whole, beside single requests. Pure.

Three things, each decided by a module of its own, and brought together here once a second: copies
of hot prefixes (`replication.py`), the emptying of nodes and instances (`draining.py`), and how
many instances do what (`planner.py`, `flips.py`). What comes out are orders for nodes and actions
on instances; whoever has connections carries them out and says how it went.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from itertools import count
from typing import TYPE_CHECKING

from .draining import ENDED, InstanceDrain, NodeDrain, unique_in_hbm
from .errors import InvalidRequest
from .flips import Assign, Member, SetRole, Verify
from .orders import LOST_S, Pool
from .planner import Meter, Planner
from .records import Status
from .replication import Replication
from .transfers import TIERS

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from .core import Conductor
    from .draining import Progress
    from .flips import Action
    from .orders import Ended, NodeSpace, Order
    from .planner import Plan
    from .records import Role

_DRAM = TIERS.index("dram")
# Drains that have ended stay to be looked at; the oldest leave.
_DRAINS_MAX = 256


@dataclass(slots=True)
class Steered:
    """What to do now: orders for nodes, and actions that need the instance itself."""

    orders: list[Order] = field(default_factory=list)
    actions: list[Action] = field(default_factory=list)


@dataclass(slots=True)
class _Planned:
    """One model's planner, and the interval that it is in."""

    planner: Planner
    meter: Meter
    next_at: float
    plan: Plan | None = None


class Steering:
    """For one conductor; call `tick` every second or so. Not thread-safe."""

    def __init__(self, core: Conductor) -> None:
        self._core = core
        self.replication = Replication(core.settings.replication)
        self._node_drains: dict[str, NodeDrain] = {}
        self._instance_drains: dict[str, InstanceDrain] = {}
        self._planned: dict[str, _Planned] = {}
        self._numbers = count(1)
        # Whose order each number is, what its owner calls it, and until when it is believed in.
        self._owners: dict[int, tuple[Replication | NodeDrain, int, float]] = {}

    def configure(self) -> None:
        """Settings have changed."""
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

    # -- what is wanted ----------------------------------------------------------------------------

    def drain_node(self, node: str, now: float, deadline_s: float | None = None) -> None:
        """Empty a node: it takes nothing new, its hot and unique blocks first, then the rest."""
        drain = self._node_drains.get(node)
        if drain is None or drain.phase in ENDED:
            settings = self._core.settings.draining
            # Its own numbers begin anew; ours tell them apart.
            numbers = count(1)
            self._node_drains[node] = NodeDrain(
                node, now, lambda: next(numbers), settings, deadline_s=deadline_s
            )
            self._bound(self._node_drains)

    def drain_instance(self, instance: str, now: float, deadline_s: float | None = None) -> None:
        """Follow an instance that is given nothing new until its requests have ended."""
        drain = self._instance_drains.get(instance)
        if drain is None or drain.phase in ENDED:
            settings = self._core.settings.draining
            self._instance_drains[instance] = InstanceDrain(
                instance, now, settings, deadline_s=deadline_s
            )
            self._bound(self._instance_drains)

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

    def drains(self, now: float) -> list[Progress]:
        """How far all drains are, also those that have ended."""
        nodes = [drain.progress(now) for drain in self._node_drains.values()]
        return nodes + [drain.progress(now) for drain in self._instance_drains.values()]

    def plans(self) -> dict[str, Plan]:
        """The last plan of each model, with every number behind it."""
        return {model: one.plan for model, one in self._planned.items() if one.plan is not None}

    # -- time --------------------------------------------------------------------------------------

    def tick(self, nodes: Mapping[str, NodeSpace], now: float) -> Steered:
        """What to do now, with the nodes as the directory has them."""
        steered = Steered()
        self._core.count_seen(now)
        pool = self._pool(nodes, now)
        self._give_up_lost(now)
        if nodes:
            steered.orders += self._numbered(
                self.replication, self.replication.plan(pool, now), now
            )
        for drain in self._node_drains.values():
            steered.orders += self._numbered(drain, drain.step(pool, now), now)
        self._step_instances(pool, now)
        for model, planned in list(self._planned.items()):
            steered.actions += self._plan(model, planned, now)
        return steered

    def ended(self, outcome: Ended, now: float) -> None:
        """An order was carried out, or failed."""
        owner, number, _ = self._owners.pop(outcome.number, (None, 0, 0.0))
        if owner is not None:
            owner.ended(replace(outcome, number=number), now)

    def fleet(self, model: str) -> list[Member]:
        """A model's instances, with the requests that each has in flight."""
        cluster = self._core.cluster
        members = []
        for name in cluster.names:
            spec, row = cluster.spec(name), cluster.row(name)
            if spec.model == model:
                latency = tuple(
                    float(getattr(cluster, column)[row])
                    for column in ("c0", "c1", "c2", "d0", "d1", "d2")
                )
                members.append(
                    Member(
                        name,
                        cluster.role(row),
                        cluster.status[row] is Status.READY,
                        self._core.requests_at(name),
                        latency,
                        spec.kv_capacity_tokens,
                        spec.batch_max,
                    )
                )
        return members

    # -- inside ------------------------------------------------------------------------------------

    def _plans_of(self, model: str, now: float) -> _Planned:
        planned = self._planned.get(model)
        if planned is None:
            settings = self._core.settings.planner
            planned = _Planned(Planner(settings), Meter(now), now + settings.interval_s)
            self._planned[model] = planned
        return planned

    def _plan(self, model: str, planned: _Planned, now: float) -> list[Action]:
        fleet = self.fleet(model)
        actions = self._carried(planned, planned.planner.flips.tick(fleet, now), now)
        if now >= planned.next_at:
            planned.next_at = now + self._core.settings.planner.interval_s
            planned.planner.observe(planned.meter.close(now))
            plan = planned.planner.plan(fleet, now)
            if plan is not None:
                planned.plan = plan
                actions += self._carried(planned, list(plan.actions), now)
        return actions

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
                status = Status.READY if action.on else Status.DRAINING
                self._core.cluster.set_status(action.instance, status)
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

    def _pool(self, nodes: Mapping[str, NodeSpace], now: float) -> Pool:
        core = self._core

        def seconds(source: str, target: str, nbytes: int) -> float:
            numbers = core.cluster.node_number(source), core.cluster.node_number(target)
            return float(core.transfers.seconds(numbers[0], _DRAM, numbers[1], nbytes, now))

        def serving(model: str) -> set[str]:
            specs = map(core.cluster.spec, core.cluster.names)
            return {spec.node for spec in specs if spec.node and model in ("", spec.model)}

        return Pool(nodes, core.index, core.popularity, seconds, serving)

    def _step_instances(self, pool: Pool, now: float) -> None:
        going = [drain for drain in self._instance_drains.values() if drain.phase not in ENDED]
        if not going:
            return
        hot = self._core.popularity.hot(self._core.settings.draining.hot_max, now)
        for drain in going:
            name = drain.instance
            here = name in self._core.cluster
            requests = self._core.requests_at(name) if here else None
            drain.step(requests, now, unique_blocks=unique_in_hbm(name, hot, pool))

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

    @staticmethod
    def _bound(drains: dict[str, NodeDrain] | dict[str, InstanceDrain]) -> None:
        ended = [name for name, drain in drains.items() if drain.phase in ENDED]
        for name in ended[: max(0, len(drains) - _DRAINS_MAX)]:
            del drains[name]
        if len(drains) > _DRAINS_MAX:
            raise InvalidRequest(f"{_DRAINS_MAX} drains are under way, which is the limit")
