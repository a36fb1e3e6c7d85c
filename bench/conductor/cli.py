"""`tiffin bench conductor`."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from tiffin.kvstore.gc_tuning import collect_young_only

from ..display import AsJson, AsMarkdown, add_command, carry_out, out_option, row_option
from .setting import Setting, Sizes
from .suite import SUITE


def commands(app: typer.Typer) -> None:
    """Add `bench conductor` to the program."""
    add_command(app, "conductor", conductor)


def conductor(
    quick: Annotated[bool, typer.Option(help="Fewer rounds: half a minute, not two.")] = False,
    as_json: AsJson = False,
    as_markdown: AsMarkdown = False,
    out: Annotated[Path, out_option(SUITE)] = Path("out"),
    row: Annotated[list[str] | None, row_option(SUITE)] = None,
    dynamo: Annotated[
        Path | None,
        typer.Option(help="Python of an environment that has Dynamo, to compare with it."),
    ] = None,
) -> None:
    """Measure decisions, the index and the service, each beside the limit of the same run.

    Timings are not assertions: it exits with 1 only when a measurement crashed. Rows that need what
    is not installed are left out, and named at the end.

    **Examples**

    `tiffin bench conductor --quick`, `tiffin bench conductor --row decision --row service`
    """
    collect_young_only()  # as the service does
    setting = partial(Setting, Sizes.quick() if quick else Sizes(), dynamo)
    names = row or [name for name in SUITE.measurements if name != "dynamo" or dynamo]
    carry_out(SUITE, setting, names, out, as_json=as_json, as_markdown=as_markdown)
