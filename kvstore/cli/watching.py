"""Prints what a command finds, once or again and again."""

from __future__ import annotations

import contextlib
import json
import time
from typing import TYPE_CHECKING, Any

import typer
from rich.console import Group, RenderableType
from rich.live import Live
from rich.text import Text

from ..errors import TiffinError
from ..text import printable
from .console import console

if TYPE_CHECKING:
    from collections.abc import Callable


def show(
    look: Callable[[], dict[str, Any]],
    draw: Callable[[dict[str, Any]], RenderableType],
    as_json: bool,
    watch: float | None,
    errors: tuple[type[Exception], ...] = (TiffinError,),
) -> dict[str, Any]:
    """Print what `look` finds as JSON or as `draw` draws it, once, or every `watch` seconds until
    Ctrl-C; returns what it found last. While it is redrawn, `errors` of a look are shown above the
    last numbers; all other errors are raised."""
    found = look()
    if watch is None:
        if as_json:
            typer.echo(json.dumps(found, indent=2))
        else:
            console.print(draw(found))
        return found
    if as_json:  # one line per look, for programs
        with contextlib.suppress(KeyboardInterrupt):
            while True:
                typer.echo(json.dumps(found))
                time.sleep(watch)
                found = look()
        return found
    with contextlib.suppress(KeyboardInterrupt), Live(draw(found), console=console) as live:
        while True:
            time.sleep(watch)
            try:
                found = look()
                live.update(draw(found))
            except errors as error:  # it may be back at the next look
                live.update(Group(Text(printable(f"{error}"), style="bold red"), draw(found)))
    return found
