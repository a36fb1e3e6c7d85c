"""A conductor as `tiffin conductor` serves it, with a simulated pool: nodes as a directory would
list them, and hot prefixes.

    python -m tiffin.bench.conductor.steered_service PORT NODES PREFIXES

Replication is off until a client enables it.
"""

from __future__ import annotations

import asyncio
import sys

import uvloop

from tiffin.conductor.api.app import create_app
from tiffin.conductor.core import Conductor
from tiffin.conductor.service.web_server import listening, web_server
from tiffin.conductor.web.connection_limits import ConnectionLimits
from tiffin.conductor.web.time_slices import TimeSlices
from tiffin.kvstore.gc_tuning import collect_young_only

from .hot_pool import spaces_with_hot_prefixes

_STEER_S = 1.0


async def serve(port: int, nodes: int, prefixes: int) -> None:
    """Serve until SIGTERM."""
    loop = asyncio.get_running_loop()
    core = Conductor()
    core.patch({"replication": {"enabled": False}}, loop.time())
    spaces = spaces_with_hot_prefixes(core, nodes, prefixes, loop.time())
    app = create_app(core, clock=loop.time)

    async def steer() -> None:
        while True:
            await TimeSlices().finish(core.steering.ticking(spaces, loop.time()))
            await asyncio.sleep(_STEER_S)

    with listening(("127.0.0.1", port)) as door:
        server = web_server(app, ConnectionLimits(), stop_s=1, tls=None)
        steering = asyncio.create_task(steer())
        await server.serve([door])
        steering.cancel()


if __name__ == "__main__":
    collect_young_only()  # as the conductor does
    uvloop.run(serve(*map(int, sys.argv[1:4])))
