"""`tiffin bench kernels` and `tiffin bench hbm` where the program is not installed."""

from __future__ import annotations

import typer

from tiffin.bench.hbm.cli import commands as hbm_commands
from tiffin.bench.kernels.cli import commands as kernels_commands

app = typer.Typer()
kernels_commands(app)
hbm_commands(app)

if __name__ == "__main__":
    app()
