"""A suite's output for people: progress, a table, and the measurements left out or crashed."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from tiffin.kvstore.cli.interruptible import interruptible

from .environment import environment_lines
from .suite import SuiteReport

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

    from .store.rows import Row
    from .suite import S, Suite, Tell

_console = Console()
_progress_console = Console(stderr=True)


# -- commands --------------------------------------------------------------------------------------


def add_command(app: typer.Typer, name: str, command: Callable[..., None]) -> None:
    """Add `bench NAME` to the program; `bench` is added if nothing has added it before."""
    for group in app.registered_groups:
        if group.name == "bench" and group.typer_instance is not None:
            group.typer_instance.command(name)(command)
            return
    bench = typer.Typer(help="Measure Tiffin on this machine.", no_args_is_help=True)
    bench.command(name)(command)
    # Without a callback, typer would fold a group of one command into that command.
    bench.callback()(_bench)
    app.add_typer(bench, name="bench")


def _bench() -> None:
    """Measure Tiffin on this machine."""


# Options of every `bench` command.
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]
AsMarkdown = Annotated[bool, typer.Option("--markdown", help="Print Markdown.")]


def out_option(suite: Suite[S]) -> Any:
    """`--out`, for `Annotated`: the folder of the report."""
    return typer.Option(help=f"Where bench-{suite.name}.json goes.")


def row_option(suite: Suite[S]) -> Any:
    """`--row`, for `Annotated`: the choice among the measurements."""
    return typer.Option(help=f"Only these: {', '.join(suite.measurements)}.")


@dataclass(frozen=True, slots=True)
class View:
    """How a command shows its report: as a table, as Markdown, and in a line."""

    table: Callable[[SuiteReport], Table]
    markdown: Callable[[SuiteReport], str]
    verdict: Callable[[SuiteReport], str]


def carry_out(
    suite: Suite[S],
    setting: Callable[[Tell], S],
    names: Sequence[str],
    out: Path,
    *,
    as_json: bool = False,
    as_markdown: bool = False,
    view: View | None = None,
) -> None:
    """Run the named measurements, show and write their results; the last step of a command.

    `view`: other tables than those of limits and targets. `setting(tell)` makes the measurements'
    setting; they report progress by `tell(text)`. Raises typer.BadParameter for a name that the
    suite does not have, else typer.Exit: 1 after a crash.
    """
    if unknown := [name for name in names if name not in suite.measurements]:
        known = ", ".join(suite.measurements)
        raise typer.BadParameter(f"no row {unknown[0]!r}; there are: {known}")
    with interruptible():
        report = _run(suite, setting, names, out)
    view = view or View(table, markdown, SuiteReport.verdict)
    path = report.write(out)
    if as_json:
        typer.echo(json.dumps(report.plain(), indent=2))
    elif as_markdown:
        typer.echo("\n".join([*environment_lines(report.environment), "", view.markdown(report)]))
    else:
        _console.print("\n".join(environment_lines(report.environment)), highlight=False)
        _console.print("", view.table(report), "", legend(report), sep="\n")
    for name, lack in report.missing.items():
        _say(f"left out {name}: {lack}")
    for name, trace in report.traces.items():
        _say(f"{name} crashed:\n{trace.rstrip()}")
    _say(f"{view.verdict(report)}; all numbers: {path}")
    raise typer.Exit(1 if report.crashed else 0)


def _say(text: str) -> None:
    """Print to standard error without markup or wrapping: error messages contain brackets and line
    breaks."""
    _progress_console.print(text, markup=False, highlight=False, soft_wrap=True)


def _run(
    suite: Suite[S], setting: Callable[[Tell], S], names: Sequence[str], out: Path
) -> SuiteReport:
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

        return suite.run(setting(tell), names, started, out)


# -- tables ----------------------------------------------------------------------------------------


def table(report: SuiteReport) -> Table:
    """One line per row, a met target green and a missed one red, within 80 columns; the
    descriptions are in its `legend`."""
    found = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0))
    found.add_column("row", no_wrap=True)
    found.add_column("p50", justify="right", no_wrap=True)
    found.add_column("", no_wrap=True)
    for column in ("limit", "ratio", "best"):
        found.add_column(column, justify="right", no_wrap=True)
    found.add_column("target")
    for row in report.rows:
        found.add_row(*_cells(row))
    return found


def _cells(row: Row) -> list[str]:
    colour = {True: "green", False: "red", None: "dim"}[row.met]
    verdict = {True: ": met", False: ": missed", None: ""}[row.met]
    return [
        row.name,
        number(row.value.p50),
        row.unit,
        number(row.limit.p50),
        number(row.ratio),
        number(row.best_ratio),
        f"[{colour}]{row.target_text}{verdict}[/]",
    ]


def legend(report: SuiteReport) -> Table:
    """Each row's description, limit and spread; for a crashed measurement, the last line of its
    error."""
    found = Table.grid(padding=(0, 2))
    found.add_column(no_wrap=True)
    found.add_column(overflow="fold")
    for row in report.rows:
        found.add_row(row.name, f"{escape(row.what)}[dim]; {escape('; '.join(_details(row)))}[/]")
    for name, why in report.crashed.items():
        last = why.strip().splitlines()[-1]
        found.add_row(f"[bold red]{name}[/]", f"[red]crashed: {escape(last)}[/]")
    return found


def _details(row: Row) -> Iterator[str]:
    yield f"limit: {row.limit_what}"
    if row.value.samples > 1:
        yield f"p20 to p80: {number(row.value.p20)} to {number(row.value.p80)}"
    if row.note:
        yield row.note


def number(value: float) -> str:
    """The number with three significant digits, or as an integer from 100 on."""
    return f"{value:.0f}" if abs(value) >= 100 else f"{value:.3g}"


def markdown(report: SuiteReport) -> str:
    """The table of the docs."""
    lines = [
        "| row | p20 | p50 | p80 | unit | limit (p50) | ratio | best ratio | target | |",
        "|---|--:|--:|--:|---|--:|--:|--:|---|---|",
    ]
    for row in report.rows:
        spread = " | ".join(number(x) for x in (row.value.p20, row.value.p50, row.value.p80))
        verdict = {True: "met", False: "**missed**", None: ""}[row.met]
        lines.append(
            f"| `{row.name}` | {spread} | {row.unit} | {number(row.limit.p50)} "
            f"| {number(row.ratio)} | {number(row.best_ratio)} | {row.target_text} | {verdict} |"
        )
    return "\n".join(lines)
