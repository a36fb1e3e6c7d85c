"""What a reproduction finds: figures beside those of a paper, statements that hold or do not, and
curves. Plain data."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ..plots import Plot

# Above it, docs/evidence.md explains the deviation.
EXPLAINED_DEVIATION = 0.15


@dataclass(frozen=True, slots=True)
class Comparison:
    """One figure of a paper, and ours. `spread`: half of the 95% confidence interval of ours, over
    the seeds; None for a figure that no chance is in."""

    what: str
    published: float
    ours: float
    unit: str = ""
    spread: float | None = None

    @property
    def deviation(self) -> float:
        """Of ours from the paper's, as a share of the paper's."""
        return self.ours / self.published - 1 if self.published else 0.0

    @property
    def near(self) -> bool:
        """Whether nothing has to be explained."""
        return abs(self.deviation) <= EXPLAINED_DEVIATION


@dataclass(frozen=True, slots=True)
class Statement:
    """What a paper says in words, or what is known of it at second hand: whether it holds here, and
    the figures that say so."""

    text: str
    holds: bool
    figures: str


@dataclass(frozen=True, slots=True)
class Goal:
    """What Tiffin is to reach, in figures; the figure that decides, and whether it is reached."""

    text: str
    figure: str
    reached: bool


@dataclass(frozen=True, slots=True)
class Grid:
    """A table of ours that has no paper's figures beside it; cells are text."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


@dataclass(frozen=True, slots=True)
class Evidence:
    """All that one reproduction found. `notes` say what the paper leaves open and what was taken
    for it, and why figures deviate. `settings` are those that all figures have, if not those of the
    paper."""

    comparisons: tuple[Comparison, ...] = ()
    statements: tuple[Statement, ...] = ()
    plots: tuple[Plot, ...] = field(default=(), repr=False)
    notes: tuple[str, ...] = ()
    grids: tuple[Grid, ...] = ()
    goals: tuple[Goal, ...] = ()
    settings: str = ""
