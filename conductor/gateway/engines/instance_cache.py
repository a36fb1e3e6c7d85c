"""A cache of the conductor's last instance list: each instance's URL, and round-robin placement for
times when the conductor does not answer. Pure."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ...records import Role
from ...state.allowed_hosts import ADAPTERS_LABEL

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from ...wire.models import InstanceReply

# A restarted conductor lists no instance, or not all, until they send their next heartbeats, some
# seconds later. For so long the cache keeps the previous list, or remembers who was on it.
EMPTY_S = 15.0
# A label of an instance: "true" if its engine accepts `shards`, a context whose KV cache is spread
# over several instances.
SHARDS_LABEL = "kv_shards"


@dataclass(frozen=True, slots=True)
class CallTarget:
    """An instance's id, its URL, and how many tokens its blocks have; "" and 0 if not known."""

    name: str
    url: str
    block_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Shard:
    """The part of a context that one instance holds, in tokens; engines get it in this form."""

    instance: str
    url: str
    tokens: int


@dataclass(frozen=True, slots=True)
class InstanceRoute:
    """The prefill and the decode instance of a request; they may be the same."""

    prefill: CallTarget
    decode: CallTarget

    @property
    def split(self) -> bool:
        return self.prefill.name != self.decode.name

    @property
    def names(self) -> tuple[str, str]:
        return self.prefill.name, self.decode.name

    def uses(self, names: Collection[str]) -> bool:
        """Whether the route contains any of these instances."""
        return self.prefill.name in names or self.decode.name in names


class Known:
    """The instance cache; see the module. For one event loop."""

    def __init__(self) -> None:
        self._instances: dict[str, InstanceReply] = {}
        self._keyed: set[str] = set()  # models
        # Instances that were ready, and since when the conductor lists them no more.
        self._forgotten: dict[str, tuple[InstanceReply, float]] = {}
        self._empty_since: float | None = None
        self._turns: Counter[tuple[str, str]] = Counter()  # per model and kind of instance

    def __len__(self) -> int:
        return len(self._instances)

    def update(self, instances: Sequence[InstanceReply], now: float) -> None:
        """Replace the cached list by the conductor's current one. Empty ones replace it only
        `EMPTY_S` after the first of them, however long the conductor was silent before."""
        if instances:
            self._empty_since = None
        elif self._instances:
            self._empty_since = now if self._empty_since is None else self._empty_since
            if now - self._empty_since < EMPTY_S:
                return
        was_ready = {
            name: (one, now) for name, one in self._instances.items() if one.status == "ready"
        }
        self._instances = {one.id: one for one in instances}
        self._keyed = {one.model for one in instances if one.keyed}
        self._forgotten = {
            name: (one, since)
            for name, (one, since) in {**was_ready, **self._forgotten}.items()
            if name not in self._instances and now - since < EMPTY_S
        }
        models = {one.model for one in instances}
        self._turns = Counter({key: n for key, n in self._turns.items() if key[0] in models})

    def target(self, name: str, url: str = "") -> CallTarget:
        """The instance; at this URL, if it is given."""
        one = self._instances.get(name)
        if one is None:
            return CallTarget(name, url)
        return CallTarget(name, url or one.url, one.block_tokens)

    def url(self, name: str) -> str:
        """The instance's URL; "" for an unknown instance."""
        return self.target(name).url

    def names(self) -> Collection[str]:
        """The instances' ids."""
        return self._instances.keys()

    def serving(self, model: str) -> set[str]:
        """The ids of the instances that serve a model, or have loaded an adapter."""
        return {one.id for one in self._instances.values() if _serves(one, model)}

    def kv_room(self, model: str) -> int | None:
        """The tokens that every instance of a model has room for; None without instances."""
        rooms = (one.kv_capacity_tokens for one in self._instances.values() if _serves(one, model))
        return min(rooms, default=None)

    def base_of(self, model: str) -> str:
        """The model that an adapter belongs to, if an instance has loaded it; else `model`."""
        own = [one for one in self._instances.values() if _serves(one, model)]
        return own[0].model if own else model

    def keyed(self, model: str) -> bool:
        """Whether the conductor makes keys of a model's token ids."""
        return model in self._keyed

    def all_names(self) -> Collection[str]:
        """The instances' ids, and those of instances that the conductor has listed until a moment
        ago."""
        return self._instances.keys() | self._forgotten.keys()

    def shares_contexts(self, name: str) -> bool:
        """Whether the instance's label says that its engine attends to shards of a context which
        other instances hold."""
        one = self._instances.get(name)
        return one is not None and one.labels.get(SHARDS_LABEL) == "true"

    def output_cap(self, name: str, priority: str) -> int | None:
        """After how many tokens an answer of this class ends on this instance for now; None: at its
        own end."""
        one = self._instances.get(name)
        return None if one is None else one.output_caps.get(priority)

    def models(self) -> list[str]:
        """The models of all instances and their adapters, without duplicates, in the list's
        order."""
        instances = self._instances.values()
        adapters = (name for one in instances for name in _adapters(one))
        return list(dict.fromkeys([*(one.model for one in instances), *adapters]))

    def any(self, model: str, avoid: Collection[str] = ()) -> CallTarget | None:
        """An instance of any role that serves the model, round-robin, none of those to `avoid`;
        None if there is none."""
        return self._next("any", self._usable(model, avoid))

    def turn(
        self, model: str, avoid: Collection[str], full: Collection[str] = (), first: str = ""
    ) -> InstanceRoute | None:
        """Route for a request that the conductor has not placed: a MIXED instance; else a prefill
        and a decode instance. The instance `first` prefills if it can, the others take turns. None
        if there are no instances but those to `avoid` and those that are `full`."""
        return self._route(_without(self._usable(model, avoid), full), first)

    def turn_forgotten(
        self, model: str, avoid: Collection[str], full: Collection[str] = (), first: str = ""
    ) -> InstanceRoute | None:
        """`turn`, with the instances that the conductor has listed until a moment ago: one that was
        restarted hears of them soon. None if it lists all of the model's."""
        forgotten = [
            one
            for one, _ in self._forgotten.values()
            if _serves(one, model) and one.url and one.id not in avoid
        ]
        if not forgotten:
            return None
        return self._route(_without([*self._usable(model, avoid), *forgotten], full), first)

    def _route(self, usable: Sequence[InstanceReply], first: str) -> InstanceRoute | None:
        both = self._next(Role.MIXED, usable, first)
        if both is not None:
            return InstanceRoute(both, both)
        prefill = self._next(Role.PREFILL, usable, first)
        decode = self._next(Role.DECODE, usable)
        return (
            InstanceRoute(prefill, decode) if prefill is not None and decode is not None else None
        )

    def _usable(self, model: str, avoid: Collection[str]) -> list[InstanceReply]:
        """The model's ready instances. If none is ready, those that the conductor lists as lost:
        it may be the conductor that has lost its connection."""
        those = [
            one
            for one in self._instances.values()
            if _serves(one, model) and one.url and one.id not in avoid
        ]
        ready = [one for one in those if one.status == "ready"]
        return ready or [one for one in those if one.status == "lost"]

    def _next(
        self, kind: str, usable: Sequence[InstanceReply], first: str = ""
    ) -> CallTarget | None:
        choice = [one for one in usable if kind in ("any", one.role)]
        if not choice:
            return None
        turn = (choice[0].model, kind)
        self._turns[turn] += 1
        in_turn = choice[self._turns[turn] % len(choice)]
        one = next((one for one in choice if one.id == first), in_turn)
        return CallTarget(one.id, one.url, one.block_tokens)


def _without(usable: Sequence[InstanceReply], full: Collection[str]) -> list[InstanceReply]:
    return [one for one in usable if one.id not in full]


def _adapters(instance: InstanceReply) -> list[str]:
    return [name for name in instance.labels.get(ADAPTERS_LABEL, "").split(",") if name]


def _serves(instance: InstanceReply, model: str) -> bool:
    return instance.model == model or model in _adapters(instance)
