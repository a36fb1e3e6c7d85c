"""`tiffin bench network`."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from ..display import AsJson, AsMarkdown, add_command, carry_out, out_option, row_option
from .setting import Setting, Sizes
from .suite import SUITE


def commands(app: typer.Typer) -> None:
    """Add `bench network` to the program."""
    add_command(app, "network", network)


def network(
    quick: Annotated[bool, typer.Option(help="Fewer rounds: half a minute, not minutes.")] = False,
    as_json: AsJson = False,
    as_markdown: AsMarkdown = False,
    out: Annotated[Path, out_option(SUITE)] = Path("out"),
    row: Annotated[list[str] | None, row_option(SUITE)] = None,
    mooncake: Annotated[
        Path | None,
        typer.Option(help="Python of an environment that has Mooncake, to compare with it."),
    ] = None,
) -> None:
    """Measure remote blocks over loopback TCP, each number beside the limit of the same run.

    Timings are not assertions: it exits with 1 only when a measurement crashed. Rows that need what
    is not installed are left out, and named at the end.

    **Examples**

    `tiffin bench network --quick`, `tiffin bench network --row remote-get --row readers`
    """
    setting = partial(Setting, Sizes.quick() if quick else Sizes(), mooncake)
    names = row or [name for name in SUITE.measurements if name != "mooncake" or mooncake]
    carry_out(SUITE, setting, names, out, as_json=as_json, as_markdown=as_markdown)
