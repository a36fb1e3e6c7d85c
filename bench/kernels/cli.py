"""`tiffin bench kernels`."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from tiffin.kvstore.errors import MissingExtra

from ..display import AsJson, AsMarkdown, add_command, carry_out, out_option, row_option
from .device import Machine, machine
from .setting import Setting, Sizes
from .suite import SUITE

Device = Annotated[
    str | None, typer.Option(help="cuda:0 or cpu; default: the first GPU, or else the CPU.")
]


def commands(app: typer.Typer) -> None:
    """Add `bench kernels` to the program."""
    add_command(app, "kernels", kernels)


def chosen(device: str | None) -> Machine:
    """The device of `--device`. Raises typer.BadParameter if this machine does not have it."""
    try:
        return machine(device)
    except MissingExtra:
        raise
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error


def kernels(
    quick: Annotated[bool, typer.Option(help="Fewer rounds and blocks: a minute.")] = False,
    as_json: AsJson = False,
    as_markdown: AsMarkdown = False,
    out: Annotated[Path, out_option(SUITE)] = Path("out"),
    row: Annotated[list[str] | None, row_option(SUITE)] = None,
    device: Device = None,
) -> None:
    """Measure gather, scatter, quantising and checksums, each beside a plain copy in the same run.

    Timings are not assertions: it exits with 1 only when a measurement crashed. Rows that need what
    is not here are left out, and named at the end.

    **Examples**

    `tiffin bench kernels --quick`, `tiffin bench kernels --device cpu --row gather --row scatter`
    """
    setting = partial(Setting, Sizes.quick() if quick else Sizes(), chosen(device))
    names = row or list(SUITE.measurements)
    carry_out(SUITE, setting, names, out, as_json=as_json, as_markdown=as_markdown)
