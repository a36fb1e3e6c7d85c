"""Rows about the tail latency of decisions under disturbances, costly requests or floods: the p99
of `POST /v1/schedule` during a disturbance, beside the p99 without it, in turns.
"""

from __future__ import annotations

import contextlib
import sys
from dataclasses import replace
from typing import TYPE_CHECKING

from tiffin.kvstore.cli.local.local_redis import free_port
from tiffin.kvstore.extras import need

from ..network.setting import LOOPBACK, await_answer
from ..store.rows import MILLISECONDS, Row, Target, times
from ..store.setting import running
from .processes.disturber import FOLLOWERS, HALF_OPEN, TOKENS, Disturbance
from .processes.peer import PeerProcess, peer
from .service import accepts, conductor, load_of, need_service, register

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from .setting import Setting

    Service = Callable[[Setting], contextlib.AbstractContextManager[tuple[int, PeerProcess, int]]]

# Requests per second, and connections: a fifth of the service's capacity.
_RATE, _CONNECTIONS = 150, 64
_NODES, _PREFIXES = 125, 256

STALLS = {
    "forecast": "a plan by holt-winters every second",
    "tokens": f"ten prompts a second as {TOKENS:,} token ids, each tenth as a million",
    "followers": f"{FOLLOWERS} followers of the decisions, with 5 candidates each",
    "readyz": "/readyz, 200 times a second",
    "instances": "all instances, 5 times a second",
    "replication": f"replication, {_PREFIXES} hot prefixes on {_NODES} nodes every second",
}
FLOODS = {
    "head": "ten heads a second without an end, from strangers",
    "half_open": f"{HALF_OPEN:,} half-open heads of strangers at once, then a thousand a second",
}


def stalls(setting: Setting) -> list[Row]:
    """Disturbances by authorised requests and by the conductor's own work. Raises
    MissingExtra."""
    need("forecasting", "statsmodels")
    *plain, pooled = STALLS
    return [
        *_rows(setting, conductor, "stall", plain),
        *_rows(setting, _steered, "stall", [pooled]),
    ]


def floods(setting: Setting) -> list[Row]:
    """Disturbances by connections without any authorisation. Raises MissingExtra."""
    return _rows(setting, conductor, "flood", list(FLOODS))


def _rows(setting: Setting, service: Service, prefix: str, kinds: list[str]) -> list[Row]:
    need_service()
    setting = replace(setting, sizes=replace(setting.sizes, connections=_CONNECTIONS))
    rows: list[Row] = []
    with service(setting) as (_, load, port):
        for kind in kinds:
            what = (STALLS | FLOODS)[kind]
            setting.tell(f"{prefix}: {what}")
            with _disturber(port, kind) as disturber:
                name = f"{prefix}-{kind.replace('_', '-')}"
                rows.append(_row(setting, name, what, load, disturber))
    return rows


def _row(setting: Setting, name: str, what: str, load: PeerProcess, disturber: PeerProcess) -> Row:
    sizes = setting.sizes
    alone: list[float] = []
    disturbed: list[float] = []
    for turn in range(sizes.stall_turns + 1):
        for samples, begins in ((alone, False), (disturbed, True)):
            if begins:
                disturber.ask("begin")
            seconds = load.ask(f"pace {sizes.stall_requests} {_RATE}")
            if begins:
                disturber.ask("end")
            load.ask("finish")
            if turn:
                samples.append(sorted(seconds)[len(seconds) * 99 // 100])
    done = disturber.ask("end")
    return Row(
        name=name,
        what=f"p99 of POST /v1/schedule, {_RATE} a second, during: {what}",
        unit="ms",
        value=times(disturbed, MILLISECONDS),
        limit_what="p99 of the same requests with nothing beside them",
        limit=times(alone, MILLISECONDS),
        targets=(Target("ratio", "<=", 2.0),),
        note=f"{sizes.stall_turns} turns of {sizes.stall_requests} requests; so often: {done}",
    )


@contextlib.contextmanager
def _steered(setting: Setting) -> Iterator[tuple[int, PeerProcess, int]]:
    """Like `conductor`, but with a simulated pool of nodes (`steered_service`)."""
    port = free_port(LOOPBACK)
    module = "tiffin.bench.conductor.steered_service"
    command = [sys.executable, "-m", module, str(port), str(_NODES), str(_PREFIXES)]
    with running(command) as process:
        await_answer(process, lambda: accepts(port), "the conductor")
        register(setting, port)
        with load_of(setting.sizes, port) as load:
            yield process.pid, load, port


def _disturber(port: int, kind: str) -> contextlib.AbstractContextManager[PeerProcess]:
    text = Disturbance(port, kind).text()
    return peer(
        "who disturbs",
        [sys.executable, "-m", "tiffin.bench.conductor.processes.disturber", text],
    )
