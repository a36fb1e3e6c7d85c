"""The key spaces that engines have announced at the pool's nodes, by model. Pure.

Prompts of a model are keyed by the space that most of its engines have announced; ties go to the
one whose bytes come first, so that all conductors choose the same.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from tiffin.kvstore.errors import InvalidInput
from tiffin.kvstore.format.key_space import KeySpace

from ..errors import InvalidRequest
from .schema_text import parse_schema

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tiffin.kvstore.format.schema import KVSchema

# Adapters are a request's model by their own name, or by the namespace that events give them.
ADAPTER = "lora:"


class Keyed(NamedTuple):
    """A key space, and its schema."""

    space: KeySpace
    schema: KVSchema


class AnnouncedSpaces:
    """Not thread-safe."""

    def __init__(self) -> None:
        self._by_node: dict[str, tuple[KeySpace, ...]] = {}
        self._schemas: dict[str, KVSchema] = {}  # parsed, by their texts
        self._chosen: dict[str, Keyed] = {}
        self._unreadable: dict[str, str] = {}  # by node, why one of its spaces is not used

    def announced(self, node: str, encoded: Sequence[bytes]) -> set[str]:
        """All that the engines at a node have announced. Returns the models whose prompts are keyed
        by another space from now on."""
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
                spaces.append(space)
        if spaces:
            self._by_node[node] = tuple(spaces)
        else:
            self._by_node.pop(node, None)
        return self._choose()

    def of(self, model: str) -> Keyed | None:
        """By what the prompts of a model are keyed; None if no engine has announced anything."""
        return self._chosen.get(model)

    def namespace_of(self, model: str, asked: str, salt: str = "") -> str | None:
        """What the pool's keys have for the namespace that a request or an event names: nothing,
        `lora:` and an adapter, or another one, which is taken as it is; and for its salt. None for
        an adapter that no engine of the model has announced, though some have a key space, and for
        a salt where nobody says what it becomes. Safe in any thread."""
        keyed = self._chosen.get(model)
        adapter = asked.removeprefix(ADAPTER)
        if keyed is None or (asked and adapter == asked):
            return None if salt else asked
        if adapter and adapter not in keyed.space.adapters:
            return None
        return keyed.space.namespace_of(adapter, salt)

    def node_of(
        self, model: str, engine: str, at_host: Sequence[str]
    ) -> tuple[str, KeySpace] | None:
        """The node of an engine of this model, and what it has announced: where one of the name
        `engine` has, else the only one of the nodes `at_host` where one of the model has."""
        found = [
            (node, space)
            for node, spaces in sorted(self._by_node.items())
            for space in spaces
            if model in space.models
        ]
        named = [one for one in found if one[1].engine == engine]
        here = [one for one in found if one[0] in at_host and not one[1].engine]
        if len(named) == 1:
            return named[0]
        return here[0] if len({node for node, _ in here}) == 1 else None

    def notes(self) -> list[str]:
        """What operators should know: spaces that can't be read, models whose prompts can't be
        keyed here, and models whose engines have announced more than one space."""
        notes = [f"key spaces at {node}: {why}" for node, why in sorted(self._unreadable.items())]
        for model, kinds in sorted(self._kinds().items()):
            if self._chosen[model].space.secret:
                notes.append(f"the keys of {model} have a secret: send block_keys")
            if len(kinds) > 1:
                told = [space.kind for _, space in kinds]
                differ = [name for name in told[0] if len({one[name] for one in told}) > 1]
                notes.append(
                    f"the engines of {model} have {len(kinds)} key spaces, by {', '.join(differ)}: "
                    "only blocks of the most common one are found in the pool"
                )
        return notes

    def _kinds(self) -> dict[str, list[tuple[int, KeySpace]]]:
        """By model: the spaces with other keys, each with how many engines have it; all adapters of
        these engines are in it."""
        counts: dict[str, Counter[tuple[str, ...]]] = {}
        merged: dict[tuple[str, ...], KeySpace] = {}
        for space in (one for node in sorted(self._by_node) for one in self._by_node[node]):
            kind = tuple(space.kind.values())
            merged[kind] = _merged(merged.get(kind, space), space)
            for model in space.models:
                counts.setdefault(model, Counter())[kind] += 1
        return {
            model: [(count, merged[kind]) for kind, count in kinds.items()]
            for model, kinds in counts.items()
        }

    def _choose(self) -> set[str]:
        chosen = {}
        for model, kinds in self._kinds().items():
            _, space = min(kinds, key=lambda one: (-one[0], one[1].encoded()))
            chosen[model] = Keyed(space, self._schemas[space.schema])
        before, self._chosen = self._chosen, chosen
        used = {space.schema for spaces in self._by_node.values() for space in spaces}
        self._schemas = {text: one for text, one in self._schemas.items() if text in used}
        names = before.keys() | chosen.keys()
        return {name for name in names if before.get(name) != chosen.get(name)}


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
