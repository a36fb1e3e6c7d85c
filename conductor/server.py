"""The conductor as a process: the core, its feeds, and the REST service on a port.

    await serve(Conductor(), ConductorOptions(listen=("127.0.0.1", 7800)))

One event loop does everything but the feeds' waiting. It stops on SIGTERM and SIGINT: streams end,
requests in progress are answered, then the feeds' threads end. Nothing is kept: after a restart
instances register again with their next heartbeat, and nodes and engines say what they have.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import signal
import tomllib
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

from tiffin.kvstore.credentials import Credentials
from tiffin.kvstore.errors import InvalidInput

from .acting import Acting
from .api.app import create_app
from .api.intake import Limits
from .auth import Tokens, check_listen
from .feeding import Feeding
from .serving import announce, check_tls, listening, tls_context, web_server
from .shared import SharedConductor

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Iterator
    from pathlib import Path

    from .api.service import Service
    from .core import Conductor

log = logging.getLogger("tiffin.conductor")

PORT = 7800
# Expired requests, silent instances, orders: none of it is for less than a second.
TICK_S = 0.1
# Answers take milliseconds; who is slower has gone.
STOP_S = 3.0
_CONFIG_BYTES_MAX = 1 << 20


@dataclass(frozen=True, slots=True)
class ConductorOptions:
    """What an operator chooses. `directory` is a URL for `open_directory`, `share` the Redis of a
    `SharedConductor` and its peers, `credentials` are for
    its nodes. Raises InvalidInput for what can't be served."""

    listen: tuple[str, int] = ("127.0.0.1", PORT)
    tokens: Tokens = field(default_factory=Tokens)
    directory: str = ""
    share: str = ""
    pool: str = "default"
    credentials: Credentials = field(default_factory=Credentials)
    limits: Limits = field(default_factory=Limits)
    tls_cert: Path | None = None
    tls_key: Path | None = None

    def __post_init__(self) -> None:
        check_listen(self.listen[0], self.tokens)
        check_tls(self.tls_cert, self.tls_key)


def read_settings(path: Path) -> dict[str, Any]:
    """The settings of a TOML or JSON file, by its suffix. Raises InvalidInput."""
    try:
        with path.open("rb") as file:
            raw = file.read(_CONFIG_BYTES_MAX + 1)
        if len(raw) > _CONFIG_BYTES_MAX:
            raise InvalidInput(f"{path} is larger than {_CONFIG_BYTES_MAX} bytes")
        text = raw.decode()
        content = json.loads(text) if path.suffix == ".json" else tomllib.loads(text)
    except (OSError, ValueError, RecursionError) as error:  # both formats' errors are ValueErrors
        raise InvalidInput(f"can't read settings from {path}: {error}") from error
    if not isinstance(content, dict):
        raise InvalidInput(f"{path} holds no settings: an object of groups, as GET /v1/policy has")
    return content


async def serve(
    core: Conductor,
    options: ConductorOptions,
    started: Callable[[tuple[str, int]], None] | None = None,
) -> None:
    """Run until SIGINT or SIGTERM. `started` is called with the address when it answers. Raises
    InvalidInput for a directory, an address or a certificate that can't work."""
    loop = asyncio.get_running_loop()
    tls = tls_context(options.tls_cert, options.tls_key)
    stop = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop.set)
    with listening(options.listen) as door:
        feeding = Feeding(lambda update: core.apply(update, loop.time()), loop)
        app = create_app(
            core,
            auth=options.tokens,
            limits=options.limits,
            reasons=(feeding.missing,),
            clock=loop.time,
            feeding=feeding,
        )
        service: Service = app.state.service
        server = web_server(
            app,
            connections=options.limits.connections,
            stop_s=int(STOP_S),
            tls=tls,
        )
        try:
            if options.directory:
                feeding.follow_pool(options.directory, options.pool, options.credentials)
            with _sharing(core, options, service) as shared:
                async with Acting(service, feeding) as acting, asyncio.TaskGroup() as tasks:
                    serving = tasks.create_task(server.serve([door]))
                    others = [tasks.create_task(_tick(service)), tasks.create_task(acting.run())]
                    if shared is not None:
                        others.append(tasks.create_task(shared()))
                    announce(
                        log,
                        door,
                        "the conductor answers at %s, described at /docs",
                        "tokens",
                        tokens=options.tokens,
                        tls=tls is not None,
                        started=started,
                    )
                    await _either(stop, serving)
                    log.info("stopping")
                    service.stop()
                    server.should_exit = True
                    await serving
                    for task in others:
                        task.cancel()
        finally:
            await feeding.close()


@contextlib.contextmanager
def _sharing(
    core: Conductor, options: ConductorOptions, service: Service
) -> Iterator[Callable[[], Coroutine[Any, Any, None]] | None]:
    """What tells the other conductors and hears them, to be run in a task; None if there are none.
    Raises InvalidInput for a Redis that can't be one."""
    if not options.share or not isinstance(core, SharedConductor):
        yield None
        return
    from .feeds.sharing import Link, share  # needs redis, and only here

    link = Link(options.share, pool=options.pool)
    try:
        yield partial(share, core, link, service.clock, service.learn)
    finally:
        link.close()


async def _tick(service: Service) -> None:
    """What time alone brings. A tick that fails ends the process: it would go on with promises that
    nobody takes back."""
    while True:
        service.tick()
        await asyncio.sleep(TICK_S)


async def _either(stop: asyncio.Event, serving: asyncio.Task[None]) -> None:
    """Until one of the two."""
    stopping = asyncio.ensure_future(stop.wait())
    try:
        await asyncio.wait((stopping, serving), return_when=asyncio.FIRST_COMPLETED)
    finally:
        stopping.cancel()
