"""The key spaces that engines have announced at the pool's nodes, by model. Pure.

Most models have one. During an update, or with engines whose pages differ, some have several: then
each group of engines has keys of its own. They are ordered by how many engines have them, then by
their names, so that all conductors have the same order. What was announced last is remembered when
the last engine of a model has gone: its blocks are still in the pool.
"""

from __future__ import annotations

from collections import Counter
from hashlib import blake2b
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from tiffin.kvstore.errors import InvalidInput
from tiffin.kvstore.format.key_space import KeySpace

from ..errors import InvalidRequest
from .schema_text import parse_schema

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from tiffin.kvstore.format.schema import KVSchema

    from ..records import InstanceSpec

# Models whose engines have gone.
REMEMBERED_MAX = 256

# Adapters are a request's model by their own name, or by the namespace that events give them.
ADAPTER = "lora:"


class Keyed(NamedTuple):
    """A key space, and its schema. `name`: the same for all engines whose blocks have the same
    keys, 16 hex digits. `secret`: that of its keys; None if nobody here knows it."""

    name: str
    space: KeySpace
    schema: KVSchema
    secret: bytes | None

    def namespace_of(self, asked: str, salt: str = "") -> str | None:
        """What the pool's keys have for the namespace that a request or an event names: nothing,
        `lora:` and an adapter, or another one, which is taken as it is; and for its salt. None for
        an adapter that no engine has announced, for a salt with a namespace, and if the keys have a
        secret that is not known."""
        adapter = asked.removeprefix(ADAPTER)
        if self.secret is None:
            return None
        if asked and adapter == asked:
            return None if salt else asked
        if adapter and not self.space.adapters.get(adapter):
            return None
        return self.space.namespace_of(adapter, salt)


class AnnouncedSpaces:
    """Not thread-safe. `secrets`: those that are known here, by their names (`secret_name`)."""

    def __init__(self) -> None:
        self.secrets: Mapping[str, bytes] = {}
        self._by_node: dict[str, tuple[Keyed, ...]] = {}
        self._schemas: dict[str, KVSchema] = {}  # parsed, by their texts
        # By model: what engines announce now, and what the last ones of others had announced.
        self._now: dict[str, tuple[Keyed, ...]] = {}
        self._gone: dict[str, tuple[Keyed, ...]] = {}
        # Where engines of a model are, by their names; and those without a name, by their nodes.
        self._named: dict[tuple[str, str], list[tuple[str, Keyed]]] = {}
        self._nameless: dict[tuple[str, str], list[tuple[str, Keyed]]] = {}
        self._unreadable: dict[str, str] = {}  # by node, why one of its spaces is not used

    def announced(self, node: str, encoded: Sequence[bytes]) -> set[str]:
        """All that the engines at a node have announced. Returns the models of whose engines some
        announce something else now."""
        spaces = []
        self._unreadable.pop(node, None)
        for data in encoded:
            try:
                space = KeySpace.decoded(data)
                if space.schema not in self._schemas:
                    self._schemas[space.schema] = parse_schema(space.schema)
            except (InvalidInput, InvalidRequest) as error:
                self._unreadable[node] = str(error)
            else:
                spaces.append(self._keyed(space))
        told = self._by_node.get(node, ())
        if spaces:
            self._by_node[node] = tuple(spaces)
        else:
            self._by_node.pop(node, None)
        self._find_homes()
        now, known = self._kinds(), {**self._gone, **self._now}
        gone = [(model, known[model]) for model in known if model not in now]
        self._gone = dict(gone[-REMEMBERED_MAX:])
        self._now = now  # last: `named` finds a model in the one or in the other
        self._forget_schemas()
        changed = () if tuple(spaces) == told else (*told, *spaces)
        return {model for one in changed for model in one.space.models}

    def forget(self, model: str) -> None:
        """Forget what was announced for a model, unless some engine still announces it."""
        if self._gone.pop(model, None) is not None:
            self._forget_schemas()

    def all_of(self, model: str) -> tuple[Keyed, ...]:
        """The key spaces of a model's engines, with the adapters of all engines that have one, that
        of most engines first."""
        return self._now.get(model) or self._gone.get(model, ())

    def of(self, model: str) -> Keyed | None:
        """The key space of most engines of a model; None if no engine has announced anything."""
        return next(iter(self.all_of(model)), None)

    def at(self, spec: InstanceSpec) -> Keyed | None:
        """The key space of an instance's blocks: that which was announced by its name, or at its
        node, or, if that is not clear, that of most engines of its model."""
        spaces = self.all_of(spec.model)
        if len(spaces) < 2:
            return next(iter(spaces), None)
        home = self.node_of(spec.model, spec.id, (spec.node,))
        return next((one for one in spaces if home and one.name == home[1].name), spaces[0])

    def named(self, model: str, name: str) -> Keyed | None:
        """A key space by its name. Safe in any thread."""
        return next((one for one in self.all_of(model) if one.name == name), None)

    def node_of(self, model: str, engine: str, at_host: Sequence[str]) -> tuple[str, Keyed] | None:
        """The node of an engine of this model, and what it has announced: where one of the name
        `engine` has, else the only one of the nodes `at_host` where one of the model has."""
        home = self._named.get((model, engine)) or [
            one for node in at_host for one in self._nameless.get((model, node), ())
        ]
        return home[0] if len({(node, one.name) for node, one in home}) == 1 else None

    def notes(self) -> list[str]:
        """What operators should know: spaces that can't be read, models whose prompts can't be
        keyed here, and models whose engines have announced more than one space."""
        notes = [f"key spaces at {node}: {why}" for node, why in sorted(self._unreadable.items())]
        for model, spaces in sorted(self._now.items()):
            if any(one.secret is None for one in spaces):
                notes.append(
                    f"the keys of {model} have a secret: name its file in discovery.secret_files, "
                    "or send block_keys"
                )
            if len(spaces) > 1:
                told = [one.space.kind for one in spaces]
                differ = [name for name in told[0] if len({one[name] for one in told}) > 1]
                notes.append(
                    f"the engines of {model} have {len(spaces)} key spaces, by "
                    f"{', '.join(differ)}: those of one can't use the blocks of another"
                )
        return notes

    def _kinds(self) -> dict[str, tuple[Keyed, ...]]:
        """By model: the spaces with other keys, with all adapters of the engines that have one."""
        counts: dict[str, Counter[str]] = {}
        merged: dict[str, Keyed] = {}
        for one in (one for node in sorted(self._by_node) for one in self._by_node[node]):
            both = _merged(merged.get(one.name, one).space, one.space)
            merged[one.name] = one._replace(space=both)
            for model in one.space.models:
                counts.setdefault(model, Counter())[one.name] += 1
        return {
            model: tuple(merged[name] for name in sorted(names, key=lambda one: (-names[one], one)))
            for model, names in counts.items()
        }

    def _find_homes(self) -> None:
        self._named, self._nameless = {}, {}
        for node, spaces in self._by_node.items():
            for one in spaces:
                engine = one.space.engine
                homes, where = (self._named, engine) if engine else (self._nameless, node)
                for model in one.space.models:
                    homes.setdefault((model, where), []).append((node, one))

    def _forget_schemas(self) -> None:
        known = (*self._by_node.values(), *self._gone.values())
        used = {one.space.schema for spaces in known for one in spaces}
        self._schemas = {text: one for text, one in self._schemas.items() if text in used}

    def _keyed(self, space: KeySpace) -> Keyed:
        secret = self.secrets.get(space.secret) if space.secret else b""
        return Keyed(name_of(space), space, self._schemas[space.schema], secret)


def name_of(space: KeySpace) -> str:
    """The name of a key space (`Keyed`)."""
    return blake2b(msgspec.json.encode(tuple(space.kind.values())), digest_size=8).hexdigest()


def _merged(one: KeySpace, other: KeySpace) -> KeySpace:
    """One of two spaces with the same keys, with the adapters of both. Of an adapter with two kinds
    of weights nobody knows which a request would get: it has no keys."""
    both = {**one.adapters, **other.adapters}
    clashing = {
        n for n in one.adapters.keys() & other.adapters.keys() if one.adapters[n] != both[n]
    }
    return msgspec.structs.replace(
        one, adapters={name: both[name] for name in sorted(both.keys() - clashing)}
    )
