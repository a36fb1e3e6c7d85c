"""The gateway as a process of its own: so that passing bytes on never delays a decision.

It stops on SIGTERM and SIGINT: no new connections, answers under way end, then what is left to
report is told.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import socket
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import uvicorn

from tiffin.kvstore.errors import InvalidInput

from ..auth import Tokens, check_listen
from ..client import AsyncConductorClient
from ..server import listening
from .app import create_app
from .config import GatewayConfig
from .gateway import Gateway

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from starlette.applications import Starlette

log = logging.getLogger("tiffin.gateway")

PORT = 7900
# Connections that wait for their next request count, too; requests have a limit of their own.
_CONNECTIONS_PER_REQUEST = 4
# Longer than clients keep idle connections: a connection that ends while it is used costs a retry.
_KEEP_ALIVE_S = 75


@dataclass(frozen=True, slots=True)
class GatewayOptions:
    """What an operator chooses. `tokens` are the clients' API keys, `conductor_token_file` has the
    one that the conductor knows us by. Raises InvalidInput for what can't be served."""

    listen: tuple[str, int] = ("127.0.0.1", PORT)
    conductor: str = "http://127.0.0.1:7800"
    conductor_token_file: Path | None = None
    conductor_tls_ca: Path | None = None
    config: GatewayConfig = field(default_factory=GatewayConfig)
    tokens: Tokens = field(default_factory=Tokens)
    tls_cert: Path | None = None
    tls_key: Path | None = None

    def __post_init__(self) -> None:
        check_listen(self.listen[0], self.tokens)
        if (self.tls_cert is None) != (self.tls_key is None):
            raise InvalidInput("a TLS certificate and its key go together: give both or neither")


async def serve(
    options: GatewayOptions, started: Callable[[tuple[str, int]], None] | None = None
) -> None:
    """Run until SIGINT or SIGTERM. `started` is called with the address when it answers. Raises
    InvalidInput and InvalidRequest for what can't work."""
    loop = asyncio.get_running_loop()
    stop = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop.set)
    client = AsyncConductorClient(
        options.conductor,
        token_file=options.conductor_token_file,
        tls_ca=options.conductor_tls_ca,
        timeout_s=options.config.timeouts.conductor_s,
    )
    with listening(options.listen) as door:
        # Connections inherit it. uvloop sets it on all of them, asyncio alone not on these; and
        # without it each answer waits 40 ms for an acknowledgement.
        door.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        async with Gateway(client, options.config) as gateway:
            app = create_app(gateway, auth=options.tokens)
            server = _Server(_configuration(app, options))
            serving = asyncio.create_task(server.serve([door]))
            stopping = asyncio.create_task(stop.wait())
            _announce(options, door, started)
            await asyncio.wait((serving, stopping), return_when=asyncio.FIRST_COMPLETED)
            log.info("stopping")
            stopping.cancel()
            server.should_exit = True
            await serving


class _Server(uvicorn.Server):
    """Signals are ours: uvicorn would raise them again after its end, and the process would seem
    to have been killed."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def _configuration(app: Starlette, options: GatewayOptions) -> uvicorn.Config:
    return uvicorn.Config(
        app,
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        ws="none",
        proxy_headers=False,
        limit_concurrency=options.config.limits.requests * _CONNECTIONS_PER_REQUEST,
        timeout_keep_alive=_KEEP_ALIVE_S,
        timeout_graceful_shutdown=max(1, round(options.config.timeouts.stop_s)),
        ssl_certfile=options.tls_cert,
        ssl_keyfile=str(options.tls_key) if options.tls_key is not None else None,
    )


def _announce(
    options: GatewayOptions,
    door: socket.socket,
    started: Callable[[tuple[str, int]], None] | None,
) -> None:
    host, port = door.getsockname()[:2]
    shown = f"[{host}]" if ":" in host else host
    scheme = "https" if options.tls_cert else "http"
    log.info("the gateway answers at %s://%s:%d/v1", scheme, shown, port)
    if not options.tokens:
        log.warning("there are no tokens: every user of this machine can use it")
    elif scheme == "http" and not host.startswith("127."):
        log.warning("there is no TLS: who listens to this network can read keys and prompts")
    if started is not None:
        started((host, port))
