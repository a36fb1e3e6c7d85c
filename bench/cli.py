"""The commands of this package: demo, bench, plan, reproduce, simulate, trace and whatif."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .conductor.cli import commands as conductor_commands
from .demo.cli import demo
from .gateway.cli import commands as gateway_commands
from .hbm.cli import commands as hbm_commands
from .kernels.cli import commands as kernels_commands
from .network.cli import commands as network_commands
from .peers.cli import commands as peers_commands
from .planning.cli import commands as planning_commands
from .reproduce.cli import commands as reproduce_commands
from .sim.cli import commands as sim_commands
from .store.cli import commands as store_commands
from .traces.cli import commands as trace_commands
from .vllm.cli import commands as vllm_commands
from .whatif.cli import commands as whatif_commands

if TYPE_CHECKING:
    import typer


def commands(app: typer.Typer) -> None:
    """Add the commands of this package."""
    app.command("demo")(demo)
    store_commands(app)
    network_commands(app)
    conductor_commands(app)
    gateway_commands(app)
    kernels_commands(app)
    hbm_commands(app)
    vllm_commands(app)
    planning_commands(app)
    peers_commands(app)
    reproduce_commands(app)
    sim_commands(app)
    trace_commands(app)
    whatif_commands(app)
