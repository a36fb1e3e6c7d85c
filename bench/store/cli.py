"""`tiffin bench store`."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from ..environment import environment_lines
from .report import MEASUREMENTS, Report, markdown, run, table
from .setting import Setting, Sizes

_console = Console()
_progress_console = Console(stderr=True)


def commands(app: typer.Typer) -> None:
    """Add `bench store` to the program; `bench` is added if nothing has added it before."""
    for group in app.registered_groups:
        if group.name == "bench" and group.typer_instance is not None:
            group.typer_instance.command("store")(store)
            return
    bench = typer.Typer(help="Measure Tiffin on this machine.", no_args_is_help=True)
    bench.command("store")(store)
    # Without a callback, typer would fold a group of one command into that command.
    bench.callback()(_bench)
    app.add_typer(bench, name="bench")


def _bench() -> None:
    """Measure Tiffin on this machine."""


def store(
    quick: Annotated[bool, typer.Option(help="Fewer rounds: a minute instead of several.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
    as_markdown: Annotated[bool, typer.Option("--markdown", help="Print Markdown.")] = False,
    out: Annotated[Path, typer.Option(help="Where bench-store.json goes.")] = Path("out"),
    row: Annotated[
        list[str] | None, typer.Option(help=f"Only these: {', '.join(MEASUREMENTS)}.")
    ] = None,
    nvme_dir: Annotated[
        Path | None, typer.Option(help="Where the disk is measured; default: the temp directory.")
    ] = None,
) -> None:
    """Measure the store, each number beside the limit of this machine in the same run.

    Timings are not assertions: it exits with 1 only when a measurement crashed.

    **Examples**

    `tiffin bench store --quick`, `tiffin bench store --row put --row nvme --nvme-dir /mnt/nvme0`
    """
    names = row or list(MEASUREMENTS)
    if unknown := [name for name in names if name not in MEASUREMENTS]:
        raise typer.BadParameter(f"no row {unknown[0]!r}; there are: {', '.join(MEASUREMENTS)}")
    sizes = Sizes.quick() if quick else Sizes()
    report = _run(sizes, names, nvme_dir or Path(tempfile.gettempdir()))
    path = report.write(out)
    if as_json:
        typer.echo(json.dumps(report.plain(), indent=2))
    elif as_markdown:
        typer.echo("\n".join([*environment_lines(report.environment), "", markdown(report)]))
    else:
        _console.print("\n".join(environment_lines(report.environment)), highlight=False)
        _console.print(table(report))
    _progress_console.print(f"{_verdict(report)}; all numbers: {path}")
    raise typer.Exit(1 if report.crashed else 0)


def _run(sizes: Sizes, names: list[str], nvme_dir: Path) -> Report:
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

        return run(Setting(sizes, nvme_dir, tell), names, started)


def _verdict(report: Report) -> str:
    judged = [row.met for row in report.rows if row.met is not None]
    crashed = f", {len(report.crashed)} crashed" if report.crashed else ""
    return f"{sum(judged)} of {len(judged)} targets met{crashed}"
