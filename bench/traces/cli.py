"""`tiffin trace`: describe a trace of requests, or make one."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer
from rich.console import Console

from tiffin.kvstore.errors import InvalidInput

from .bursts import Bursts, with_bursts
from .comparison import compare, figures
from .display import comparison_table, figures_table
from .generator import generate
from .look_alike import look_alike
from .readers import read
from .statistics import describe
from .writer import write

if TYPE_CHECKING:
    from .trace import Trace

Kind = Literal["multi-turn", "tool-agent", "long-document"]
TraceFile = Annotated[
    Path,
    typer.Argument(
        dir_okay=False,
        metavar="FILE",
        help="Mooncake's JSON lines, Azure's CSV, or a recording of a conductor.",
    ),
]
Seed = Annotated[int, typer.Option(min=0, help="The same seed gives the same file.")]
Out = Annotated[Path, typer.Option(dir_okay=False, help="The new trace, as JSON lines.")]

console = Console()


def commands(app: typer.Typer) -> None:
    """Add `trace` and its commands to the program."""
    trace = typer.Typer(
        help="Describe a trace of requests, or make one to replay.", no_args_is_help=True
    )
    trace.command("info")(info)
    trace.command("generate")(make)
    trace.command("look-alike")(imitate)
    app.add_typer(trace, name="trace")


def info(
    file: TraceFile,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, not a table.")] = False,
) -> None:
    """Show what a trace asks for, and how much of it a cache could answer.

    Hit shares are of all prompt tokens, for one cache that all instances share: no scheduler does
    better with as many blocks of 512 tokens. A prompt is hit up to its first missing block. Gaps
    between arrivals vary by 1 in a Poisson process, and by more in bursts. A request is a later
    turn if it begins with an earlier prompt and has room for its answer. Traces without block ids,
    as Azure's, show no sharing.

    **Examples**

    `tiffin trace info conversation_trace.jsonl`

    `tiffin trace info conversation_trace.jsonl --json | jq .sharing.infinite_hit`
    """
    statistics = describe(_read(file))
    if as_json:
        typer.echo(json.dumps(asdict(statistics), indent=2))
    else:
        console.print(figures_table(statistics.name, figures(statistics)))


def make(
    kind: Annotated[Kind, typer.Argument(help="What the requests are like.")],
    out: Out,
    requests: Annotated[int, typer.Option(min=1, help="How many.")] = 10_000,
    seed: Seed = 0,
    bursts: Annotated[
        float | None,
        typer.Option(
            min=1,
            metavar="FACTOR",
            help="Let requests come in bursts, with so many times the rate of the calm between.",
        ),
    ] = None,
) -> None:
    """Make a trace from a kind's parameters, and show what it is like.

    `multi-turn` is a chat service, `tool-agent` has few prefixes that many sessions share and short
    answers, `long-document` asks short questions about documents that several users share. The mean
    rate stays with `--bursts`.

    **Examples**

    `tiffin trace generate multi-turn --requests 5000 --seed 7 --out chat.jsonl`

    `tiffin trace generate tool-agent --bursts 8 --out agents.jsonl`
    """
    trace = generate(kind, requests, seed)
    if bursts is not None:
        trace = with_bursts(trace, Bursts(bursts), seed)
    _write(trace, out)
    console.print(figures_table(trace.name, figures(describe(trace))))


def imitate(file: TraceFile, out: Out, seed: Seed = 0) -> None:
    """Make a new trace that is like another, and compare the two.

    Lengths, gaps and how prompts join earlier ones are drawn from the given trace, so a scheduler
    that was tuned on that one can be tried on one that it has not seen. Ids of blocks are new.

    **Examples**

    `tiffin trace look-alike conversation_trace.jsonl --seed 1 --out unseen.jsonl`
    """
    original = _read(file)
    made = look_alike(original, seed)
    _write(made, out)
    console.print(comparison_table(original.name, compare(original, made)))


def _read(path: Path) -> Trace:
    try:
        return read(path)
    except OSError as error:
        raise InvalidInput(f"cannot read {path}: {error.strerror}") from error


def _write(trace: Trace, path: Path) -> None:
    try:
        write(trace, path)
    except OSError as error:
        raise InvalidInput(f"cannot write {path}: {error.strerror}") from error
