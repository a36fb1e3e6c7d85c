"""All reproductions, by name."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
import sys
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

from tiffin.kvstore.errors import InvalidInput

if TYPE_CHECKING:
    from collections.abc import Callable

    from .evidence import Evidence

    Tell = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Effort:
    """How much is run. `seeds` are those of whatever is left to chance."""

    seeds: tuple[int, ...] = (0, 1)

    @classmethod
    def full(cls) -> Effort:
        """As much as confidence takes."""
        return cls(tuple(range(5)))

    @property
    def is_full(self) -> bool:
        """Whether it is as much as that."""
        return len(self.seeds) >= len(Effort.full().seeds)

    @property
    def costly_seeds(self) -> tuple[int, ...]:
        """Those of what takes long: one, unless all is run."""
        return self.seeds if self.is_full else self.seeds[:1]


@dataclass(frozen=True, slots=True)
class Reproduction:
    """One table or figure. `run` is given the effort and whom to tell what it is at.

    `second_hand`: the paper is known by what others wrote of it, so it is compared in direction.
    """

    name: str
    title: str
    source: str
    run: Callable[[Effort, Tell], Evidence]
    second_hand: bool = False

    @property
    def about(self) -> str:
        """What its file says of it: what is compared, and what was taken where the paper is
        silent."""
        return inspect.getdoc(sys.modules[self.run.__module__]) or ""


_REPRODUCTIONS: dict[str, Reproduction] = {}


def reproduction(
    name: str, title: str, source: str, *, second_hand: bool = False
) -> Callable[[Callable[[Effort, Tell], Evidence]], Callable[[Effort, Tell], Evidence]]:
    """A decorator that registers a function as a reproduction."""

    def add(run: Callable[[Effort, Tell], Evidence]) -> Callable[[Effort, Tell], Evidence]:
        _REPRODUCTIONS[name] = Reproduction(name, title, source, run, second_hand)
        return run

    return add


def reproductions() -> dict[str, Reproduction]:
    """All of them, in order of name."""
    from . import goals, papers

    for room in (goals, papers):
        for module in pkgutil.walk_packages(room.__path__, f"{room.__name__}."):
            importlib.import_module(module.name)
    return dict(sorted(_REPRODUCTIONS.items()))


def named(names: list[str]) -> list[Reproduction]:
    """Those of the names, or of patterns as in a shell ("goals-*"), each once. Raises InvalidInput,
    with the names that there are."""
    known = reproductions()
    found: dict[str, Reproduction] = {}
    for name in names:
        matching = [one for one in known if fnmatchcase(one, name)]
        if not matching:
            raise InvalidInput(f"no reproduction {name!r}; there are {', '.join(known)}")
        found |= {one: known[one] for one in matching}
    return list(found.values())
