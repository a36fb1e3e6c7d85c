"""The conductor as a process: the core, its feeds, and the REST service on a port.

    await serve(Conductor(), ConductorOptions(listen=("127.0.0.1", 7800)))

One event loop does everything but the feeds' waiting. SIGTERM and SIGINT start a graceful shutdown:
streams end, in-flight HTTP requests are answered, then the feeds' threads end. The process persists
nothing: after a restart instances register again with their next heartbeat, and nodes and engines
report which blocks they have.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import signal
import time
import tomllib
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tiffin.kvstore.credentials import Credentials
from tiffin.kvstore.errors import InvalidInput
from tiffin.kvstore.format.key_space import read_secret, secret_name
from tiffin.kvstore.gc_tuning import collect_all, collect_young
from tiffin.kvstore.sizes import format_bytes
from tiffin.kvstore.text import printable

from ..api.app import create_app
from ..api.request_bodies import Limits
from ..core.silence import lost
from ..discovery.engine_watch import EngineWatch
from ..discovery.settings import DiscoverySettings
from ..recording.recorder import Recorder
from ..recording.recording_file import BYTES_MAX, RecordingFile
from ..replicas.replica import SharedConductor
from ..state.allowed_hosts import host_of
from ..web.auth import Tokens, check_listen
from ..web.connection_limits import ConnectionLimits
from ..web.time_slices import TimeSlices
from ..web.tracing import open_tracing
from .action_runner import Acting
from .feeds import Feeding
from .web_server import announce, check_tls, listening, tls_context, url_of, web_server

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Iterator

    from ..api.conductor_service import Service
    from ..core.conductor import Conductor
    from ..state.instance_table import Cluster

log = logging.getLogger("tiffin.conductor")

PORT = 7800
# Interval of ticks, which expire requests and silent instances. By default none of these timeouts
# is shorter than a second.
TICK_S = 0.1
# Interval of the collector's looks at new objects: a busy conductor makes hundreds meanwhile, which
# take it a fifth of a millisecond.
COLLECT_S = 0.02
# Interval of its looks at all objects, of which each takes a quarter of a microsecond: a quarter of
# a second for a million, which is 0.04% of the time. Without it, a cycle that outlives a look at
# new objects (a connection that broke off, say) would never be freed.
COLLECT_ALL_S = 600.0
# Timeout of a graceful shutdown. Answers take milliseconds; a client that takes longer to read one
# is gone.
STOP_S = 3.0
_CONFIG_BYTES_MAX = 1 << 20


@dataclass(frozen=True, slots=True)
class ConductorOptions:
    """The options of a conductor process. `directory` is a URL for `open_directory`, `share` the
    Redis of a `SharedConductor` and its peers, `advertise` the URL at which clients reach it (else
    where it listens), `credentials` are for the pool's nodes, `otlp_endpoint` is for spans,
    `record` is a file for a recording, of up to `record_bytes`, `discovery` says where engines are.
    Raises InvalidInput for an invalid combination, InvalidRequest for what is no URL."""

    listen: tuple[str, int] = ("127.0.0.1", PORT)
    tokens: Tokens = field(default_factory=Tokens)
    directory: str = ""
    share: str = ""
    advertise: str = ""
    pool: str = "default"
    credentials: Credentials = field(default_factory=Credentials)
    limits: Limits = field(default_factory=Limits)
    tls_cert: Path | None = None
    tls_key: Path | None = None
    otlp_endpoint: str = ""
    record: Path | None = None
    record_bytes: int = BYTES_MAX
    discovery: DiscoverySettings = field(default_factory=DiscoverySettings)

    def __post_init__(self) -> None:
        check_listen(self.listen[0], self.tokens)
        check_tls(self.tls_cert, self.tls_key)
        if self.advertise:
            host_of(self.advertise, "--advertise")
        elif self.share and self.listen[0] in ("", "0.0.0.0", "::"):
            raise InvalidInput(
                f"--listen {self.listen[0]} is every address of this machine: say with --advertise "
                "at which URL clients reach this conductor"
            )


def read_settings(path: Path) -> dict[str, Any]:
    """Read settings from a JSON file (suffix `.json`) or else a TOML file. Raises InvalidInput."""
    try:
        with path.open("rb") as file:
            raw = file.read(_CONFIG_BYTES_MAX + 1)
        if len(raw) > _CONFIG_BYTES_MAX:
            raise InvalidInput(f"{path} is larger than {format_bytes(_CONFIG_BYTES_MAX)}")
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
    """Run the conductor until SIGINT or SIGTERM. `started` is a callback that gets the address once
    the server listens. Raises InvalidInput for a directory, an address or a certificate that can't
    work."""
    loop = asyncio.get_running_loop()
    tls = tls_context(options.tls_cert, options.tls_key)
    stop = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop.set)
    tracing = open_tracing("tiffin-conductor", options.otlp_endpoint)
    with listening(options.listen) as door, _recording(core, options, loop.time()) as recorder:
        feeding = Feeding(lambda update: core.apply(update, loop.time()), loop)
        app = create_app(
            core,
            auth=options.tokens,
            limits=options.limits,
            reasons=(feeding.missing,),
            clock=loop.time,
            feeding=feeding,
            tracing=tracing,
            recorder=recorder,
        )
        service: Service = app.state.service
        known = map(read_secret, map(Path, options.discovery.secret_files))
        service.models.announced.secrets = {secret_name(secret): secret for secret in known}
        if options.discovery.key_spaces:
            feeding.announced = service.announced
        server = web_server(
            app,
            _connections(options.limits),
            stop_s=int(STOP_S),
            tls=tls,
        )
        try:
            if options.share and isinstance(core, SharedConductor):
                core.address = options.advertise or url_of(door, tls=tls is not None)
            if options.directory:
                feeding.follow_pool(options.directory, options.pool, options.credentials)
            with _sharing(core, options, service) as shared:
                async with (
                    Acting(service, feeding) as acting,
                    EngineWatch(service, options.discovery) as engines,
                    asyncio.TaskGroup() as tasks,
                ):
                    serving = tasks.create_task(server.serve([door]))
                    running = (_tick(service), collecting(), acting.run(), engines.run())
                    others = [tasks.create_task(one) for one in running]
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
            await asyncio.to_thread(tracing.close)


def _connections(limits: Limits) -> ConnectionLimits:
    return ConnectionLimits(
        limits.connections, per_peer=limits.peer_connections, head_s=limits.head_s
    )


@contextlib.contextmanager
def _recording(core: Conductor, options: ConductorOptions, now: float) -> Iterator[Recorder | None]:
    """A recorder to the file of the options, if there is one. Raises InvalidInput."""
    if options.record is None:
        yield None
        return
    with RecordingFile(options.record, options.record_bytes) as file:
        recorder = Recorder(file.put)
        recorder.begin(core.settings, now, time.time())
        try:
            yield recorder
        finally:
            recorder.end()


@contextlib.contextmanager
def _sharing(
    core: Conductor, options: ConductorOptions, service: Service
) -> Iterator[Callable[[], Coroutine[Any, Any, None]] | None]:
    """The coroutine function that exchanges state with the other conductors, to be run in a task;
    None if this conductor shares nothing. Raises InvalidInput for an invalid Redis URL."""
    if not options.share or not isinstance(core, SharedConductor):
        yield None
        return
    from ..replicas.redis_link import RedisLink, share  # needs redis, and only here

    link = RedisLink(options.share, pool=options.pool, token=options.credentials.token)
    try:
        yield partial(share, core, link, service.clock, service.learn)
    finally:
        link.close()


async def _tick(service: Service) -> None:
    """Tick the service every `TICK_S`. A tick that raises ends the process: without ticks it would
    go on with reservations that never expire."""
    known: set[str] = set()
    while True:
        await TimeSlices().finish(service.ticking())
        known = tell_lost(service.core.cluster, known)
        await asyncio.sleep(TICK_S)


def tell_lost(cluster: Cluster, known: set[str]) -> set[str]:
    """Log each instance once when it is lost, and once when it is heard again or removed. `known`
    are those that were lost at the last look; returns those that are now."""
    now = lost(cluster)
    for name in sorted(now - known):
        log.warning("%s is silent, and gets nothing new until it is heard again", printable(name))
    for name in sorted(known - now):
        end = "heard again" if name in cluster else "taken off the list"
        log.warning("%s, which was silent, is %s", printable(name), end)
    return now


async def collecting() -> None:
    """Look at new objects every `COLLECT_S`, a few hundred at a time, and at all of them every
    `COLLECT_ALL_S`."""
    clock = asyncio.get_running_loop().time
    all_at = clock() + COLLECT_ALL_S
    while True:
        await asyncio.sleep(COLLECT_S)
        if clock() < all_at:
            collect_young()
        else:
            collect_all()
            all_at = clock() + COLLECT_ALL_S


async def _either(stop: asyncio.Event, serving: asyncio.Task[None]) -> None:
    """Wait until `stop` is set or `serving` has ended."""
    stopping = asyncio.ensure_future(stop.wait())
    try:
        await asyncio.wait((stopping, serving), return_when=asyncio.FIRST_COMPLETED)
    finally:
        stopping.cancel()
