"""`tiffin bench gateway`."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from ..display import AsJson, AsMarkdown, add_command, carry_out, out_option, row_option
from .setting import Setting, Sizes
from .suite import SUITE


def commands(app: typer.Typer) -> None:
    """Add `bench gateway` to the program."""
    add_command(app, "gateway", gateway)


def gateway(
    quick: Annotated[bool, typer.Option(help="Fewer requests: a minute.")] = False,
    as_json: AsJson = False,
    as_markdown: AsMarkdown = False,
    out: Annotated[Path, out_option(SUITE)] = Path("out"),
    row: Annotated[list[str] | None, row_option(SUITE)] = None,
    environments: Annotated[
        Path, typer.Option(help="The folder that bench/peers/install.sh has filled.")
    ] = Path(".venv-peers"),
) -> None:
    """Measure a gateway with its conductor before stub engines, beside nginx and the routers of
    SGLang and vLLM before the same ones.

    Without nginx the limit is the engine alone; routers that are not installed are left out and
    named, with the command that installs them. All processes share this machine's cores: the CPU
    time per request and the ratios say more than the rates. Timings are not assertions: it exits
    with 1 only when a measurement crashed.

    **Examples**

    `tiffin bench gateway --quick`, `tiffin bench gateway --row cpu --row streams`
    """
    sizes = Sizes.quick() if quick else Sizes()
    setting = partial(Setting, sizes, environments=environments.absolute())
    carry_out(
        SUITE,
        setting,
        row or list(SUITE.measurements),
        out,
        as_json=as_json,
        as_markdown=as_markdown,
    )
