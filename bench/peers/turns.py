"""Two sides in turns, and the ratio of each turn.

Turns alternate ABBA: ours, theirs, theirs, ours. A machine that slows down in the middle slows
both. Each turn gives a ratio of medians, ours over theirs; the median of the ratios is the result,
and their range says how much it is worth.
"""

from __future__ import annotations

import gc
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING, Any

from ..store.rows import Row, Spread

if TYPE_CHECKING:
    from collections.abc import Callable


@dataclass(frozen=True, slots=True)
class PeerRow(Row):
    """A row whose limit is a peer. `ratios` are ours over theirs, turn by turn."""

    peer: str = ""
    ratios: tuple[float, ...] = ()

    @property
    def ratio(self) -> float:
        """The median over the turns."""
        return median(self.ratios)

    def plain(self) -> dict[str, Any]:
        """For JSON."""
        # Not super(): a dataclass with slots is a class anew, which super() does not know.
        return {**Row.plain(self), "ratio_low": min(self.ratios), "ratio_high": max(self.ratios)}


@dataclass(frozen=True, slots=True)
class Turns:
    """The numbers of all turns, of both sides."""

    ours: list[list[float]]
    theirs: list[list[float]]

    def row(
        self, peer: str, name: str, what: str, theirs: str, unit: str, scale: float, note: str = ""
    ) -> PeerRow:
        """A row of them, in units of 1/`scale`."""
        return PeerRow(
            name=f"{peer}-{name}",
            what=what,
            unit=unit,
            value=_spread(self.ours, scale),
            limit_what=theirs,
            limit=_spread(self.theirs, scale),
            note=note,
            peer=peer,
            ratios=tuple(
                median(mine) / median(other)
                for mine, other in zip(self.ours, self.theirs, strict=True)
            ),
        )


def in_turns(
    ours: Callable[[], list[float]], theirs: Callable[[], list[float]], rounds: int
) -> Turns:
    """`rounds` turns of each side, after one that does not count."""
    found = Turns([], [])
    ours(), theirs()
    gc.collect()
    for number in range(rounds):
        for side, taken in _order(number, (ours, found.ours), (theirs, found.theirs)):
            taken.append(side())
    return found


def _order(number: int, first: Any, second: Any) -> tuple[Any, Any]:
    return (first, second) if number % 2 == 0 else (second, first)


def _spread(turns: list[list[float]], scale: float) -> Spread:
    return Spread.of([one * scale for turn in turns for one in turn], lower_is_better=True)
