"""`tiffin bench vllm`."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from ..display import AsJson, AsMarkdown, add_command, carry_out, out_option, row_option
from .setting import Setting, Sizes
from .suite import SUITE


def commands(app: typer.Typer) -> None:
    """Add `bench vllm` to the program."""
    add_command(app, "vllm", vllm)


def vllm(
    quick: Annotated[
        bool, typer.Option(help="Fewer rounds; an engine's start takes most of the time.")
    ] = False,
    as_json: AsJson = False,
    as_markdown: AsMarkdown = False,
    out: Annotated[Path, out_option(SUITE)] = Path("out"),
    row: Annotated[list[str] | None, row_option(SUITE)] = None,
    vllm: Annotated[
        Path | None,
        typer.Option(help="Python of an environment that has vLLM and tiffin."),
    ] = None,
    peers: Annotated[
        Path | None,
        typer.Option(
            help="Folder in which bench/vllm/install_peers.sh has installed LMCache and Mooncake;"
            " by default they are looked for where vLLM is."
        ),
    ] = None,
) -> None:
    """Measure what the pool costs a real vLLM: the time to the first token of a prompt that is
    loaded, beside vLLM's own prefix cache and other connectors in the same run, and of one that
    another vLLM prefills; the gaps between an answer's tokens beside loads; the time in the
    connector's hooks.

    Timings are not assertions: it exits with 1 only when a measurement crashed. Rows that need what
    is not here are left out, and named at the end.

    **Examples**

    `tiffin bench vllm --vllm .venv-engines/bin/python`, `tiffin bench vllm --quick --row home`

    `tiffin bench vllm --vllm .venv-engines/bin/python --peers ~/peers --row lmcache`
    """
    setting = partial(Setting, Sizes.quick() if quick else Sizes(), vllm, peers)
    carry_out(
        SUITE,
        setting,
        row or list(SUITE.measurements),
        out,
        as_json=as_json,
        as_markdown=as_markdown,
    )
