"""A conductor that shares its load and its instances with peers, any of which can die. Pure.

    core = SharedConductor("host-a:4242:9f3c", address="http://10.0.0.9:7800")
    core.state(now), core.changes(now)      # to be written to Redis, by `replicas/redis_link.py`
    core.hear(state, now)                   # for the state of each peer
    core.settle(names, now)                 # after that: these peers are alive
    core.merge(records, now)                # if the instances' records have changed

It decides alone, from its own state: nothing here blocks. Its peers learn of its decisions some
tens of milliseconds later; `docs/conductor/several.md` says what may differ until then. A request's
events go to the conductor that has decided it, at `address`, and to no other one.
"""

from __future__ import annotations

import operator
from contextlib import suppress
from dataclasses import dataclass, field
from math import inf
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import numpy as np
from msgspec import Meta
from msgspec.structs import replace

from ..core.conductor import Conductor
from ..errors import ConductorError, InvalidRequest
from ..pool.leader import FlipsElsewhere, LeaderLease
from ..pool.prompt_sums import NO_PROMPTS, PromptSums
from ..records import Load, Role
from ..state.allowed_hosts import check_hosts
from .remote_load import PeerLoads, own_rows
from .shared_records import SharedRecords, merged
from .states import DemandRow, HeardRow, State

if TYPE_CHECKING:
    from collections.abc import Collection

    from numpy.typing import NDArray

    from ..records import InstanceSpec, Request
    from ..state.sliced_work import Work
    from .shared_records import Change, RecordNews


class SharingSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """How often conductors write their states, and when a silent one counts as dead."""

    interval_s: Annotated[float, Meta(ge=0.005, le=10)] = 0.04
    """Between exchanges: a decision is known elsewhere after two of them and what Redis takes,
    which is to be within 0.1 s."""

    dead_s: Annotated[float, Meta(ge=0.1, le=3600)] = 1.5
    """Whose state was not renewed for so long is dead: what it had promised counts no more. Some
    garbage collections; with an exchange it is to be less than 2 s."""

    lead_s: Annotated[float, Meta(ge=0.2, le=3600)] = 3.0
    """For how long the conductor that leads has the lease, which each exchange renews: so long no
    conductor leads after it has died."""


@dataclass(slots=True)
class News:
    """What peers have changed: instances that `joined` (or changed) and `left`, instances `refused`
    here as (instance, why), `schemas` of models as (model, canonical text)."""

    joined: list[InstanceSpec] = field(default_factory=list)
    left: list[str] = field(default_factory=list)
    refused: list[tuple[str, str]] = field(default_factory=list)
    schemas: list[tuple[str, str]] = field(default_factory=list)


class SharedConductor(Conductor):
    """A `Conductor` that shares its load and its instances with peers. Not thread-safe.

    `name` is unique for all time, so a restarted conductor has a new one. `address` is the URL at
    which clients reach this conductor and no other one. `unix_offset_s` is Unix time less `now`.
    Other arguments as of `Conductor`.
    """

    def __init__(
        self,
        name: str,
        *arguments: Any,
        address: str = "",
        sharing: SharingSettings | None = None,
        unix_offset_s: float = 0.0,
        **named: Any,
    ) -> None:
        super().__init__(*arguments, **named)
        if not 1 <= len(name) <= 256:
            raise InvalidRequest("a conductor's name has 1 to 256 characters")
        self.name, self.address = name, address
        self.sharing = sharing or SharingSettings()
        self._unix_offset_s = unix_offset_s
        self._state = State(name)  # the last one
        self._peers: dict[str, State] = {}
        self._met_at = self._ticked_at = -inf
        # No conductor leads until Redis grants the lease (`replicas/redis_link.py`).
        self.lease = self.steering.lease = LeaderLease(name, self.sharing.lead_s)
        self.steering.elsewhere = FlipsElsewhere(self._peers, self.sharing.dead_s)
        self._loads = PeerLoads(self.cluster)
        self.dispatch.elsewhere = self._loads.queued
        self._records = SharedRecords(self.cluster, self._flips)
        self._heard: dict[str, tuple[HeardRow, float]] = {}  # (row, time)
        self._beats = 0
        self._demand: dict[str, PromptSums] = {}
        self._news = News()
        self._deaths = 0

    # -- what callers ask, as of a conductor alone -------------------------------------------------

    def heartbeat(self, instance: str, load: Load, now: float) -> None:
        """See `Conductor.heartbeat`."""
        super().heartbeat(instance, load, now)
        self._beats += 1
        row, _ = self._heard.get(instance, (HeardRow(instance), now))
        if load != Load():
            row = HeardRow(instance, 0, self._beats, load)
        self._heard[instance] = replace(row, beat=self._beats), now

    def remove(self, instance: str, now: float) -> None:
        """See `Conductor.remove`; the peers remove it, too."""
        self._remove_here(instance, now)
        self._records.removed(instance)

    def ticking(self, now: float) -> Work[list[str]]:
        """See `Conductor.tick`. For as long as this process was stopped, no instance was silent."""
        stopped_s, self._ticked_at = now - self._ticked_at, now
        if self.sharing.dead_s < stopped_s < inf:
            heard_at = self.cluster.heard_at
            np.minimum(heard_at + stopped_s, now, out=heard_at)
        return (yield from super().ticking(now))

    def requests_at(self, instance: str) -> int:
        """See `Conductor.requests_at`; includes other conductors' requests."""
        return super().requests_at(instance) + self._loads.requests(self.cluster.row(instance))

    def schema(self, model: str, canonical: str) -> None:
        """Share a model's schema with the peers, which need it to follow the events of its
        instances."""
        self._records.schema(model, canonical)

    def statistics(self) -> dict[str, Any]:
        """See `Conductor.statistics`; `sharing` beside: the address of each peer, by its name."""
        peers = {name: state.address for name, state in self._peers.items()}
        return {**super().statistics(), "sharing": {"peers": peers, "deaths": self._deaths}}

    # -- what peers read ---------------------------------------------------------------------------

    def state(self, now: float) -> State:
        """This conductor's state, to be written now; the same again if nothing has changed."""
        recent = now - self.sharing.dead_s  # each peer that lives has read what came before
        self._heard = {name: one for name, one in self._heard.items() if one[1] >= recent}
        served = {model: self.cluster.model_number(model) is not None for model in self._demand}
        self._demand = {model: sums for model, sums in self._demand.items() if served[model]}
        lowest = self.settings.queue.classes[-1].name
        state = replace(
            self._state,
            address=self.address,
            loads=own_rows(self.cluster, self.ledger, self.queues, lowest, now),
            heard=[row for row, _ in self._heard.values()],
            demand=[DemandRow(model, list(sums)) for model, sums in self._demand.items()],
        )
        if state != self._state:
            self._state = replace(state, number=state.number + 1)
        return self._state

    def changes(self, now: float) -> list[Change]:
        """The records of instances to be written now."""
        return self._records.changes(now + self._unix_offset_s)

    def news(self) -> News:
        """The news from peers since the last call."""
        news, self._news = self._news, News()
        return news

    @property
    def peers(self) -> list[str]:
        """The names of the other conductors that are alive."""
        return list(self._peers)

    # -- what peers have written -------------------------------------------------------------------

    def hear(self, state: State, now: float) -> None:
        """Take in the state of any conductor; this one's own, and one that is known, change
        nothing."""
        before = self._peers.get(state.name)
        if state.name == self.name or (before is not None and state.number <= before.number):
            return
        self._peers[state.name] = state
        self._loads.tell(state.name, state.loads, now)
        known = {row.instance: row for row in before.heard} if before is not None else {}
        for row in state.heard:
            was = known.get(row.instance, HeardRow(row.instance))
            if row.instance in self.cluster and row.beat > was.beat:
                load = row.load if row.load_beat > was.load_beat else Load()
                with suppress(ConductorError):  # of a load that can't be
                    super().heartbeat(row.instance, load, now)
        if before is not None:  # a new conductor's demand is not of this interval alone
            self._hear_demand(before.demand, state.demand, now)

    def settle(self, alive: Collection[str] | None, now: float) -> None:
        """After an exchange, and after all states of it: the names of the conductors that are
        `alive`; None if Redis did not answer."""
        if alive is not None:
            if now > self._met_at + self.sharing.dead_s:
                self._excuse(now)
            self._met_at = now
        elif now < self._met_at + self.sharing.dead_s:
            alive = self._peers
        for name in [name for name in self._peers if alive is None or name not in alive]:
            del self._peers[name]
            self._loads.forget(name)
            self._deaths += 1
        self._loads.blend(now)

    def merge(self, records: dict[str, bytes], now: float) -> None:
        """Take in the present records of all instances. Never raises: `news` lists the instances
        that can't be registered here."""
        for one in self._records.merge(records):
            name = one.theirs.instance
            try:
                if one.theirs.spec is not None:
                    self._take(one, now)
                elif name in self.cluster:
                    self._remove_here(name, now)
                    self._news.left.append(name)
            except ConductorError as error:  # for example a profile that is not on this machine
                self._news.refused.append((name, str(error)))

    def _take(self, news: RecordNews, now: float) -> None:
        name = news.theirs.instance
        here = name in self.cluster
        record = merged(news, self._records.mine(name)) if here else news.theirs
        spec, (flips_to, by) = record.spec, record.flip
        assert spec is not None
        if record.schema:
            self._news.schemas.append((spec.model, record.schema))
        check_hosts(spec, self.settings.instances.allowed_hosts)
        if not here or self.cluster.spec(name) != spec:
            self.register(spec, now)
            self._news.joined.append(spec)
        role = Role(record.role) if record.role in tuple(Role) else spec.role
        if self.cluster.role(self.cluster.row(name)) is not role:
            self.cluster.set_role(self.cluster.row(name), role)
        if record.draining:
            self.unassign(name)
        else:
            self.cluster.assign(name, on=True)
        if by != self.name:
            flip = Role(flips_to) if by and flips_to in tuple(Role) else None
            self.steering.flips_elsewhere(name, flip, by, now)
        if record.draining and not by:
            self.steering.keep_out(name, now)

    # -- inside ------------------------------------------------------------------------------------

    def _others_at(self, row: int, load: Load, now: float) -> NDArray[np.int64]:
        """See `Conductor._others_at`."""
        return self._loads.at(row, load.age_s, now)

    def _hear_demand(self, before: list[DemandRow], rows: list[DemandRow], now: float) -> None:
        known = {row.model: _sums(row) for row in before}
        for row in rows:
            sums, was = _sums(row), known.get(row.model, NO_PROMPTS)
            if sums.requests > was.requests and self.cluster.model_number(row.model) is not None:
                self.steering.came(row.model, PromptSums(*map(operator.sub, sums, was)), now)

    def _remove_here(self, instance: str, now: float) -> None:
        super().remove(instance, now)
        self._heard.pop(instance, None)
        self.steering.elsewhere.pop(instance)

    def _forget_silent(self, now: float) -> None:
        """See `Conductor._forget_silent`. Not while the peers are not heard: instances may send
        their heartbeats to them."""
        if now < self._met_at + self.sharing.dead_s:
            super()._forget_silent(now)

    def _excuse(self, now: float) -> None:
        """The peers are heard again: instances that are lost here may have spoken to them, and are
        not forgotten for that."""
        lost_at = now - self.settings.core.heartbeat_timeout_s
        heard_at = self.cluster.heard_at
        np.maximum(heard_at, lost_at, out=heard_at, where=self.cluster.used)

    def _flips(self) -> dict[str, tuple[str, str]]:
        """Each instance in a role flip, its new role, and the conductor's name."""
        flips = self.steering.flipping()
        return {name: (role.value, by or self.name) for name, (role, by) in flips.items()}

    def _offered(self, request: Request, computed_tokens: int | None, now: float) -> PromptSums:
        more = super()._offered(request, computed_tokens, now)
        was = self._demand.get(request.model, NO_PROMPTS)
        self._demand[request.model] = was.plus(more)
        return more


def _sums(row: DemandRow) -> PromptSums:
    return PromptSums(*row.sums[: len(NO_PROMPTS)])
