"""`tiffin bench hbm`."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from ..display import AsJson, AsMarkdown, add_command, carry_out, out_option, row_option
from ..kernels.cli import Device, chosen
from .setting import Setting, Sizes
from .suite import SUITE


def commands(app: typer.Typer) -> None:
    """Add `bench hbm` to the program."""
    add_command(app, "hbm", hbm)


def hbm(
    quick: Annotated[bool, typer.Option(help="Fewer rounds and blocks: half a minute.")] = False,
    as_json: AsJson = False,
    as_markdown: AsMarkdown = False,
    out: Annotated[Path, out_option(SUITE)] = Path("out"),
    row: Annotated[list[str] | None, row_option(SUITE)] = None,
    device: Device = None,
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
