"""A conductor that shares, with its service, in a process of its own.

python sharingworker.py REDIS_URL POOL      writes its port, then serves until it is killed
"""

from __future__ import annotations

import asyncio
import sys
import time

from tiffin.conductor.core.settings import Settings, patched
from tiffin.conductor.replicas.redis_stream import RedisLink, share, unique_name
from tiffin.conductor.replicas.remote_load import SharingSettings
from tiffin.conductor.replicas.replica import SharedConductor
from tiffin.conductor.service.server import ConductorOptions, serve


def started(address: tuple[str, int]) -> None:
    print(address[1], flush=True)


async def main(url: str, pool: str) -> None:
    clock = asyncio.get_running_loop().time
    core = SharedConductor(
        unique_name(),
        patched(Settings(), {"admission": {"mode": "off"}, "core": {"heartbeat_timeout_s": 60.0}}),
        sharing=SharingSettings(interval_s=0.03, dead_s=1.0, lead_s=1.0),
        unix_offset_s=time.time() - clock(),
    )
    link = RedisLink(url, pool=pool)
    sharing = asyncio.create_task(share(core, link, clock))
    try:
        await serve(core, ConductorOptions(listen=("127.0.0.1", 0)), started)
    finally:
        sharing.cancel()
        await asyncio.gather(sharing, return_exceptions=True)
        link.close()


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
