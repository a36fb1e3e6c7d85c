"""Starts the fleet: nodes, engines, a conductor that asks them, a gateway."""

from __future__ import annotations

import contextlib
import json
import os
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from tiffin.conductor.client import ConductorClient
from tiffin.kvstore.cli.local.local_pool import LocalPool, LocalPoolOptions
from tiffin.kvstore.cli.local.local_redis import free_port

from ...serving import servers
from ...serving.completions import ask
from ...serving.conducting import PROFILE, conductor, fitted
from ...serving.errors import ProcessFailed
from ...serving.servers import HOST
from ...serving.split_service import START_S
from ..engine_process import model

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from tiffin.conductor.cost.latency_profiles import Profile

    from ...serving.completions import Answer
    from ...serving.servers import Server
    from ..setting import Setting

Way = Literal["key spaces", "events alone", "round robin", "no pool"]

ENGINES = 2
# 16,384 tokens of an engine's own: less than its users' prompts.
OWN_PAGES = 128
_MEASURED_TOKENS, _MEASURED_ANSWER = (130, 600, 1500, 3000), 24
_BATCHES = (1, 2, 4)
_WAIT_S = 60.0
_CHANGES: dict[Way, dict[str, Any]] = {
    "key spaces": {},
    "events alone": {"discovery": {"key_spaces": False}},
    "round robin": {"policy": {"name": "round_robin"}},
    "no pool": {"policy": {"name": "round_robin"}},
}


@dataclass(frozen=True, slots=True)
class Fleet:
    """What runs."""

    pool: LocalPool
    engines: dict[str, Server]
    gateway: Server
    conductor: ConductorClient
    profile: Profile
    restart: Callable[[], None]

    def quiet(self) -> None:
        """Return when the engines have saved what they have computed, and the conductor knows."""
        before = -1
        while before != (before := self._events()):
            time.sleep(1.5)

    def _events(self) -> int:
        return sum(one.counter("tiffin_saved_tokens") for one in self.engines.values())


@contextlib.contextmanager
def fleet(
    setting: Setting,
    folder: Path,
    way: Way,
    dram: str,
    more: dict[str, Any],
    profile: Profile | None = None,
) -> Iterator[Fleet]:
    """Everything is ready; each node has `dram`. `more`: groups of the conductor's settings;
    `profile`: of the engines, measured if it is None. Raises Missing, ProcessFailed,
    ConductorError."""
    with contextlib.ExitStack() as stack:
        options = LocalPoolOptions(nodes=ENGINES, dram=dram, redis=True)
        pool = stack.enter_context(LocalPool(options))
        weights = stack.enter_context(model(setting))
        python = setting.python()
        engines: dict[str, Server] = {}
        ports = {f"vllm-{n}": [free_port(HOST) for _ in range(3)] for n in range(ENGINES)}

        cores = sorted(os.sched_getaffinity(0))

        def start() -> None:
            for number, name in enumerate(ports):
                url = "" if way == "no pool" else pool.url_at_home(pool.socket(number))
                core = cores[number % len(cores)]
                engines[name] = _engine(name, python, weights, url, folder, ports[name], core)
            for one in engines.values():
                one.wait("/health", START_S)

        def stop() -> None:
            for one in engines.values():
                one.__exit__()

        stack.callback(stop)
        start()
        profile = profile or _measured(engines["vllm-0"])
        conducting = conductor(pool, profile, folder, START_S, changes={**_CHANGES[way], **more})
        url = stack.enter_context(conducting).url
        client = stack.enter_context(ConductorClient(url))
        join = partial(
            _join, client, engines, ports, announced=way in ("key spaces", "round robin")
        )
        join()

        def restart() -> None:
            for one in engines.values():
                one.kill()
            start()
            join()

        gateway = stack.enter_context(servers.gateway(url, "pool", folder))
        gateway.wait("/readyz", START_S)
        yield Fleet(pool, engines, gateway, client, profile, restart)


def _engine(
    name: str, python: Path, weights: str, url: str, folder: Path, ports: list[int], core: int
) -> Server:
    """An engine on a core of its own, as on a machine of its own: engines that share cores are
    slower together, and where a request runs would matter to all."""
    events = {
        "enable_kv_cache_events": True,
        "publisher": "zmq",
        "endpoint": f"tcp://*:{ports[1]}",
        "replay_endpoint": f"tcp://*:{ports[2]}",
    }
    return servers.vllm(
        *(name, "kv_both", python, weights, url, folder),
        port=ports[0],
        own_pages=OWN_PAGES,
        core=core,
        more=("--kv-events-config", json.dumps(events)),
        engine=name,
    )


def _measured(server: Server) -> Profile:
    """How fast an engine is, alone: prompts of fresh tokens, one at a time and several."""
    prefill, decode = [], []
    with ThreadPoolExecutor(max(_BATCHES)) as clients:
        for batch in _BATCHES:
            for tokens in _MEASURED_TOKENS:
                salts = [f"{batch}-{tokens}-{n}" for n in range(batch)]
                ask(server, [1] * tokens, 1, "warm-up", cache_salt=f"w{salts}")
                answers = list(clients.map(partial(_fresh, server, tokens), salts))
                steps = [np.median(np.diff(one.arrivals_s)) for one in answers]
                decode.append((batch, batch * tokens, float(np.median(steps))))
                if batch == 1:
                    prefill.append((tokens, 0, answers[0].arrivals_s[0]))
    return fitted(prefill, decode, engine="vllm")


def _fresh(server: Server, tokens: int, salt: str) -> Answer:
    return ask(server, [1] * tokens, _MEASURED_ANSWER, salt, cache_salt=salt)


def _join(
    client: ConductorClient,
    engines: dict[str, Server],
    ports: dict[str, list[int]],
    *,
    announced: bool,
) -> None:
    """The conductor asks the engines; returns when it knows their nodes, if they are `announced`
    and it listens."""
    for name, one in engines.items():
        _, live, replay = ports[name]
        client.add_engine(
            one.url, id=name, profile=PROFILE, kv_events_port=live, kv_events_replay_port=replay
        )
    deadline = time.monotonic() + _WAIT_S
    while True:
        known = [one for one in client.instances() if one.status == "ready"]
        if len(known) == len(engines) and all(one.node or not announced for one in known):
            return
        if time.monotonic() > deadline:
            raise ProcessFailed("the conductor does not know all engines")
        time.sleep(0.2)
