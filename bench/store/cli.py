"""`tiffin bench store`."""

from __future__ import annotations

import tempfile
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from ..display import AsJson, AsMarkdown, add_command, carry_out, out_option, row_option
from .setting import Setting, Sizes
from .suite import SUITE


def commands(app: typer.Typer) -> None:
    """Add `bench store` to the program."""
    add_command(app, "store", store)


def store(
    quick: Annotated[bool, typer.Option(help="Fewer rounds: a minute instead of several.")] = False,
    as_json: AsJson = False,
    as_markdown: AsMarkdown = False,
    out: Annotated[Path, out_option(SUITE)] = Path("out"),
    row: Annotated[list[str] | None, row_option(SUITE)] = None,
    nvme_dir: Annotated[
        Path | None, typer.Option(help="Where the disk is measured; default: the temp directory.")
    ] = None,
) -> None:
    """Measure the store, each number beside the limit of this machine in the same run.

    Timings are not assertions: it exits with 1 only when a measurement crashed.

    **Examples**

    `tiffin bench store --quick`, `tiffin bench store --row put --row nvme --nvme-dir /mnt/nvme0`
    """
    sizes = Sizes.quick() if quick else Sizes()
    setting = partial(Setting, sizes, nvme_dir or Path(tempfile.gettempdir()))
    names = row or list(SUITE.measurements)
    carry_out(SUITE, setting, names, out, as_json=as_json, as_markdown=as_markdown)
