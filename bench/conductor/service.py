"""Rows about `POST /v1/schedule`: a `tiffin conductor` process under load over 16 connections.

The load generator is a process of its own, in a closed loop: each connection has one request in
flight. It sends the same requests in turns to a plain service, which reads them and answers with a
line.
"""

from __future__ import annotations

import contextlib
import socket
import sys
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import TYPE_CHECKING

from tiffin.conductor.console import SERVICE
from tiffin.kvstore.cli.local.local_redis import free_port
from tiffin.kvstore.extras import need

from ..network.setting import LOOPBACK, await_answer, cpu_seconds
from ..store.rows import MICROSECONDS, MILLISECONDS, Row, Spread, Target, times
from ..store.setting import running
from .decision import MODEL, spec
from .load import RequestLoad
from .processes.peer import PeerProcess, peer

if TYPE_CHECKING:
    from collections.abc import Iterator

    from .setting import Setting, Sizes

# The service as users start it, without needing the program to be installed.
COMMANDS = (
    "import typer; from tiffin.conductor.cli import commands;"
    " app = typer.Typer(); app.callback()(lambda: None); commands(app); app()"
)
# Instances register once and then send no heartbeats.
_SETTINGS = {"core": {"heartbeat_timeout_s": 3600.0}}


@dataclass(slots=True)
class _Side:
    """A service and its load generator."""

    pid: int
    load: PeerProcess
    cpu_s: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)

    def turn(self, requests: int, *, counted: bool) -> None:
        """One turn of `requests` requests. They are then reported as finished, which is not
        measured."""
        before_s = cpu_seconds([self.pid])
        seconds = self.load.ask(f"ask {requests}")
        took_s = cpu_seconds([self.pid]) - before_s
        self.load.ask("finish")
        if counted:
            self.cpu_s.append(took_s / requests)
            self.seconds += seconds


def service(setting: Setting) -> list[Row]:
    """CPU time of the service per request, and latency of requests. Raises MissingExtra."""
    need_service()
    sizes = setting.sizes
    with conductor(setting) as (pid, load, _), plain(sizes) as beside:
        ours, theirs = _Side(pid, load), _Side(*beside)
        setting.tell(f"{sizes.turns} times {sizes.requests} requests")
        for turn in range(sizes.turns + 1):
            for side in (theirs, ours):
                side.turn(max(sizes.requests, sizes.prompts), counted=turn > 0)
    what = (
        f"POST /v1/schedule of {sizes.prompt_blocks} block keys, {sizes.instances} instances, "
        f"{sizes.connections} connections"
    )
    plainly = "the same bodies read by a plain FastAPI route in uvicorn"
    parser = "httptools" if find_spec("httptools") is not None else "h11"
    return [
        Row(
            name="service-cpu",
            what=f"CPU time of the service per {what}",
            unit="us",
            value=times(ours.cpu_s, MICROSECONDS),
            limit_what=plainly,
            limit=times(theirs.cpu_s, MICROSECONDS),
            targets=(Target("p50", "<=", 450.0),),
            note=f"either reads HTTP by {parser}, which uvicorn takes if it is installed",
        ),
        Row(
            name="service-latency",
            what=what,
            unit="ms",
            value=times(ours.seconds, MILLISECONDS),
            limit_what=plainly,
            limit=times(theirs.seconds, MILLISECONDS),
            targets=(Target("p50", "<=", 6.0),),
            note=f"{_rate(ours):.0f} requests/s, p99 {_p99(ours):.1f} ms",
        ),
    ]


def need_service() -> None:
    """Raises MissingExtra without the libraries of the service, which runs in other processes."""
    need("the service", *SERVICE)


def _rate(side: _Side) -> float:
    """Requests per second of CPU time of the service, which uses one core at most."""
    return 1.0 / Spread.of(side.cpu_s, lower_is_better=True).p50


def _p99(side: _Side) -> float:
    return MILLISECONDS * sorted(side.seconds)[len(side.seconds) * 99 // 100]


@contextlib.contextmanager
def conductor(setting: Setting) -> Iterator[tuple[int, PeerProcess, int]]:
    """A conductor with all instances registered: its pid, its load generator, and its port."""
    port = free_port(LOOPBACK)
    command = [
        *(sys.executable, "-c", COMMANDS, "conductor"),
        *("--listen", f"{LOOPBACK}:{port}", "--log-level", "error"),
    ]
    with running(command) as process:
        await_answer(process, lambda: accepts(port), "the conductor")
        register(setting, port)
        with load_of(setting.sizes, port) as load:
            yield process.pid, load, port


def register(setting: Setting, port: int) -> None:
    """Register all instances."""
    from tiffin.conductor.client import ConductorClient

    setting.tell(f"{setting.sizes.instances} instances register")
    with ConductorClient(f"http://{LOOPBACK}:{port}") as client:
        client.patch(_SETTINGS)
        for number in range(setting.sizes.instances):
            client.register(spec(f"instance-{number}", number))


@contextlib.contextmanager
def plain(sizes: Sizes) -> Iterator[tuple[int, PeerProcess]]:
    """A plain service: its pid, and its load generator."""
    port = free_port(LOOPBACK)
    command = [sys.executable, "-m", "tiffin.bench.conductor.processes.plain_service", str(port)]
    with running(command) as process:
        await_answer(process, lambda: accepts(port), "the plain service")
        with load_of(sizes, port) as load:
            yield process.pid, load


def accepts(port: int) -> bool:
    """Whether a server listens at this port."""
    with contextlib.suppress(OSError), socket.create_connection((LOOPBACK, port), 1.0):
        return True
    return False


def load_of(sizes: Sizes, port: int) -> contextlib.AbstractContextManager[PeerProcess]:
    """The load generator for the service at this port."""
    load = RequestLoad(
        port=port,
        model=MODEL,
        connections=sizes.connections,
        prompts=sizes.prompts,
        prompt_blocks=sizes.prompt_blocks,
        shared_blocks=sizes.shared_blocks,
    )
    return peer(
        "who asks the service",
        [sys.executable, "-m", "tiffin.bench.conductor.load", load.text()],
    )
