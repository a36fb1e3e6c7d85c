"""All parts one after the other, each in a process of its own, and a table of their findings."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

if TYPE_CHECKING:
    from collections.abc import Sequence

_ROOT = Path(__file__).parents[2]
OUT = Path("out/campaign.json")
# A fixed width, so that numbers are not wrapped in a log either.
TABLE_WIDTH = 110
# Kinds of findings: their keys in reports, and their names in the table.
KINDS = {
    "wrong": "wrong bytes",
    "untyped": "untyped errors",
    "late": "late calls",
    "leaks": "leaks, hangs",
}


@dataclass(frozen=True)
class Part:
    """One run of `python -m tests.campaign`; it prints a report, one line of JSON or several."""

    name: str
    arguments: tuple[str, ...]

    def run(self) -> list[dict[str, Any]]:
        """The reports. A part that ended without any counts as a report with a finding."""
        command = [sys.executable, "-m", "tests.campaign", self.name, *self.arguments]
        ended = subprocess.run(command, cwd=_ROOT, stdout=subprocess.PIPE, text=True, check=False)
        reports = [json.loads(line) for line in ended.stdout.splitlines() if line.startswith("{")]
        if ended.returncode and not any(findings(report) for report in reports):
            said = f"{' '.join(command[2:])} ended with status {ended.returncode}; see above"
            reports.append({"part": self.name, "leaks": [said]})
        return reports


def findings(report: dict[str, Any]) -> int:
    """The number of findings in a report."""
    return sum(len(report.get(kind, [])) for kind in KINDS)


def parts(gets: int, interrupts: int, seed: int) -> list[Part]:
    """The parts. Nineteen in twenty gets are under kills and stops of the pool; under a relay calls
    spend most of their time waiting for frames that it dropped."""
    seeded = ("--seed", str(seed))
    relayed = gets // 20
    return [
        Part("relay", ("--gets", str(relayed), *seeded)),
        Part("interrupts", ("--number", str(interrupts), *seeded)),
        Part("faults", ("--gets", str(gets - relayed), *seeded)),
    ]


def table(reports: Sequence[dict[str, Any]]) -> Table:
    """A line per report, and one for the sum."""
    made = Table("part", *("gets", "blocks", "interrupts", "faults", "s"), *KINDS.values())
    for column in made.columns[1:]:
        column.justify = "right"
    for report in reports:
        made.add_row(report["part"], *_cells(report))
    every: dict[str, Any] = {"faults": {}}
    for name in ("gets", "checked_blocks", "interrupts", "seconds"):
        every[name] = sum(report.get(name, 0) for report in reports)
    every["faults"] = {str(i): sum(r.get("faults", {}).values()) for i, r in enumerate(reports)}
    every |= {kind: [x for report in reports for x in report.get(kind, [])] for kind in KINDS}
    made.add_section()
    made.add_row("all", *_cells(every))
    return made


def _cells(report: dict[str, Any]) -> list[str]:
    numbers = [report.get(name, 0) for name in ("gets", "checked_blocks", "interrupts")]
    numbers += [sum(report.get("faults", {}).values()), round(report.get("seconds", 0))]
    numbers += [len(report.get(kind, [])) for kind in KINDS]
    return [f"{number:,}" for number in numbers]


def main(arguments: list[str]) -> int:
    """See `__main__`."""
    parser = argparse.ArgumentParser(prog="python -m tests.campaign all")
    parser.add_argument("--gets", type=int, default=500_000, help="checked ones, in all")
    parser.add_argument("--interrupts", type=int, default=10_000, help="for each kind of client")
    parser.add_argument("--seed", type=int, default=int(time.time()))
    chosen = parser.parse_args(arguments)
    console = Console(stderr=True)
    console.print(f"seed {chosen.seed}")
    reports: list[dict[str, Any]] = []
    for part in parts(chosen.gets, chosen.interrupts, chosen.seed):
        console.print(f"{part.name} {' '.join(part.arguments)}")
        reports += part.run()
    OUT.parent.mkdir(exist_ok=True)
    OUT.write_text(json.dumps({"seed": chosen.seed, "reports": reports}, indent=1))
    shown = Console()
    shown.width = max(shown.width, TABLE_WIDTH)
    shown.print(table(reports))
    found = [line for report in reports for kind in KINDS for line in report.get(kind, [])]
    for line in found[:20]:
        console.print(line, markup=False)
    return 1 if found else 0
