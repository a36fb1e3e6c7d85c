"""Runs `tiffin conductor` commands in tests."""

from __future__ import annotations

from typing import TYPE_CHECKING

import typer
from typer.testing import CliRunner

from tiffin.conductor.cli import commands

if TYPE_CHECKING:
    from click.testing import Result


def run(*arguments: str) -> Result:
    """Run a command, in a wide terminal."""
    app = typer.Typer()
    app.callback()(lambda: None)
    commands(app)
    environment = {"COLUMNS": "300", "TERM": "dumb", "TIFFIN_CONDUCTOR_TOKEN_FILE": ""}
    return CliRunner().invoke(app, ["conductor", *arguments], env=environment)
