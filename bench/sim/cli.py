"""`tiffin simulate`: a trace, a simulated cluster, and the conductor's policies side by side."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from enum import StrEnum
from functools import partial
from pathlib import Path  # noqa: TC003 # typer reads it
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.progress import Progress

from tiffin.conductor.errors import ConductorError
from tiffin.kvstore.errors import InvalidInput
from tiffin.kvstore.extras import need

from ..plots import png
from ..traces.readers import read
from ..traces.scaling import at_rate, window, with_tenants
from .cluster.colocated import ColocatedOptions, simulate_colocated, summarise_colocated
from .cluster.options import SHIPPED
from .cluster.simulation import SimulationOptions, simulate
from .instances.engine_options import EngineMode, EngineOptions
from .results.curves import SimulationRun, curves
from .results.display import table
from .results.goodput import highest_rate
from .results.outcomes import summarise

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ..traces.trace import Trace

_DEFAULTS = SHIPPED
_REQUESTS = "Requests"
_console = Console()


class Order(StrEnum):
    """Values of `SimulationOptions.order`."""

    HELD = "held"
    ARRIVAL = "arrival"
    CONDUCTOR = "conductor"


class Preemption(StrEnum):
    """Values of `SimulationOptions.preemption`."""

    NONE = "none"
    RECOMPUTE = "recompute"
    SWAP = "swap"


def commands(app: typer.Typer) -> None:
    """Add `simulate` to the program."""
    app.command("simulate")(simulated)


def simulated(
    file: Annotated[
        Path,
        typer.Argument(dir_okay=False, metavar="TRACE", help="See `tiffin trace --help`."),
    ],
    policy: Annotated[
        list[str] | None,
        typer.Option(help="Of the conductor; several are shown side by side.", show_default=False),
    ] = None,
    colocated: Annotated[
        list[EngineMode] | None,
        typer.Option(
            help="Instances that prefill and decode, instead of a policy or beside it; as many.",
            show_default=False,
        ),
    ] = None,
    rate: Annotated[
        float,
        typer.Option(help="So many times the trace's own rate.", rich_help_panel=_REQUESTS),
    ] = 1.0,
    start: Annotated[
        float, typer.Option(min=0, help="Second of the trace.", rich_help_panel=_REQUESTS)
    ] = 0.0,
    stop: Annotated[
        float | None, typer.Option(min=0, help="Second of the trace.", rich_help_panel=_REQUESTS)
    ] = None,
    tenants: Annotated[
        int,
        typer.Option(
            min=1, help="Each sends the whole trace, of its own.", rich_help_panel=_REQUESTS
        ),
    ] = 1,
    closed: Annotated[
        bool,
        typer.Option(
            "--closed",
            help="A conversation's next turn comes after the answer.",
            rich_help_panel=_REQUESTS,
        ),
    ] = False,
    prefill: Annotated[int, typer.Option(min=1, help="Instances that prefill.")] = 8,
    decode: Annotated[int, typer.Option(min=1, help="Instances that decode.")] = 8,
    profile: Annotated[str, typer.Option(help="Their latency profile.")] = _DEFAULTS.profile,
    bandwidth: Annotated[
        float, typer.Option(min=0.01, metavar="GBIT/S", help="Of a node's network card.")
    ] = _DEFAULTS.bandwidth_bytes_s * 8e-9,
    ttft: Annotated[float | None, typer.Option(min=0.001, help="Objective, in seconds.")] = None,
    tbt: Annotated[float | None, typer.Option(min=0.001, help="Objective, in seconds.")] = None,
    admission: Annotated[str, typer.Option(help="The conductor's admission mode.")] = "off",
    order: Annotated[
        Order,
        typer.Option(
            help="held: prompts are sent in the conductor's order, as it does by default; arrival: "
            "at once; conductor: instances ask."
        ),
    ] = Order.HELD,
    late: Annotated[
        float, typer.Option(min=0, help="Seconds until the conductor hears of anything.")
    ] = _DEFAULTS.late_s,
    noise: Annotated[
        float, typer.Option(min=0, max=2, help="Of the log of all times of computing: its spread.")
    ] = 0.0,
    nvme: Annotated[
        int, typer.Option(min=0, metavar="TOKENS", help="That a node keeps on disk, too.")
    ] = 0,
    engine_cache: Annotated[
        int,
        typer.Option(min=0, metavar="TOKENS", help="Kept in HBM, before the node's."),
    ] = 0,
    blind: Annotated[
        bool,
        typer.Option("--blind", help="The conductor does not hear what nodes have."),
    ] = False,
    chunk: Annotated[
        int, typer.Option(min=0, metavar="TOKENS", help="Prompts are computed in chunks; 0: whole.")
    ] = 0,
    stages: Annotated[
        int, typer.Option(min=1, help="Nodes of one prefill instance, a pipeline for chunks.")
    ] = 1,
    layerwise: Annotated[
        bool, typer.Option("--layerwise", help="Loads and hand-overs overlap with computing.")
    ] = False,
    kv_tokens: Annotated[
        int,
        typer.Option(min=1, metavar="TOKENS", help="Of context, that an instance has room for."),
    ] = _DEFAULTS.kv_capacity_tokens,
    preemption: Annotated[
        Preemption, typer.Option(help="Of answers for which the memory is too small.")
    ] = Preemption.NONE,
    goodput: Annotated[
        bool,
        typer.Option(
            "--goodput",
            help="Find the rate at which 90% meet the objectives: some ten simulations for each.",
        ),
    ] = False,
    plots: Annotated[
        Path | None,
        typer.Option(help="Write distributions and loads as PNG in this folder.", file_okay=False),
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="The same seed, the same outcome.")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, not a table.")] = False,
) -> None:
    """Replay a trace on a simulated cluster, where the conductor's own core decides.

    Nobody needs a hundred GPUs for it: prefills and decode steps take what the latency profile
    says, transfers share the nodes' network cards, and each prefill instance's node keeps blocks in
    its memory. Of TBT each request counts with the longest tenth of its gaps.

    **Examples**

    `tiffin simulate conversation_trace.jsonl --policy random --policy kvcache_centric`

    `tiffin simulate trace.jsonl --policy kvcache_centric --colocated plain --colocated chunked`

    `tiffin simulate trace.jsonl --rate 2 --ttft 30 --tbt 0.1 --admission predictive`

    `tiffin simulate trace.jsonl --policy random --policy kvcache_centric --plots plots`

    `tiffin simulate trace.jsonl --start 600 --stop 1200 --ttft 30 --tbt 0.1 --goodput`
    """
    options = SimulationOptions(
        prefill=prefill,
        decode=decode,
        profile=profile,
        bandwidth_bytes_s=bandwidth / 8e-9,
        ttft_s=ttft,
        tbt_s=tbt,
        admission=admission,
        order=order.value,
        late_s=late,
        seed=seed,
        noise=noise,
        nvme_cache_tokens=nvme,
        hbm_cache_tokens=engine_cache,
        knows_nodes=not blind,
        chunk_tokens=chunk,
        stages=stages,
        layerwise=layerwise,
        preemption=preemption.value,
        kv_capacity_tokens=kv_tokens,
        closed=closed,
    )
    if plots is not None:
        need("a plot", "matplotlib")
    try:
        whole = with_tenants(read(file), tenants, seed)
        trace = at_rate(window(whole, start, stop or float("inf")), rate)
        if not trace.requests:
            raise InvalidInput(
                f"no request comes in that part of {file}, which has {whole.span_s:.0f} s"
            )
        if goodput:
            _check_objectives(options)
        found, rates = list[SimulationRun](), list[float]()
        for run in _runs(options, policy, colocated):
            if goodput:
                rates.append(_goodput(trace, run))
            found.append(run(trace))
        if plots is not None:
            _write_plots(found, plots)
    except (InvalidInput, ConductorError, OSError) as error:
        _console.print(f"tiffin simulate: {error}", style="red", highlight=False, markup=False)
        raise typer.Exit(2) from error
    if as_json:
        shown = [asdict(one.summary) for one in found]
        for one, times in zip(shown, rates, strict=False):
            one["goodput_rate"] = times
        typer.echo(json.dumps(shown, indent=2))
    else:
        _console.print(table(trace.name, [one.summary for one in found], rates))


def _runs(
    options: SimulationOptions, policies: list[str] | None, modes: list[EngineMode] | None
) -> list[Callable[[Trace], SimulationRun]]:
    """What is shown side by side."""
    names = policies or ([] if modes else [options.policy])
    return [
        *(partial(_one, replace(options, policy=name)) for name in names),
        *(partial(_colocated, options, mode) for mode in modes or ()),
    ]


def _check_objectives(options: SimulationOptions) -> None:
    if options.ttft_s is None and options.tbt_s is None:
        raise InvalidInput("goodput is a rate at which objectives are met: give --ttft or --tbt")


def _goodput(trace: Trace, run: Callable[[Trace], SimulationRun]) -> float:
    """Times of the trace's rate."""
    return highest_rate(lambda times: run(at_rate(trace, times)).summary.attained or 0.0)


def _one(options: SimulationOptions, trace: Trace) -> SimulationRun:
    shown = Console(stderr=True)
    with Progress(console=shown, transient=True, disable=not shown.is_terminal) as progress:
        task = progress.add_task(options.policy, total=1.0)
        outcome = simulate(trace, options, lambda share: progress.update(task, completed=share))
    return SimulationRun(summarise(trace, outcome), outcome.jobs, outcome.loads)


def _colocated(options: SimulationOptions, mode: EngineMode, trace: Trace) -> SimulationRun:
    """As many nodes of the same hardware, each of which does both."""
    engine = EngineOptions(
        mode,
        sequences_max=options.batch_max,
        kv_capacity_tokens=options.kv_capacity_tokens,
        token_bytes=options.token_bytes,
    )
    cluster = ColocatedOptions(
        *(options.prefill + options.decode, engine, options.profile),
        ttft_s=options.ttft_s,
        tbt_s=options.tbt_s,
    )
    outcome = simulate_colocated(trace, cluster)
    return SimulationRun(summarise_colocated(trace, outcome), outcome.jobs)


def _write_plots(runs: Sequence[SimulationRun], folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for plot in curves(runs):
        (folder / f"{plot.name}.png").write_bytes(png(plot))
