"""`python -m tiffin.bench.demo`: the demo where the `tiffin` program is not installed."""

import typer

from .cli import demo

typer.run(demo)
