"""What the commands of `tiffin` share: where they print, and options that several of them have."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.logging import RichHandler

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


def check_log_level(level: str) -> None:
    """Raises BadParameter for one that does not exist."""
    if level.upper() not in ("DEBUG", "INFO", "WARNING", "ERROR"):
        raise typer.BadParameter(f"--log-level {level}: debug, info, warning or error")


def log_to_stderr(level: str) -> None:
    """The log of this process, from `level` on: for a terminal in columns and colours; for a file
    or a collector one line per message, however long."""
    if errors_console.is_terminal:
        handler: logging.Handler = RichHandler(console=errors_console, show_path=False)
        form = "%(message)s"
    else:
        handler = logging.StreamHandler()
        form = "%(asctime)s %(levelname)s %(name)s: %(message)s"
    logging.basicConfig(level=level.upper(), format=form, handlers=[handler])
