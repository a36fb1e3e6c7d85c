"""`tiffin bench peers`."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from tiffin.kvstore.gc_tuning import calm_collector

from ..display import AsJson, AsMarkdown, View, add_command, carry_out, out_option, row_option
from .setting import Setting, Sizes
from .suite import SUITE
from .table import markdown, table, verdict


def commands(app: typer.Typer) -> None:
    """Add `bench peers` to the program."""
    add_command(app, "peers", peers)


def peers(
    quick: Annotated[bool, typer.Option(help="Fewer rounds.")] = False,
    as_json: AsJson = False,
    as_markdown: AsMarkdown = False,
    out: Annotated[Path, out_option(SUITE)] = Path("out"),
    row: Annotated[list[str] | None, row_option(SUITE)] = None,
    environments: Annotated[
        Path, typer.Option(help="The folder that bench/peers/install.sh has filled.")
    ] = Path(".venv-peers"),
) -> None:
    """Measure Mooncake, LMCache, Dynamo and SGLang's router, each beside ours in one run.

    Peers without an environment are left out and named, with the command that installs them. It
    exits with 1 only when a measurement crashed, so with 0 where no peer is there.

    **Examples**

    `tiffin bench peers --quick`, `tiffin bench peers --row dynamo --row sglang --markdown`
    """
    calm_collector()  # as the services do
    setting = partial(Setting, Sizes.quick() if quick else Sizes(), environments.absolute())
    names = row or list(SUITE.measurements)
    view = View(table, markdown, verdict)
    carry_out(SUITE, setting, names, out, as_json=as_json, as_markdown=as_markdown, view=view)
