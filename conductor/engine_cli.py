"""`tiffin conductor add` and `tiffin profile`: engines as they are, and how fast they are."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.markup import escape

from tiffin.kvstore.cli.console import JsonFlag, console
from tiffin.kvstore.errors import InvalidInput
from tiffin.kvstore.text import printable

from .console import URL, CaOption, TokenOption, UrlOption, asking, explained

_PORT = {"min": 1, "max": 65_535, "show_default": "as it tells"}


def add(
    engine: Annotated[str, typer.Argument(help="Where it answers, http://HOST:PORT.")],
    profile: Annotated[
        str, typer.Option(help="Its latency profile; `tiffin profile URL` measures one.")
    ],
    id: Annotated[  # the option's name
        str, typer.Option("--id", help="The instance's id.", show_default="HOST:PORT")
    ] = "",
    model: Annotated[
        str, typer.Option(help="Which of its models.", show_default="its first one")
    ] = "",
    role: Annotated[
        str, typer.Option(help="prefill, decode or mixed.", show_default="as it tells, or mixed")
    ] = "",
    node: Annotated[
        str,
        typer.Option(help="The kvstore node on its host.", show_default="what it announces there"),
    ] = "",
    fetches: Annotated[
        bool,
        typer.Option("--fetches", help="It brings blocks from other nodes."),
    ] = False,
    kv_capacity_tokens: Annotated[
        int | None, typer.Option(min=1, show_default="as it tells", help="What its cache holds.")
    ] = None,
    batch_max: Annotated[
        int | None,
        typer.Option(min=1, show_default="as it tells, or 256", help="Requests it runs at a time."),
    ] = None,
    block_tokens: Annotated[
        int | None,
        typer.Option(
            min=1, show_default="512", help="Of the index's blocks, a multiple of the engine's."
        ),
    ] = None,
    kv_events_port: Annotated[
        int | None, typer.Option(help="Where it publishes KV events.", **_PORT)
    ] = None,
    kv_events_replay_port: Annotated[
        int | None, typer.Option(help="Where it replays them.", **_PORT)
    ] = None,
    kv_events_topic: Annotated[
        str | None, typer.Option(help="Their topic.", show_default="as it tells, or all")
    ] = None,
    url: UrlOption = URL,
    token_file: TokenOption = None,
    tls_ca: CaOption = None,
    as_json: JsonFlag = False,
) -> None:
    """Let the conductor ask a vLLM or SGLang what it is, register it, and follow its load and its
    KV events. The engine runs as it is, with nothing beside it.

    It stays until it is removed, or the conductor ends. For longer, name it in the conductor's
    settings: `[[discovery.engines]]`.

    **Examples**

    `tiffin conductor add http://10.0.0.21:8000 --profile llama-3.1-8b.h100.tp1.vllm`

    `tiffin conductor add http://10.0.0.21:8000 --profile qwen3-32b.h200.tp2.vllm --kv-events-port
    5557 --kv-events-replay-port 5558`
    """
    options: dict[str, Any] = {
        "id": id,
        "model": model,
        "role": role or None,
        "profile": profile,
        "node": node,
        "fetches": fetches,
        "kv_capacity_tokens": kv_capacity_tokens,
        "batch_max": batch_max,
        "block_tokens": block_tokens,
        "kv_events_port": kv_events_port,
        "kv_events_replay_port": kv_events_replay_port,
        "kv_events_topic": kv_events_topic,
    }
    with asking(url, token_file, tls_ca) as client:
        found = client.add_engine(engine, **options)
    if as_json:
        import msgspec

        typer.echo(json.dumps(msgspec.to_builtins(found), indent=2))
        return
    events = found.labels.get("kv_events", "")
    words = (
        f"{found.id}: {found.model}, {found.role}, blocks of {found.part_tokens} tokens, room for "
        f"{found.kv_capacity_tokens:,} tokens, at most {found.batch_max} requests"
    )
    console.print(escape(printable(words)), highlight=False)
    console.print(
        f"KV events of {escape(printable(events))}"
        if events
        else "no KV events: what it holds is guessed from what is sent there (--kv-events-port)",
        highlight=False,
    )
    if found.node:
        brings = "brings blocks there from others" if found.fetches else "fetches nothing"
        console.print(f"at node {escape(printable(found.node))}, {brings}", highlight=False)


def profile(
    engine: Annotated[str, typer.Argument(help="Where it answers, http://HOST:PORT.")],
    name: Annotated[
        str, typer.Option(help="The profile's name.", show_default="MODEL.measured")
    ] = "",
    out: Annotated[
        Path | None, typer.Option(help="Where to write it.", show_default="NAME.json")
    ] = None,
    model: Annotated[
        str, typer.Option(help="Which of its models.", show_default="its first one")
    ] = "",
    hardware: Annotated[str, typer.Option(help="What it runs on, for people.")] = "",
    tokens_max: Annotated[int, typer.Option(help="Longest prompt.", min=64)] = 32_768,
    batch_max: Annotated[int, typer.Option(help="Most requests at a time.", min=2)] = 64,
    kv_capacity_tokens: Annotated[
        int | None, typer.Option(min=1, show_default="as it tells", help="What its cache holds.")
    ] = None,
    repeats: Annotated[int, typer.Option(help="Points of each kind.", min=1, max=100)] = 3,
    timeout_s: Annotated[float, typer.Option(help="For one answer.", min=1)] = 600.0,
    api_key_file: Annotated[
        Path | None, typer.Option(help="File with its API key, alone.", show_default=False)
    ] = None,
    tls_ca: CaOption = None,
) -> None:
    """Measure an idle engine's prefill and decode, and write its latency profile.

    It sends prompts of random token ids, one at a time and in batches, for some minutes; the engine
    should have nothing else to do. The file goes into the folder that `tiffin conductor --profiles`
    names.

    **Examples**

    `tiffin profile http://10.0.0.21:8000 --hardware "1 x L40S" --name llama-3-8b.l40s`

    `tiffin profile http://10.0.0.21:8000 --tokens-max 131072 --batch-max 256`
    """
    with explained("profiler"):
        import asyncio

        from .discovery.profiling import ProfileOptions, measure

        options = ProfileOptions(
            url=engine,
            name=name,
            model=model,
            hardware=hardware,
            tokens_max=tokens_max,
            batch_max=batch_max,
            kv_capacity_tokens=kv_capacity_tokens,
            repeats=repeats,
            timeout_s=timeout_s,
            api_key_file=api_key_file,
            tls_ca=tls_ca,
        )
        made = asyncio.run(measure(options, lambda line: console.print(escape(line))))
        path = out or Path(f"{made.name}.json")
        try:
            path.write_bytes(made.to_json())
        except OSError as error:
            raise InvalidInput(f"can't write {path}: {error.strerror}") from error
    for kind, fit in (("prefill", made.prefill_fit), ("decode", made.decode_fit)):
        assert fit is not None
        console.print(
            f"{kind}: {fit.points} points, off by {fit.error_mean:.1%} in the mean and by "
            f"{fit.error_max:.1%} at most; {fit.left_out} outliers left out",
            highlight=False,
        )
    console.print(f"written to {escape(str(path))}", highlight=False)
