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
from tiffin.conductor.events.index_updates import Added
from tiffin.conductor.pool.orders import NodeSpace
from tiffin.conductor.service.web_server import listening, web_server
from tiffin.conductor.web.connection_limits import ConnectionLimits
from tiffin.conductor.web.time_slices import TimeSlices
from tiffin.kvstore.gc_tuning import calm_collector

from .decision import MODEL
from .index import keys_of

_BLOCKS = 64
_TIMES = 6
_BLOCK_BYTES = 2 << 20
_GIB = 1 << 30
_STEER_S = 1.0


async def serve(port: int, nodes: int, prefixes: int) -> None:
    """Serve until SIGTERM."""
    loop = asyncio.get_running_loop()
    core = Conductor()
    core.patch({"replication": {"enabled": False}}, loop.time())
    names = [f"node-{number}" for number in range(nodes)]
    for number in range(prefixes):
        keys, now = keys_of(_BLOCKS), loop.time()
        core.apply(Added(names[number % nodes], "dram", keys), now)
        for time in range(_TIMES):
            core.popularity.seen(keys, now, model=MODEL, block_bytes=_BLOCK_BYTES)
            core.popularity.wanted(keys, names[(number + time) % nodes], now)
    spaces = {name: NodeSpace(name, 64 * _GIB, 32 * _GIB) for name in names}
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
    calm_collector()  # as the conductor does
    uvloop.run(serve(*map(int, sys.argv[1:4])))
