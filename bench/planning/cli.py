"""`tiffin plan`: how many instances of which role, and how parallel each."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path  # noqa: TC003 # typer reads it
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from tiffin.conductor.cost import latency_profiles
from tiffin.conductor.errors import ConductorError
from tiffin.kvstore.errors import InvalidInput

from ..display import number
from ..sim.cluster.simulation import SimulationOptions
from ..traces.readers import read
from .families import family
from .plan import Plan, Question, plan

if TYPE_CHECKING:
    from .confirm import Confirmed
    from .ratio import Fleet

_DEFAULTS = SimulationOptions()
_console = Console()
_progress_console = Console(stderr=True)


def commands(app: typer.Typer) -> None:
    """Add `plan` to the program."""
    app.command("plan")(planned)


def planned(
    trace: Annotated[
        Path, typer.Option(dir_okay=False, help="What is asked; see `tiffin trace --help`.")
    ],
    gpus: Annotated[int, typer.Option(min=2, help="The most that there are.")],
    ttft: Annotated[float | None, typer.Option(min=0.001, help="Objective, in seconds.")] = None,
    tbt: Annotated[float | None, typer.Option(min=0.001, help="Objective, in seconds.")] = None,
    slo: Annotated[
        str | None, typer.Option(metavar="ttft=S,tbt=S", help="Both objectives at once.")
    ] = None,
    profile: Annotated[
        list[str] | None,
        typer.Option(
            help="Latency profiles that instances may have: names with commas between, a name "
            "without its .tpN for all degrees of tensor parallelism, or a pattern with *.",
            show_default=latency_profiles.DEFAULT,
        ),
    ] = None,
    attainment: Annotated[
        float, typer.Option(min=0.01, max=1, help="Share of requests that have to meet both.")
    ] = 0.9,
    confirm: Annotated[
        int, typer.Option(min=0, help="So many of the best are tried in the whole simulation.")
    ] = 3,
    requests: Annotated[
        int, typer.Option(min=0, help="Only the first of the trace; 0 for all.")
    ] = 0,
    kv_tokens: Annotated[
        int | None,
        typer.Option(min=1, help="Room for KV of an instance, if not what its GPUs have left."),
    ] = None,
    bandwidth: Annotated[
        float, typer.Option(min=0.01, metavar="GBIT/S", help="Of a node's network card.")
    ] = _DEFAULTS.bandwidth_bytes_s * 8e-9,
    seed: Annotated[int, typer.Option(min=0, help="Of the conductor's random choices.")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, not a table.")] = False,
) -> None:
    """Find how many instances should prefill and how many decode, and how parallel each should be.

    Goodput is the highest rate of the trace's requests at which enough of them meet both
    objectives. Fleets are tried one role at a time, which takes seconds; the best are then tried
    with the conductor deciding, as in `tiffin simulate`, which takes a minute or more for each.

    TTFT counts until the prefill has the first token; TBT of a request is the mean of the longest
    tenth of its gaps. An instance has as many GPUs as its profile's tensor parallelism.

    **Examples**

    `tiffin plan --trace conversation_trace.jsonl --ttft 30 --tbt 0.1 --gpus 128`

    `tiffin plan --trace trace.jsonl --slo ttft=5,tbt=0.05 --gpus 64 --profile llama-3.1-70b.h100.vllm`
    """  # noqa: E501
    try:
        ttft_s, tbt_s = objectives(ttft, tbt, slo)
        asked = read(trace)
        if requests:
            asked = replace(asked, requests=asked.requests[:requests])
        question = Question(
            asked,
            family(profile or [latency_profiles.DEFAULT]),
            gpus,
            ttft_s,
            tbt_s,
            attainment,
            confirm,
            kv_tokens,
            SimulationOptions(bandwidth_bytes_s=bandwidth / 8e-9, seed=seed),
        )
        found = _shown(question)
    except (InvalidInput, ConductorError, OSError) as error:
        _console.print(f"tiffin plan: {error}", style="red", highlight=False, markup=False)
        raise typer.Exit(2) from error
    if as_json:
        typer.echo(json.dumps(plain(found), indent=2))
    else:
        for table in tables(found):
            _console.print(table)


def objectives(ttft_s: float | None, tbt_s: float | None, slo: str | None) -> tuple[float, float]:
    """From the options. Raises InvalidInput if one is missing, given twice, or makes no sense."""
    given = {"ttft": ttft_s, "tbt": tbt_s}
    for part in (slo or "").split(","):
        name, _, value = (text.strip() for text in part.partition("="))
        if not part.strip():
            continue
        if name not in given:
            raise InvalidInput(f"--slo has ttft and tbt, not {name!r}")
        if given[name] is not None:
            raise InvalidInput(f"{name} is given twice")
        try:
            given[name] = float(value)
        except ValueError as error:
            raise InvalidInput(f"--slo {part.strip()}: not a number of seconds") from error
    found = []
    for name, seconds in given.items():
        if seconds is None:
            raise InvalidInput(f"an objective is missing: --{name}, or --slo ttft=...,tbt=...")
        if not 0 < seconds < float("inf"):
            raise InvalidInput(f"{name} is a number of seconds above 0, not {seconds:g}")
        found.append(seconds)
    return found[0], found[1]


def _shown(question: Question) -> Plan:
    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    hidden = not _progress_console.is_terminal
    with Progress(*columns, console=_progress_console, transient=True, disable=hidden) as progress:
        task = progress.add_task("", total=None)

        def tell(text: str, share: float | None) -> None:
            total = None if share is None else 1.0
            progress.update(task, description=text, completed=share or 0.0, total=total)

        return plan(question, tell)


# -- what is shown ---------------------------------------------------------------------------------


def tables(found: Plan) -> list[Table]:
    """The best fleets, and what would change if the world did."""
    question = found.question
    title = (
        f"{question.trace.name}: {question.target_share:.0%} within TTFT {question.ttft_s:g} s and "
        f"TBT {question.tbt_s:g} s, on {question.gpus} GPUs"
    )
    best = Table(title=title, title_justify="left")
    at_rate = f"at {question.trace.rate:.2f}/s"
    for name in ("", "prefill", "decode", "GPUs", "goodput", "per GPU", at_rate):
        best.add_column(name, justify="right" if name else "left")
    for rank, one in enumerate(found.ranked):
        name = ("best", "runner-up")[rank] if rank < 2 else ""
        best.add_row(name, *_row(one), style="bold" if rank == 0 else None)
    changes = Table(title="If the world changes (fast search)", title_justify="left")
    for name in ("", "goodput", "change", "within the objectives", "then better"):
        changes.add_column(name, justify="right" if name else "left")
    base = found.what_ifs[0].goodput
    for change in found.what_ifs:
        served = change.goodput
        changes.add_row(
            change.change,
            "" if served is None else f"{number(served)}/s",
            "" if not served or not base or served == base else f"{served / base - 1:+.0%}",
            "" if change.attained is None else f"{change.attained:.1%}",
            "" if change.best is None else change.best.label,
        )
    return [best, changes]


def _row(one: Confirmed) -> list[str]:
    fleet = one.fleet
    return [
        f"{fleet.prefills} x {fleet.prefill.label}",
        f"{fleet.decodes} x {fleet.decode.label}",
        str(fleet.gpus),
        f"{number(one.served)}/s",
        f"{number(one.served / fleet.gpus)}/s",
        "" if one.attained is None else f"{one.attained:.1%}",
    ]


def plain(found: Plan) -> dict[str, Any]:
    """For JSON. Goodput is in requests per second; `estimated` by the fast search."""
    question = found.question
    return {
        "trace": question.trace.name,
        "rate": question.trace.rate,
        "gpus": question.gpus,
        "ttft_s": question.ttft_s,
        "tbt_s": question.tbt_s,
        "attainment": question.target_share,
        "fleets": [
            {
                **_plain_fleet(one.fleet),
                "goodput": one.goodput,
                "estimated": one.estimated,
                "per_gpu": one.served / one.fleet.gpus,
                "attained_at_the_rate": one.attained,
            }
            for one in found.ranked
        ],
        "what_if": [
            {
                "change": one.change,
                "goodput": one.goodput,
                "attained_at_the_rate": one.attained,
                "then_better": None if one.best is None else _plain_fleet(one.best),
            }
            for one in found.what_ifs
        ],
    }


def _plain_fleet(fleet: Fleet) -> dict[str, Any]:
    return {
        "prefill": fleet.prefills,
        "prefill_profile": fleet.prefill.profile.name,
        "decode": fleet.decodes,
        "decode_profile": fleet.decode.profile.name,
        "gpus": fleet.gpus,
    }
