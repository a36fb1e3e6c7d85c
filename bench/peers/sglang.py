"""Rows beside SGLang's router: completions through it and through our gateway, to trivial workers.

The router has no Python API, so both are asked over HTTP, one request at a time, and what is timed
is the whole way: to the router, to a worker, and back. Each pair's note says how long the way takes
without a router. Both look at the prompts: the router keeps a tree of their text (`cache_aware`),
ours an index of their blocks.
"""

from __future__ import annotations

import contextlib
import sys
import tempfile
import time
from dataclasses import dataclass, field
from itertools import count, cycle, islice
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from tiffin.conductor.client import calls
from tiffin.conductor.cost.latency_profiles import DEFAULT
from tiffin.conductor.records import InstanceSpec, Request, RequestEvent, Role
from tiffin.kvstore.cli.local.local_redis import free_port

from ..conductor.service import accepts, need_service
from ..network.setting import LOOPBACK, await_answer, cpu_seconds
from ..store.rows import MICROSECONDS
from ..store.setting import MIB, schema_of
from ..vllm.engine_process import GroupProcess, service
from . import routers
from .conversations import Conversation, Http, completion, conversations, raw_request
from .processes import backends
from .processes.backends import MODEL
from .turns import PeerRow, Turns, in_turns

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from ..store.rows import Row
    from .setting import Setting, Sizes

_PEER = "sglang"
# Our programs as users start them, without needing them to be installed.
_COMMANDS = (
    "import typer; from tiffin.conductor.cli import commands as conductor;"
    " from tiffin.conductor.gateway.cli import commands as gateway;"
    " app = typer.Typer(); conductor(app); gateway(app); app()"
)
# Instances register once and then send no heartbeats.
_SETTINGS = {"core": {"heartbeat_timeout_s": 3600.0}}


@dataclass(slots=True)
class _Side:
    """A way to the workers: requests of one turn after the other, and CPU time of `pids` for
    each."""

    turn: Callable[[], list[float]]
    pids: list[int]
    cpu_s: list[list[float]] = field(default_factory=list)

    def __call__(self) -> list[float]:
        """Run for a turn."""
        before_s = cpu_seconds(self.pids)
        seconds = self.turn()
        self.cpu_s.append([(cpu_seconds(self.pids) - before_s) / len(seconds)])
        return seconds


def sglang(setting: Setting) -> list[Row]:
    """Latency and CPU time of each pair. Raises Missing, NodeUnavailable."""
    python = setting.python(_PEER)
    need_service()
    sizes = setting.sizes
    talks = conversations(sizes.conversations)
    with contextlib.ExitStack() as stack:
        enter = stack.enter_context
        setting.tell("the router, the conductor and the gateway start")
        ports = enter(_backends(sizes))
        urls = [f"http://{LOOPBACK}:{one}" for one in ports]
        router, router_port = enter(routers.router(_PEER, python, urls, MODEL))
        conductor, conductor_port = enter(_conductor(ports))
        gateway, gateway_port = enter(_gateway(conductor_port))
        direct, to_router, to_gateway, to_conductor = (
            enter(Http(port)) for port in (ports[0], router_port, gateway_port, conductor_port)
        )
        texts = [completion(one.text) for one in talks]
        ids = [completion(one.ids) for one in talks]
        theirs = _requests(to_router, texts, sizes.requests)
        ours = [router.popen.pid]
        gateways = [gateway.popen.pid, conductor.popen.pid]
        bare_s = median(_requests(direct, texts, sizes.requests)())
        note = f"without a router, {bare_s * MICROSECONDS:.0f} us; one request at a time"
        scheduled = _Scheduled(to_conductor, direct, talks, sizes.requests)
        rows: list[Row] = []
        for name, turn, pids, what in (
            ("text", _requests(to_gateway, texts, sizes.requests), gateways, _TEXT),
            ("ids", _requests(to_gateway, ids, sizes.requests), gateways, _IDS),
            ("schedule", scheduled, gateways[1:], _SCHEDULE),
        ):
            setting.tell(what)
            mine, other = _Side(turn, pids), _Side(theirs, ours)
            turns = in_turns(mine, other, sizes.rounds)
            rows += _rows(name, what, turns, mine, other, note)
        return rows


_TEXT = "a completion through our gateway, text placed by load"
_IDS = "a completion through our gateway, token ids placed by their blocks"
_SCHEDULE = "POST /v1/schedule with block keys, and then the completion from the worker itself"
_THEIRS = "a completion through SGLang's router, cache_aware, text"


def _rows(
    name: str, what: str, turns: Turns, mine: _Side, other: _Side, note: str
) -> Iterator[PeerRow]:
    counted = len(turns.ours)  # the first turn does not count
    cpu = Turns(mine.cpu_s[-counted:], other.cpu_s[-counted:])
    yield turns.row(_PEER, f"{name}-latency", what, _THEIRS, "us", MICROSECONDS, note)
    yield cpu.row(
        _PEER,
        f"{name}-cpu",
        f"CPU time per request of our processes, {what}",
        "CPU time per request of the router's process",
        "us",
        MICROSECONDS,
        "without the client's and the workers'",
    )


def _requests(to: Http, raw: list[bytes], number: int) -> Callable[[], list[float]]:
    """A turn of so many requests, from where the last turn ended."""
    endless = cycle(raw)

    def turn() -> list[float]:
        to.renew()
        to.ask(next(endless))  # the first one on a connection does not count
        return to.seconds(islice(endless, number))

    return turn


class _Scheduled:
    """A client of its own: it asks the conductor where, and then asks the worker. All trivial
    workers are one process, so one connection stands for all."""

    def __init__(self, conductor: Http, worker: Http, talks: list[Conversation], number: int):
        self._conductor, self._worker, self._number = conductor, worker, number
        schema = schema_of(MIB)
        self._talks = cycle(
            (len(one.ids), tuple(schema.prefix(one.ids).keys), completion(one.text))
            for one in talks
        )
        self._names = count()

    def __call__(self) -> list[float]:
        """A turn. Requests are then reported as finished, which is not timed."""
        seconds, names = [], []
        self._conductor.renew()
        self._worker.renew()
        for tokens, keys, raw in islice(self._talks, self._number):
            name = f"request-{next(self._names)}"
            start_s = time.perf_counter()
            self._conductor.ask(_call(calls.schedule(Request(name, MODEL, tokens, keys))))
            self._worker.ask(raw)
            seconds.append(time.perf_counter() - start_s)
            names.append(name)
        for name in names:
            self._conductor.ask(_call(calls.observe(RequestEvent(name, "finished"))))
        return seconds


def _call(call: calls.RestCall[Any]) -> bytes:
    return raw_request(call.method, call.path, call.body or b"")


# -- processes -------------------------------------------------------------------------------------


@contextlib.contextmanager
def _backends(sizes: Sizes) -> Iterator[list[int]]:
    ports = [free_port(LOOPBACK) for _ in range(sizes.backends)]
    command = [sys.executable, str(backends.__file__), *map(str, ports)]
    process = GroupProcess("the workers", command)
    try:
        process.ready()
        yield ports
    finally:
        process.end()


@contextlib.contextmanager
def _conductor(ports: list[int]) -> Iterator[tuple[GroupProcess, int]]:
    from tiffin.conductor.client import ConductorClient

    port = free_port(LOOPBACK)
    listen = ["conductor", "--listen", f"{LOOPBACK}:{port}", "--log-level", "error"]
    with service("the conductor", [sys.executable, "-c", _COMMANDS, *listen]) as process:
        await_answer(process.popen, lambda: accepts(port), "the conductor")
        with ConductorClient(f"http://{LOOPBACK}:{port}") as client:
            client.patch(_SETTINGS)
            for number, one in enumerate(ports):
                url = f"http://{LOOPBACK}:{one}"
                name = f"instance-{number}"
                client.register(InstanceSpec(name, MODEL, Role.MIXED, DEFAULT, url=url))
        yield process, port


@contextlib.contextmanager
def _gateway(conductor_port: int) -> Iterator[tuple[GroupProcess, int]]:
    port = free_port(LOOPBACK)
    with tempfile.TemporaryDirectory(prefix="tiffin-bench-") as folder:
        schema, config = Path(folder) / "schema.json", Path(folder) / "gateway.toml"
        schema.write_bytes(schema_of(MIB).canonical_bytes())
        config.write_text(
            f'[models."{MODEL}"]\ntokenizer = "estimate"\nschema_file = "{schema}"\n',
            encoding="utf-8",
        )
        options = [
            *("gateway", "--listen", f"{LOOPBACK}:{port}", "--log-level", "error"),
            *("--conductor", f"http://{LOOPBACK}:{conductor_port}", "--config", str(config)),
        ]
        with service("the gateway", [sys.executable, "-c", _COMMANDS, *options]) as process:
            await_answer(process.popen, lambda: routers.answers(port, "/readyz"), "the gateway")
            yield process, port
