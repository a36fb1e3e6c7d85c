"""The gateway as a process of its own, so that proxying bytes never delays a decision.

SIGTERM and SIGINT start a graceful shutdown: the gateway accepts no new connections, lets in-flight
answers end, then sends the pending reports. SIGHUP reads the configuration and the API keys again.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from tiffin.kvstore.errors import InvalidInput

from ..client.client import AsyncConductorClient
from ..service.web_server import announce, check_tls, listening, tls_context, web_server
from ..web.auth import Tokens, check_listen, load_tokens
from ..web.connection_limits import ConnectionLimits
from ..web.tracing import open_tracing
from .app import create_app
from .config import GatewayConfig, read_config
from .gateway import Gateway
from .workers.client_shares import part_of
from .workers.worker_metrics import WorkerMetrics

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable

    from ..api.authorisation import Door
    from .workers.supervisor import WorkerSpec

log = logging.getLogger("tiffin.gateway")

PORT = 7900
# Idle keep-alive connections count, too; requests have a limit of their own.
_CONNECTIONS_PER_REQUEST = 4


@dataclass(frozen=True, slots=True)
class GatewayOptions:
    """The options of a gateway process. `config_file` has its configuration, `token_file` the
    clients' API keys; `conductor_token_file` the key that the gateway presents to the conductor;
    `otlp_endpoint` is for spans. Raises InvalidInput for an invalid combination, and for files that
    can't be used."""

    listen: tuple[str, int] = ("127.0.0.1", PORT)
    conductor: str = "http://127.0.0.1:7800"
    conductor_token_file: Path | None = None
    conductor_tls_ca: Path | None = None
    config_file: Path | None = None
    token_file: Path | None = None
    tls_cert: Path | None = None
    tls_key: Path | None = None
    otlp_endpoint: str = ""
    config: GatewayConfig = field(init=False)
    tokens: Tokens = field(init=False)

    def __post_init__(self) -> None:
        config, tokens = self.read()
        object.__setattr__(self, "config", config)
        object.__setattr__(self, "tokens", tokens)
        check_listen(self.listen[0], self.tokens)
        check_tls(self.tls_cert, self.tls_key)

    def read(self) -> tuple[GatewayConfig, Tokens]:
        """The configuration and the API keys as the files have them now. Raises InvalidInput."""
        config = read_config(self.config_file) if self.config_file else GatewayConfig()
        return config, load_tokens(self.token_file) if self.token_file else Tokens()


def _connections(config: GatewayConfig, workers: int) -> ConnectionLimits:
    """The limits of one worker: connections are spread evenly over them."""
    return ConnectionLimits(
        -(-config.limits.requests * _CONNECTIONS_PER_REQUEST // workers),
        per_peer=-(-config.limits.peer_connections // workers),
        head_s=config.timeouts.head_s,
    )


async def serve(
    options: GatewayOptions,
    started: Callable[[tuple[str, int]], None] | None = None,
    worker: WorkerSpec | None = None,
) -> None:
    """Run the gateway, or one worker of it, until SIGINT or SIGTERM. `started` is a callback that
    gets the address once the server listens. Raises InvalidInput and InvalidRequest for options
    that can't work."""
    loop = asyncio.get_running_loop()
    tls = tls_context(options.tls_cert, options.tls_key)
    stop = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop.set)
    client = AsyncConductorClient(
        options.conductor,
        token_file=options.conductor_token_file,
        tls_ca=options.conductor_tls_ca,
        timeout_s=options.config.timeouts.conductor_s,
    )
    tracing = open_tracing("tiffin-gateway", options.otlp_endpoint)
    address, workers, counts = options.listen, 1, None
    if worker is not None:
        address, workers = (address[0], worker.port), worker.workers
        counts = worker.counts()
    config = part_of(options.config, workers)
    with listening(address, shared=worker is not None) as door, contextlib.closing(tracing):
        async with (
            Gateway(client, config, tracing=tracing, counts=counts) as gateway,
            _scraped(gateway, worker) as scrape,
        ):
            app = create_app(gateway, auth=options.tokens, scrape=scrape)
            loop.add_signal_handler(
                signal.SIGHUP, _reload, options, gateway, app.state.door, workers
            )
            server = web_server(
                app,
                _connections(options.config, workers),
                stop_s=max(1, round(options.config.timeouts.stop_s)),
                tls=tls,
            )
            serving = asyncio.create_task(server.serve([door]))
            stopping = asyncio.create_task(stop.wait())
            if worker is None or worker.number == 0:  # once for all
                announce(
                    log,
                    door,
                    "the gateway answers at %s/v1",
                    "keys and prompts",
                    tokens=options.tokens,
                    tls=tls is not None,
                    started=started,
                )
            await asyncio.wait((serving, stopping), return_when=asyncio.FIRST_COMPLETED)
            log.info("stopping")
            stopping.cancel()
            server.should_exit = True
            await serving


def _reload(options: GatewayOptions, gateway: Gateway, door: Door, workers: int) -> None:
    """Take clients' settings, objectives and API keys as the files have them now; all stay as they
    are if one file can't be used."""
    try:
        config, tokens = options.read()
    except InvalidInput as error:
        log.error("nothing is reloaded: %s", error)
        return
    fixed = gateway.reload(part_of(config, workers))
    door.replace(tokens)
    log.info("clients, objectives and keys are reloaded")
    if fixed:
        log.warning("these take a restart: %s", ", ".join(fixed))


@contextlib.asynccontextmanager
async def _scraped(
    gateway: Gateway, worker: WorkerSpec | None
) -> AsyncIterator[Callable[[], Awaitable[bytes]] | None]:
    """What answers a scrape with the metrics of all workers; None if there is one alone."""
    if worker is None:
        yield None
        return
    folder = Path(worker.folder)
    metrics = WorkerMetrics(folder, worker.number, worker.workers, gateway.metrics.text)
    async with metrics.served():
        yield metrics.of_all
