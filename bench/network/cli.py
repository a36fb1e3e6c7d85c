"""`tiffin bench network`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from ..environment import environment_lines
from ..store.report import markdown, table
from .report import MEASUREMENTS, NetworkReport, run
from .setting import Setting, Sizes

_console = Console()
_progress_console = Console(stderr=True)


def commands(app: typer.Typer) -> None:
    """Add `bench network` to the program, which has the group `bench` already."""
    for group in app.registered_groups:
        if group.name == "bench" and group.typer_instance is not None:
            group.typer_instance.command("network")(network)


def network(
    quick: Annotated[bool, typer.Option(help="Fewer rounds: half a minute, not minutes.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
    as_markdown: Annotated[bool, typer.Option("--markdown", help="Print Markdown.")] = False,
    out: Annotated[Path, typer.Option(help="Where bench-network.json goes.")] = Path("out"),
    row: Annotated[
        list[str] | None, typer.Option(help=f"Only these: {', '.join(MEASUREMENTS)}.")
    ] = None,
    mooncake: Annotated[
        Path | None,
        typer.Option(help="Python of an environment that has Mooncake, to compare with it."),
    ] = None,
) -> None:
    """Measure remote blocks over loopback TCP, each number beside the limit of the same run.

    Timings are not assertions: it exits with 1 only when a measurement crashed. Rows that need what
    is not installed are left out, and named at the end.

    **Examples**

    `tiffin bench network --quick`, `tiffin bench network --row remote-get --row readers`
    """
    names = row or [name for name in MEASUREMENTS if name != "mooncake" or mooncake]
    if unknown := [name for name in names if name not in MEASUREMENTS]:
        raise typer.BadParameter(f"no row {unknown[0]!r}; there are: {', '.join(MEASUREMENTS)}")
    report = _run(Sizes.quick() if quick else Sizes(), names, mooncake)
    path = report.write(out)
    if as_json:
        typer.echo(json.dumps(report.plain(), indent=2))
    elif as_markdown:
        typer.echo("\n".join([*environment_lines(report.environment), "", markdown(report)]))
    else:
        _console.print("\n".join(environment_lines(report.environment)), highlight=False)
        _console.print(table(report))
    for name, lack in report.missing.items():
        _progress_console.print(f"left out {name}: {lack}", markup=False, highlight=False)
    _progress_console.print(f"{_verdict(report)}; all numbers: {path}")
    raise typer.Exit(1 if report.crashed else 0)


def _run(sizes: Sizes, names: list[str], mooncake: Path | None) -> NetworkReport:
    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    with Progress(*columns, console=_progress_console, transient=True) as progress:
        task = progress.add_task("", total=None)
        current = ""

        def tell(text: str) -> None:
            progress.update(task, description=f"{current}: {text}")

        def started(name: str) -> None:
            nonlocal current
            current = f"{names.index(name) + 1}/{len(names)} {name}"
            progress.update(task, description=current)

        return run(Setting(sizes, mooncake, tell), names, started)


def _verdict(report: NetworkReport) -> str:
    judged = [row.met for row in report.rows if row.met is not None]
    crashed = f", {len(report.crashed)} crashed" if report.crashed else ""
    return f"{sum(judged)} of {len(judged)} targets met{crashed}"
