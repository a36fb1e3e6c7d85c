"""The instances that the conductor last spoke of: where they are, and whose turn it is. Pure."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..records import Role

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from ..api.models import InstanceReply

# A conductor that was restarted knows no instances until they send their next heartbeats, some
# seconds later. So long what was known before stays.
EMPTY_S = 15.0
# Of an instance: "true" if its engine takes the shards of a context that is spread over several.
SHARDS_LABEL = "kv_shards"


@dataclass(frozen=True, slots=True)
class Target:
    """An instance, by its id, and where it answers; "" if that is not known."""

    name: str
    url: str


@dataclass(frozen=True, slots=True)
class Shard:
    """So many tokens of a context, held by an instance; as engines get it."""

    instance: str
    url: str
    tokens: int


@dataclass(frozen=True, slots=True)
class Route:
    """Where the prompt is computed and where it is answered, perhaps the same."""

    prefill: Target
    decode: Target

    @property
    def split(self) -> bool:
        return self.prefill.name != self.decode.name

    @property
    def names(self) -> tuple[str, str]:
        return self.prefill.name, self.decode.name

    def uses(self, names: Collection[str]) -> bool:
        """Whether any of these instances is in it."""
        return self.prefill.name in names or self.decode.name in names


class Known:
    """See the module. For one event loop."""

    def __init__(self) -> None:
        self._instances: dict[str, InstanceReply] = {}
        self._heard_at: float | None = None
        self._turns: Counter[tuple[str, str]] = Counter()  # per model and kind of instance

    def __len__(self) -> int:
        return len(self._instances)

    def update(self, instances: Sequence[InstanceReply], now: float) -> None:
        """What the conductor says now."""
        if not instances and self._instances and self._heard_at is not None:
            if now - self._heard_at < EMPTY_S:
                return
        else:
            self._heard_at = now
        self._instances = {one.id: one for one in instances}
        models = {one.model for one in instances}
        self._turns = Counter({key: n for key, n in self._turns.items() if key[0] in models})

    def url(self, name: str) -> str:
        """ "" for an instance that is not known."""
        one = self._instances.get(name)
        return one.url if one is not None else ""

    def shares_contexts(self, name: str) -> bool:
        """Whether an instance says that it attends to what others hold of a context."""
        one = self._instances.get(name)
        return one is not None and one.labels.get(SHARDS_LABEL) == "true"

    def models(self) -> list[str]:
        """All that instances serve, in the order in which they came."""
        return list(dict.fromkeys(one.model for one in self._instances.values()))

    def any(self, model: str) -> Target | None:
        """One that serves the model, each in its turn."""
        return self._next("any", self._usable(model, ()))

    def turn(self, model: str, avoid: Collection[str]) -> Route | None:
        """Where a request runs that nobody has decided about: on instances that do both, each in
        its turn; else on one of each kind. None if there are none but those to `avoid`."""
        usable = self._usable(model, avoid)
        both = self._next(Role.MIXED, usable)
        if both is not None:
            return Route(both, both)
        prefill, decode = self._next(Role.PREFILL, usable), self._next(Role.DECODE, usable)
        return Route(prefill, decode) if prefill is not None and decode is not None else None

    def _usable(self, model: str, avoid: Collection[str]) -> list[InstanceReply]:
        """Ready ones; lost ones if there are no others, since it may be the conductor that is."""
        those = [
            one
            for one in self._instances.values()
            if one.model == model and one.url and one.id not in avoid
        ]
        ready = [one for one in those if one.status == "ready"]
        return ready or [one for one in those if one.status == "lost"]

    def _next(self, kind: str, usable: Sequence[InstanceReply]) -> Target | None:
        choice = [one for one in usable if kind in ("any", one.role)]
        if not choice:
            return None
        turn = (choice[0].model, kind)
        self._turns[turn] += 1
        one = choice[self._turns[turn] % len(choice)]
        return Target(one.id, one.url)
