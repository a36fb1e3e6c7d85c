"""The commands of `tiffin` that belong to the benchmarks: `tiffin demo` and `tiffin bench`."""

from __future__ import annotations

import json
import signal
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from .store.cli import commands as store_commands

if TYPE_CHECKING:
    from types import FrameType

NEEDED = ("torch", "transformers", "matplotlib")
DIFFERS, DIED, MISSING, INTERRUPTED = 1, 2, 3, 130

console = Console()
errors_console = Console(stderr=True)


def commands(app: typer.Typer) -> None:
    """Add the commands of this package."""
    app.command("demo")(demo)
    store_commands(app)


def demo(
    requests: Annotated[
        int | None, typer.Option(min=2, help="Only the first so many requests of the trace.")
    ] = None,
    workers: Annotated[int, typer.Option(min=1, max=64, help="Engine processes.")] = 2,
    seed: Annotated[int, typer.Option(min=0, help="Seed of weights and prompts.")] = 0,
    dram: Annotated[
        str | None, typer.Option(help="The node's DRAM tier.", show_default="32MiB")
    ] = None,
    nvme: Annotated[
        str | None, typer.Option(help="The node's NVMe tier.", show_default="512MiB")
    ] = None,
    out: Annotated[Path, typer.Option(help="Folder for the plot and the rows.")] = Path("out"),
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the summary as JSON, without progress.")
    ] = False,
    quick: Annotated[bool, typer.Option(help="Half a minute: fewer requests and layers.")] = False,
) -> None:
    """See a pool at work: two processes answer a real trace, first without it, then with it.

    Starts a node with a DRAM tier that is too small, builds a small Llama with random weights in
    each process, and compares times to first token and every token. Writes `demo-ttft.png` and
    `demo-ttft.json`. Exits with 1 if any token differs, 2 if a process died.

    **Examples**

    `tiffin demo`, `tiffin demo --quick --json | jq .ttft_ratio`
    """
    lacking = [name for name in NEEDED if find_spec(name) is None]
    if lacking:
        message = f'{", ".join(lacking)} not found; run: pip install "tiffin[engines,bench]"'
        errors_console.print(message, markup=False)
        raise typer.Exit(MISSING)
    chosen = {"requests": requests, "workers": workers, "seed": seed, "dram": dram, "nvme": nvme}
    for number in (signal.SIGINT, signal.SIGTERM):  # shells ignore the first for background jobs
        signal.signal(number, _interrupt)
    try:
        summary = _run(chosen, quick, out, as_json)
    except KeyboardInterrupt:
        errors_console.print("stopped")
        raise typer.Exit(INTERRUPTED) from None
    raise typer.Exit(0 if summary["identical"] else DIFFERS)


def _interrupt(number: int, frame: FrameType | None) -> None:
    """A signal cleans up as a Ctrl-C does."""
    raise KeyboardInterrupt


def _run(chosen: dict[str, Any], quick: bool, out: Path, as_json: bool) -> dict[str, Any]:
    from .demo import report
    from .demo.run import DemoFailed, Options, run

    options = Options.quick(**chosen) if quick else Options.full(**chosen)
    out.mkdir(parents=True, exist_ok=True)
    try:
        outcome = run(options, Console(quiet=True) if as_json else console)
    except DemoFailed as failure:
        errors_console.print(str(failure), markup=False, highlight=False)
        raise typer.Exit(DIED) from failure
    summary = report.summarise(outcome)
    rows = [asdict(row) for row in outcome.rows]
    picture, data = out / "demo-ttft.png", out / "demo-ttft.json"
    data.write_text(json.dumps({"summary": summary, "rows": rows}, indent=1), encoding="utf-8")
    report.plot(outcome.rows, summary, picture)
    if as_json:
        typer.echo(json.dumps(summary, indent=2))
    else:
        console.print(report.table(summary))
        console.print(f"plot: {picture}, rows: {data}", highlight=False)
    return summary
