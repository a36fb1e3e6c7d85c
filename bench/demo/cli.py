"""`tiffin demo`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, NoReturn

import typer
from rich.console import Console

from tiffin.conductor.console import SERVICE
from tiffin.kvstore.cli.interruptible import interruptible
from tiffin.kvstore.cli.local.local_redis import need_redis
from tiffin.kvstore.errors import InvalidInput, MissingExtra
from tiffin.kvstore.extras import need

if TYPE_CHECKING:
    from collections.abc import Callable

DIFFERS, DIED, MISSING, INTERRUPTED = 1, 2, 3, 130

console = Console()
errors_console = Console(stderr=True)


def demo(
    engine: Annotated[
        Literal["transformers", "vllm"],
        typer.Option(help="What computes: a small engine over transformers, or real vLLMs."),
    ] = "transformers",
    vllm: Annotated[
        Path | None,
        typer.Option(
            help="Python of an environment that has vLLM and tiffin.",
            envvar="TIFFIN_VLLM",
            show_default="this one",
            metavar="PYTHON",
        ),
    ] = None,
    requests: Annotated[
        int | None, typer.Option(min=2, help="Only the first so many requests of the trace.")
    ] = None,
    workers: Annotated[
        int | None,
        typer.Option(
            min=1,
            max=64,
            help="Prefill workers, and as many decode workers.",
            show_default="2, of vLLM 1",
        ),
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Seed of weights and prompts.")] = 0,
    nodes: Annotated[
        int | None,
        typer.Option(
            min=1,
            max=16,
            help="Nodes; the workers are at home at them in turn.",
            show_default="2, with vLLM 1",
        ),
    ] = None,
    dram: Annotated[
        str | None,
        typer.Option(help="Each node's DRAM tier.", show_default="32MiB, with vLLM 512MiB"),
    ] = None,
    nvme: Annotated[
        str | None, typer.Option(help="Each node's NVMe tier.", show_default="512MiB")
    ] = None,
    overload: Annotated[
        float | None,
        typer.Option(
            min=0.5,
            max=600,
            help="Seconds of too many requests.",
            show_default="4 objectives",
            metavar="S",
        ),
    ] = None,
    record: Annotated[
        Path | None,
        typer.Option(
            help="Let the conductor record the requests here, for `tiffin whatif`.",
            dir_okay=False,
            show_default=False,
        ),
    ] = None,
    out: Annotated[Path, typer.Option(help="Folder for the plot and the rows.")] = Path("out"),
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the summary as JSON, without progress.")
    ] = False,
    quick: Annotated[bool, typer.Option(help="Half a minute: fewer requests and layers.")] = False,
) -> None:
    """See it at work: a conductor, two prefill and two decode workers, one pool over two nodes.

    Starts two nodes with DRAM tiers that are too small and a Redis as their directory, and builds a
    small Llama with random weights in each worker. A real trace is answered by single processes
    first, then through the conductor: prefill and decode are processes of their own, KV caches move
    through the pool. Compares times to first token and every token. Then comes more than the
    workers can do, without and with predictive rejection. Prints some decisions with their reasons
    and writes `demo-ttft.png` and `demo-ttft.json`. Exits with 1 if any token differs, 2 if a
    process died.

    With `--engine vllm` the workers are vLLM processes behind a gateway, with one node as the pool,
    and there is no overload. It writes `demo-vllm.json`.

    **Examples**

    `tiffin demo`, `tiffin demo --nodes 1`, `tiffin demo --quick --json | jq .ttft_ratio`

    `tiffin demo --engine vllm --vllm .venv-engines/bin/python`
    """
    pooled = engine == "transformers" and nodes != 1
    own = ("torch", "transformers", "matplotlib") if engine == "transformers" else ()
    try:
        need("the demo", *own, *SERVICE, *("redis",) * pooled)
        if pooled:
            need_redis()
    except MissingExtra as error:
        _say_missing(str(error))
    except InvalidInput as error:
        _say_missing(f"{error}. Or: tiffin demo --nodes 1")
    if engine == "vllm":
        given = {"--nodes": nodes, "--nvme": nvme, "--overload": overload, "--record": record}
        refused = [name for name, value in given.items() if value is not None]
        if refused:
            raise typer.BadParameter(f"{', '.join(refused)}: not with --engine vllm")
        sizes = {"requests": requests, "workers": workers, "seed": seed, "dram": dram}
        _end(lambda: _run_vllm(vllm, sizes, quick, out, as_json))
    chosen: dict[str, Any] = {
        "requests": requests,
        "workers": workers,
        "nodes": nodes,
        "seed": seed,
    }
    chosen |= {"dram": dram, "nvme": nvme, "overload_s": overload}
    chosen["record"] = None if record is None else str(record)
    _end(lambda: _run(chosen, quick, out, as_json))


def _say_missing(text: str) -> NoReturn:
    errors_console.print(text, markup=False, highlight=False, soft_wrap=True)
    raise typer.Exit(MISSING)


def _end(run: Callable[[], dict[str, Any]]) -> NoReturn:
    """Run the demo, and exit with its status."""
    from ..serving.errors import ProcessFailed

    try:
        with interruptible():
            summary = run()
    except ProcessFailed as failure:
        errors_console.print(str(failure), markup=False, highlight=False)
        raise typer.Exit(DIED) from failure
    except KeyboardInterrupt:
        errors_console.print("stopped")
        raise typer.Exit(INTERRUPTED) from None
    raise typer.Exit(0 if summary["identical"] else DIFFERS)


def _run_vllm(
    python: Path | None, sizes: dict[str, Any], quick: bool, out: Path, as_json: bool
) -> dict[str, Any]:
    from ..suite import Missing
    from .vllm.interpreter import find
    from .vllm.show import show

    try:
        chosen = {**sizes, "python": find(python)}
    except Missing as missing:
        _say_missing(str(missing))
    return show(chosen, quick, out, as_json, console)


def _run(chosen: dict[str, Any], quick: bool, out: Path, as_json: bool) -> dict[str, Any]:
    from ..demo import decisions, report
    from .plot import plot
    from .run import Options, run

    options = Options.quick(**chosen) if quick else Options.full(**chosen)
    out.mkdir(parents=True, exist_ok=True)
    outcome = run(options, Console(quiet=True) if as_json else console)
    summary = report.summarise(outcome)
    picture, data = out / "demo-ttft.png", out / "demo-ttft.json"
    data.write_text(json.dumps(report.rows(outcome, summary), indent=1), encoding="utf-8")
    plot(outcome, summary, picture)
    if as_json:
        typer.echo(json.dumps(summary, indent=2))
        return summary
    served = [*outcome.conducted, *(one for each in outcome.overload for one in each.served)]
    console.print("\nsome decisions, and why", style="italic")
    for line in decisions.words(decisions.chosen(served, outcome.decisions), outcome.decisions):
        console.print(line, highlight=False, markup=False, soft_wrap=True)
    console.print()
    console.print(report.table(summary))
    console.print(report.overload_table(summary))
    elapsed = f"{summary['elapsed_s']:.0f} s in all"
    console.print(f"plot: {picture}, rows and decisions: {data}, {elapsed}", highlight=False)
    return summary
