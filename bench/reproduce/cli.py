"""`tiffin reproduce`: published results, computed again."""

from __future__ import annotations

import json
import time
from pathlib import Path  # noqa: TC003 # typer reads it
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from tiffin.kvstore.errors import InvalidInput

from .plots import png
from .registry import Effort, Reproduction, named, reproductions
from .report import Finding, html_page, markdown, tables

_console = Console()
_progress_console = Console(stderr=True)


def commands(app: typer.Typer) -> None:
    """Add `reproduce` to the program."""
    app.command("reproduce")(reproduce)


def reproduce(
    names: Annotated[
        list[str] | None,
        typer.Argument(metavar="NAME...", help="Of reproductions; without one they are listed."),
    ] = None,
    everything: Annotated[bool, typer.Option("--all", help="Run all of them.")] = False,
    full: Annotated[
        bool, typer.Option("--full", help="More seeds, for closer confidence: some hours.")
    ] = False,
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

    `tiffin reproduce --all --html evidence.html`
    """
    if not names and not everything:
        for one in reproductions().values():
            typer.echo(f"{one.name:28} {one.title} ({one.source})")
        return
    try:
        chosen = list(reproductions().values()) if everything else named(names or [])
    except InvalidInput as error:
        _console.print(f"tiffin reproduce: {error}", style="red", highlight=False, markup=False)
        raise typer.Exit(2) from error
    effort = Effort.full() if full else Effort()
    findings = []
    for one in chosen:
        findings.append(_run(one, effort))
        if not as_json:
            for table in tables(findings[-1]):
                _console.print(table)
            for note in findings[-1].evidence.notes:
                _console.print(note, highlight=False, markup=False)
    if as_json:
        typer.echo(json.dumps([one.plain() for one in findings], indent=2))
    _write(findings, html, plots, as_markdown)


def _run(one: Reproduction, effort: Effort) -> Finding:
    start = time.monotonic()
    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    hidden = not _progress_console.is_terminal
    with Progress(*columns, console=_progress_console, transient=True, disable=hidden) as progress:
        task = progress.add_task(one.name)
        evidence = one.run(
            effort, lambda text: progress.update(task, description=f"{one.name}: {text}")
        )
    return Finding(one, evidence, time.monotonic() - start)


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
