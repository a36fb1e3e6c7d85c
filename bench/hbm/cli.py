"""`tiffin bench hbm`."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from ..display import add_command, carry_out, rows_help
from ..kernels.cli import chosen
from .setting import Setting, Sizes
from .suite import SUITE


def commands(app: typer.Typer) -> None:
    """Add `bench hbm` to the program."""
    add_command(app, "hbm", hbm)


def hbm(
    quick: Annotated[bool, typer.Option(help="Fewer rounds and blocks: half a minute.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
    as_markdown: Annotated[bool, typer.Option("--markdown", help="Print Markdown.")] = False,
    out: Annotated[Path, typer.Option(help="Where bench-hbm.json goes.")] = Path("out"),
    row: Annotated[list[str] | None, typer.Option(help=rows_help(SUITE))] = None,
    device: Annotated[
        str | None, typer.Option(help="cuda:0 or cpu; default: the first GPU, or else the CPU.")
    ] = None,
) -> None:
    """Measure the HBM tier and its copies, each beside a plain copy in the same run.

    Timings are not assertions: it exits with 1 only when a measurement crashed. Rows that need what
    is not here (most of them a GPU) are left out, and named at the end.

    **Examples**

    `tiffin bench hbm --quick`, `tiffin bench hbm --device cpu --row promote --row demote`
    """
    setting = partial(Setting, Sizes.quick() if quick else Sizes(), chosen(device))
    names = row or list(SUITE.measurements)
    carry_out(SUITE, setting, names, out, as_json=as_json, as_markdown=as_markdown)
