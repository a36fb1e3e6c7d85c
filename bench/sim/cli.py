"""`tiffin simulate`: a trace, a simulated cluster, and the conductor's policies side by side."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path  # noqa: TC003 # typer reads it
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from tiffin.conductor.errors import ConductorError
from tiffin.kvstore.errors import InvalidInput

from ..traces.readers import read
from ..traces.scaling import at_rate
from .colocated import ColocatedOptions, simulate_colocated, summarise_colocated
from .engine_options import EngineMode, EngineOptions
from .outcomes import summarise
from .simulation import SimulationOptions, simulate

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ..traces.trace import Trace
    from .outcomes import Summary

_DEFAULTS = SimulationOptions()
_console = Console()


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
    rate: Annotated[float, typer.Option(help="So many times the trace's own rate.")] = 1.0,
    prefill: Annotated[int, typer.Option(min=1, help="Instances that prefill.")] = 8,
    decode: Annotated[int, typer.Option(min=1, help="Instances that decode.")] = 8,
    profile: Annotated[str, typer.Option(help="Their latency profile.")] = _DEFAULTS.profile,
    bandwidth: Annotated[
        float, typer.Option(min=0.01, metavar="GBIT/S", help="Of a node's network card.")
    ] = _DEFAULTS.bandwidth_bytes_s * 8e-9,
    ttft: Annotated[float | None, typer.Option(min=0.001, help="Objective, in seconds.")] = None,
    tbt: Annotated[float | None, typer.Option(min=0.001, help="Objective, in seconds.")] = None,
    admission: Annotated[str, typer.Option(help="The conductor's admission mode.")] = "off",
    late: Annotated[
        float, typer.Option(min=0, help="Seconds until the conductor hears of anything.")
    ] = _DEFAULTS.late_s,
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
    """
    options = SimulationOptions(
        prefill=prefill,
        decode=decode,
        profile=profile,
        bandwidth_bytes_s=bandwidth / 8e-9,
        ttft_s=ttft,
        tbt_s=tbt,
        admission=admission,
        late_s=late,
        seed=seed,
    )
    try:
        trace = at_rate(read(file), rate)
        policies = policy or ([] if colocated else [_DEFAULTS.policy])
        found = [_one(trace, replace(options, policy=name)) for name in policies]
        found += [_colocated(trace, options, mode) for mode in colocated or ()]
    except (InvalidInput, ConductorError, OSError) as error:
        _console.print(f"tiffin simulate: {error}", style="red", highlight=False, markup=False)
        raise typer.Exit(2) from error
    if as_json:
        typer.echo(json.dumps([asdict(one) for one in found], indent=2))
    else:
        _console.print(table(trace.name, found))


def _one(trace: Trace, options: SimulationOptions) -> Summary:
    shown = Console(stderr=True)
    with Progress(console=shown, transient=True, disable=not shown.is_terminal) as progress:
        task = progress.add_task(options.policy, total=1.0)
        outcome = simulate(trace, options, lambda share: progress.update(task, completed=share))
    return summarise(trace, outcome)


def _colocated(trace: Trace, options: SimulationOptions, mode: EngineMode) -> Summary:
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
    return summarise_colocated(trace, simulate_colocated(trace, cluster))


def table(title: str, summaries: Sequence[Summary]) -> Table:
    """A column for each summary."""
    made = Table(title=title, title_justify="left")
    made.add_column("")
    for one in summaries:
        made.add_column(one.policy, justify="right")
    rows = [
        ("requests", [f"{s.requests:,}" for s in summaries]),
        ("rejected", [_rejected(s) for s in summaries]),
        ("TTFT mean", [f"{s.ttft_s.mean:.2f} s" for s in summaries]),
        *(
            (f"TTFT {name}", [f"{getattr(s.ttft_s, name):.2f} s" for s in summaries])
            for name in ("p50", "p90", "p99")
        ),
        *(
            (f"TBT {name}", [f"{getattr(s.tbt_s, name) * 1e3:.0f} ms" for s in summaries])
            for name in ("p50", "p90", "p99")
        ),
        ("met the objectives", [_share(s.attained) for s in summaries]),
        ("prompt tokens found", [f"{s.hit_share:.1%}" for s in summaries]),
        ("an ideal pool's", [f"{s.ideal_hit_share:.1%}" for s in summaries]),
        ("GPU time of a prefill", [f"{s.compute_s:.3f} s" for s in summaries]),
        ("moved", [f"{s.moved_bytes / 1e12:.2f} TB" for s in summaries]),
        ("of it for prompts", [f"{s.usage.fetched_bytes / 1e12:.2f} TB" for s in summaries]),
        ("evenness of prefills", [f"{s.usage.evenness:.3f}" for s in summaries]),
        ("predicted TTFT, bias", [f"{s.ttft_bias:+.1%}" for s in summaries]),
        ("predicted TTFT, p90 error", [f"{s.ttft_error_p90:.1%}" for s in summaries]),
    ]
    for name, values in rows:
        made.add_row(name, *values)
    return made


def _share(share: float | None) -> str:
    return "" if share is None else f"{share:.1%}"


def _rejected(summary: Summary) -> str:
    by_reason = ", ".join(f"{count:,} {reason}" for reason, count in summary.rejected.items())
    return by_reason or "0"
