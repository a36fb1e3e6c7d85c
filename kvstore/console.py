"""What the commands of `tiffin` share: where they print, and options that several of them have."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

console = Console()
errors_console = Console(stderr=True)

JsonFlag = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]
SocketOption = Annotated[
    Path | None,
    typer.Option("--socket", help="Unix socket of the node.", show_default="a private default"),
]
TokenFileOption = Annotated[
    Path | None,
    typer.Option(
        help="File with the pool's shared token; else the one TIFFIN_TOKEN_FILE names.",
        show_default=False,
    ),
]
WatchOption = Annotated[
    float | None, typer.Option("--watch", "-w", help="Redraw every so many seconds.", min=0.05)
]


def say(text: str) -> None:
    """One line, as it is: no markup, no wrapping, so that people can copy from it."""
    console.print(text, markup=False, highlight=False, soft_wrap=True)


def warn(text: str) -> None:
    """The same on stderr."""
    errors_console.print(text, markup=False, highlight=False, soft_wrap=True)
