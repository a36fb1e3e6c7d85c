"""What was found, for people: a table, Markdown, and one HTML file that needs no other."""

from __future__ import annotations

import base64
import html
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from rich.table import Table

from ..display import number
from ..plots import png
from .evidence import EXPLAINED_DEVIATION, Grid

if TYPE_CHECKING:
    from collections.abc import Sequence

    from .evidence import Comparison, Evidence
    from .registry import Reproduction

GOAL_COLUMNS = ("goal", "figure", "reached")


@dataclass(frozen=True, slots=True)
class Finding:
    """A reproduction that has run, and how long it took."""

    reproduction: Reproduction
    evidence: Evidence
    wall_s: float

    def plain(self) -> dict[str, Any]:
        """For JSON; without the curves."""
        about, found = self.reproduction, self.evidence
        return {
            "name": about.name,
            "title": about.title,
            "source": about.source,
            "second_hand": about.second_hand,
            "wall_s": round(self.wall_s, 1),
            "comparisons": [
                {**asdict(one), "deviation": round(one.deviation, 4)} for one in found.comparisons
            ],
            "statements": [asdict(one) for one in found.statements],
            "grids": [asdict(one) for one in found.grids],
            "goals": [asdict(one) for one in found.goals],
        }


def tables(finding: Finding) -> list[Table]:
    """For a terminal: figures, then statements."""
    about, found = finding.reproduction, finding.evidence
    made = []
    title = f"{about.name}: {about.title} ({about.source})"
    if found.comparisons:
        table = Table(title=title, title_justify="left")
        for name in ("", "paper", "here", "deviation"):
            table.add_column(name, justify="right" if name else "left")
        for one in found.comparisons:
            style = None if one.near else "yellow"
            table.add_row(
                one.what, _published(one), _ours(one), f"{one.deviation:+.0%}", style=style
            )
        made.append(table)
    if found.statements:
        table = Table(title=None if made else title, title_justify="left")
        for name in ("statement", "holds", "figures"):
            table.add_column(name)
        for said in found.statements:
            table.add_row(said.text, "yes" if said.holds else "NO", said.figures)
        made.append(table)
    return [*made, *map(_rich, found.grids)]


def goal_grid(findings: Sequence[Finding]) -> Grid | None:
    """All goals of all findings, in one table; None if there are none."""
    rows = tuple(
        (goal.text, goal.figure, "yes" if goal.reached else "**no**")
        for finding in findings
        for goal in finding.evidence.goals
    )
    if not rows:
        return None
    reached = sum(row[-1] == "yes" for row in rows)
    return Grid(f"Goals: {reached} of {len(rows)} are reached.", GOAL_COLUMNS, rows)


def goal_table(findings: Sequence[Finding]) -> Table | None:
    """The same for a terminal."""
    grid = goal_grid(findings)
    if grid is None:
        return None
    table = Table(title=grid.title, title_justify="left", show_lines=True)
    for name in grid.columns:
        table.add_column(name)
    for text, figure, reached in grid.rows:
        table.add_row(text, figure, "yes" if reached == "yes" else "NO")
    return table


def _rich(grid: Grid) -> Table:
    table = Table(title=grid.title, title_justify="left")
    for at, name in enumerate(grid.columns):
        table.add_column(name, justify="right" if at else "left")
    for row in grid.rows:
        table.add_row(*row)
    return table


def markdown(findings: list[Finding], images: str) -> str:
    """docs/evidence.md: a section for each, with its plots from the folder `images`."""
    compared = [one for finding in findings for one in finding.evidence.comparisons]
    said = [one for finding in findings for one in finding.evidence.statements]
    near = sum(one.near for one in compared)
    holding = sum(one.holds for one in said)
    counts = (
        f"{len(findings)} reproductions; of {len(compared)} published figures {near} are within "
        f"{EXPLAINED_DEVIATION:.0%}; of {len(said)} statements {holding} hold."
    )
    goals = goal_grid(findings)
    table = ["## Goals", "", _GOALS, "", *_markdown_grid(goals)] if goals else []
    sections = [_section(one, images) for one in findings]
    return "\n".join([_PAGE, counts, "", *table, *sections])


def _section(finding: Finding, images: str) -> str:
    about, found = finding.reproduction, finding.evidence
    at_second_hand = " Known at second hand: compared in direction." if about.second_hand else ""
    command = f"`tiffin reproduce {about.name}`, {finding.wall_s:.0f} s."
    lines = [f"## {about.title}", "", f"{about.source}.{at_second_hand} {command}", ""]
    lines += [about.about, ""]
    if found.settings:
        lines += [f"Settings: {found.settings}.", ""]
    if found.comparisons:
        lines += ["| | paper | here | deviation |", "|---|--:|--:|--:|"]
        for one in found.comparisons:
            deviation = f"{one.deviation:+.0%}"
            shown = deviation if one.near else f"**{deviation}**"
            lines.append(f"| {one.what} | {_published(one)} | {_ours(one)} | {shown} |")
        lines.append("")
    if found.statements:
        lines += ["| statement | holds | figures |", "|---|---|---|"]
        for said in found.statements:
            lines.append(f"| {said.text} | {'yes' if said.holds else '**no**'} | {said.figures} |")
        lines.append("")
    for grid in (goal_grid([finding]), *found.grids):
        lines += _markdown_grid(grid) if grid else []
    for plot in found.plots:
        lines += [f"![{plot.title}]({images}/{plot.name}.png)", ""]
    for note in found.notes:
        lines += [note, ""]
    return "\n".join(lines)


def _markdown_grid(grid: Grid) -> list[str]:
    others = "|---" if grid.columns == GOAL_COLUMNS else "|--:"
    return [
        *(grid.title, "", "| " + " | ".join(grid.columns) + " |"),
        "|---" + others * (len(grid.columns) - 1) + "|",
        *("| " + " | ".join(row) + " |" for row in grid.rows),
        "",
    ]


def html_page(findings: list[Finding]) -> str:
    """One file, images included. Needs matplotlib."""
    parts = [_HEAD]
    for finding in findings:
        about, found = finding.reproduction, finding.evidence
        parts.append(f"<h2>{html.escape(about.title)}</h2><p>{html.escape(about.source)}. ")
        parts.append(f"<code>tiffin reproduce {about.name}</code></p>")
        parts.append(_html_comparisons(found) + _html_statements(found))
        parts += [f"<p>{html.escape(note)}</p>" for note in found.notes]
        for grid in (goal_grid([finding]), *found.grids):
            if grid is None:
                continue
            parts.append(f"<h3>{html.escape(grid.title)}</h3>")
            parts.append(_html_table(grid.columns, grid.rows))
        for plot in found.plots:
            image = base64.b64encode(png(plot)).decode()
            parts.append(
                f'<img alt="{html.escape(plot.title)}" src="data:image/png;base64,{image}">'
            )
    return "\n".join([*parts, "</body></html>"])


def _html_comparisons(found: Evidence) -> str:
    rows = [
        (one.what, _published(one), _ours(one), f"{one.deviation:+.0%}")
        for one in found.comparisons
    ]
    return _html_table(("", "paper", "here", "deviation"), rows)


def _html_statements(found: Evidence) -> str:
    rows = [(one.text, "yes" if one.holds else "no", one.figures) for one in found.statements]
    return _html_table(("statement", "holds", "figures"), rows)


def _html_table(names: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> str:
    if not rows:
        return ""
    head = "".join(f"<th>{html.escape(name)}</th>" for name in names)
    lines = ["".join(f"<td>{html.escape(cell)}</td>" for cell in row) for row in rows]
    return f"<table><tr>{head}</tr>{''.join(f'<tr>{line}</tr>' for line in lines)}</table>"


def _published(one: Comparison) -> str:
    return _shown(one.published, one.unit)


def _ours(one: Comparison) -> str:
    spread = "" if one.spread is None else f" ± {_shown(one.spread, '')}"
    return (
        f"{_shown(one.ours, '')}{spread} {one.unit}".strip()
        if one.unit != "%"
        else (f"{one.ours:.1f}{'' if one.spread is None else f' ± {one.spread:.1f}'}%")
    )


def _shown(value: float, unit: str) -> str:
    if unit == "%":
        return f"{value:.1f}%"
    digits = f"{value:,.0f}" if abs(value) >= 1000 else number(value)
    return f"{digits} {unit}".strip()


_PAGE = """# Evidence

What others have published, computed again with Tiffin's own code: the simulated cluster that the
conductor's core drives ([simulate.md](conductor/simulate.md)), its planner, its eviction.
Written by

    tiffin reproduce --all --plots docs/images/evidence --markdown docs/evidence.md

Constants, seeds and traces are inputs, the same for all: one hardware profile for each machine that
a paper names, and the traces of [data](../bench/data/README.md). None is tuned for a result, and a
section whose scenario was looked for says so. Sections of papers send each prompt to its engine as
soon as it is placed, as the systems of these papers do (`order` arrival); the goals hold prompts
back as the conductor does by default (`order` held), and say so. The paper's figure is beside ours,
and **bold** is what deviates by more than 15%; the text below a table says why, as far as that was
found out. What is a look-alike of a trace that is not public says so.

"""

_GOALS = """What the conductor is to reach in the simulator with one configuration, its defaults:
`tiffin reproduce 'goals-*'`. The sections of that name below say how each figure is measured, and
why one is missed. Two more goals are measured on real processes, by `tiffin bench conductor`:
requests per second by REST, and the time of a decision while all else goes on."""

_HEAD = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>Tiffin: evidence</title><style>
body { font: 16px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; }
table { border-collapse: collapse; margin: 1rem 0; }
td, th { border: 1px solid #ccc; padding: 0.2rem 0.7rem; text-align: left; }
img { max-width: 100%; }
</style></head><body><h1>Published results, computed again</h1>"""
