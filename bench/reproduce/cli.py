"""`tiffin reproduce`: published results, computed again."""

from __future__ import annotations

import json
import multiprocessing
import os
import time
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path  # noqa: TC003 # typer reads it
from typing import TYPE_CHECKING, Annotated

import numpy as np
import typer
from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from tiffin.kvstore.errors import InvalidInput
from tiffin.kvstore.extras import need

from ..plots import png
from .registry import Effort, Reproduction, named, reproductions
from .report import Finding, goal_table, html_page, markdown, tables

if TYPE_CHECKING:
    from collections.abc import Sequence

    from .registry import Tell

_console = Console()
_progress_console = Console(stderr=True)


def commands(app: typer.Typer) -> None:
    """Add `reproduce` to the program."""
    app.command("reproduce")(reproduce)


def reproduce(
    names: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="NAME...", help="Of reproductions, or patterns; without one they are listed."
        ),
    ] = None,
    everything: Annotated[bool, typer.Option("--all", help="Run all of them.")] = False,
    full: Annotated[
        bool, typer.Option("--full", help="More seeds, for closer confidence: some hours.")
    ] = False,
    jobs: Annotated[
        int, typer.Option(min=1, help="At a time, in processes of their own.")
    ] = os.cpu_count() or 1,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, not tables.")] = False,
    html: Annotated[
        Path | None, typer.Option(help="Write a report with plots, one file.", dir_okay=False)
    ] = None,
    plots: Annotated[
        Path | None, typer.Option(help="Write each plot as PNG in this folder.", file_okay=False)
    ] = None,
    as_markdown: Annotated[
        Path | None,
        typer.Option("--markdown", help="Write the tables as Markdown.", dir_okay=False),
    ] = None,
) -> None:
    """Compute published results again, and say how far they are from ours.

    The same hardware profile, the same traces and the same seeds serve all of them; none is tuned
    for a result. What is more than 15% off is explained in docs/evidence.md.

    **Examples**

    `tiffin reproduce mooncake-hit-rate`

    `tiffin reproduce 'goals-*'`

    `tiffin reproduce --all --html evidence.html`
    """
    if not names and not everything:
        for one in reproductions().values():
            typer.echo(f"{one.name:28} {one.title} ({one.source})")
        return
    if html is not None or plots is not None:
        need("a plot", "matplotlib")
    try:
        chosen = list(reproductions().values()) if everything else named(names or [])
    except InvalidInput as error:
        _console.print(f"tiffin reproduce: {error}", style="red", highlight=False, markup=False)
        raise typer.Exit(2) from error
    findings, failed = _run_all(chosen, Effort.full() if full else Effort(), jobs)
    _write(findings, html, plots, as_markdown)  # first: a run takes long, and an output may fail
    if as_json:
        typer.echo(json.dumps([one.plain() for one in findings], indent=2, default=_number))
    else:
        for finding in findings:
            _show(finding)
        if goals := goal_table(findings):
            _console.print(goals)
    for name, why in failed.items():
        _console.print(f"tiffin reproduce: {name} failed: {why}", style="red", markup=False)
    if failed:
        raise typer.Exit(1)


def _run_all(
    chosen: Sequence[Reproduction], effort: Effort, jobs: int
) -> tuple[list[Finding], dict[str, str]]:
    """All findings, and the errors of those that failed."""
    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    hidden = not _progress_console.is_terminal
    with Progress(*columns, console=_progress_console, transient=True, disable=hidden) as progress:
        task = progress.add_task("")

        def tell(text: str) -> None:
            progress.update(task, description=text)

        if min(jobs, len(chosen)) == 1:
            return [run(one, effort, tell) for one in chosen], {}
        return _in_processes(chosen, effort, jobs, tell)


def _in_processes(
    chosen: Sequence[Reproduction], effort: Effort, jobs: int, tell: Tell
) -> tuple[list[Finding], dict[str, str]]:
    # Not forked: numpy's threads may hold locks.
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(jobs, mp_context=context) as pool:
        running = {pool.submit(run, one, effort): one.name for one in chosen}
        for count, done in enumerate(as_completed(running), start=1):
            tell(f"{count} of {len(chosen)}, the last one was {running[done]}")
    errors = {name: one.exception() for one, name in running.items()}
    failed = {name: f"{type(e).__name__}: {e}" for name, e in errors.items() if e is not None}
    return [one.result() for one, name in running.items() if name not in failed], failed


def run(one: Reproduction, effort: Effort, tell: Tell = lambda text: None) -> Finding:
    """Run one, here."""
    start = time.monotonic()
    return Finding(one, one.run(effort, tell), time.monotonic() - start)


def _number(value: object) -> object:
    """numpy's numbers, for JSON."""
    if isinstance(value, np.generic):
        return value.item()
    raise TypeError(f"{type(value).__name__} in a finding")


def _show(finding: Finding) -> None:
    for table in tables(finding):
        _console.print(table)
    for note in finding.evidence.notes:
        _console.print(note, highlight=False, markup=False)


def _write(
    findings: list[Finding], html: Path | None, plots: Path | None, as_markdown: Path | None
) -> None:
    if html is not None:
        html.write_text(html_page(findings), encoding="utf-8")
    if plots is not None:
        plots.mkdir(parents=True, exist_ok=True)
        for finding in findings:
            for plot in finding.evidence.plots:
                (plots / f"{plot.name}.png").write_bytes(png(plot))
    if as_markdown is not None:
        as_markdown.write_text(markdown(findings, "images/evidence"), encoding="utf-8")
