"""A goal is judged in all places at once: it is reached if the worst of them reaches it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..evidence import Goal

if TYPE_CHECKING:
    from collections.abc import Sequence


@dataclass(frozen=True, slots=True)
class Cell:
    """One place. `excess`: the figure over the most that is allowed, or the least that is wanted
    over the figure; up to 1 it is reached."""

    where: str
    excess: float
    figure: str

    @property
    def reached(self) -> bool:
        """Whether it is, here."""
        return self.excess <= 1.0


def judged(text: str, cells: Sequence[Cell]) -> Goal:
    """The goal in all places, with the figure of the worst."""
    worst = max(cells, key=lambda cell: cell.excess)
    count = sum(cell.reached for cell in cells)
    most = f"{worst.figure} ({worst.where})"
    figure = most if len(cells) == 1 else f"{count} of {len(cells)}; the worst: {most}"
    return Goal(text, figure, worst.reached)
