"""Three `tiffin conductor` over one Redis, under load: one is killed, another one is stopped.

The instances are doubles: they register, send heartbeats to whichever conductor answers, and
compute nothing. Requests of `MODEL` come and go at all conductors; those of `HELD` stay, so that
what each conductor counts for them is known exactly.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from dataclasses import dataclass, field
from itertools import count, pairwise
from typing import TYPE_CHECKING

import pytest
from directory.ports import free_port
from directory.redisserver import RedisServer, wait_until
from serversupport import Process

from tiffin.conductor.client import ConductorClient
from tiffin.conductor.errors import ConductorError, ConductorUnavailable
from tiffin.conductor.records import InstanceSpec, Load, Rejection, Request, RequestEvent, Role

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

MODEL, HELD = "busy", "held"
PROFILE = "llama-3.1-8b.h100.tp1.vllm"
# Of the requests that stay, at each conductor.
STAY = 5
STOPPED_S = 10.0
# The load seen elsewhere settles within 2 s; a busy machine gets ten times as long.
PATIENCE_S = 20.0
SETTINGS = '[admission]\nmode = "off"\n'


@dataclass
class Peer:
    """One conductor, the requests that come to it, and what became of them."""

    url: str
    process: Process
    decided_at: list[float] = field(default_factory=list)
    errors: list[ConductorError] = field(default_factory=list)
    ends: threading.Event = field(default_factory=threading.Event)

    def __post_init__(self) -> None:
        self.client = ConductorClient(self.url, timeout_s=PATIENCE_S)
        self.thread = threading.Thread(target=self.ask)

    def ask(self) -> None:
        """One request after the other, each from its decision to its end."""
        with ConductorClient(self.url, timeout_s=PATIENCE_S, retries=0) as client:
            for number in count():
                if self.ends.wait(0.01):
                    return
                try:
                    self.one(client, f"{self.url.rpartition(':')[2]}-{number}")
                except ConductorError as error:
                    self.errors.append(error)

    def one(self, client: ConductorClient, name: str) -> None:
        placed = client.schedule(Request(name, MODEL, 2000))
        assert not isinstance(placed, Rejection)
        assert placed.conductor == self.url
        self.decided_at.append(time.monotonic())
        for kind in ("prefill_done", "first_token", "finished"):
            client.observe(RequestEvent(name, kind, conductor=placed.conductor))

    def held(self) -> float:
        """The requests that stay, as this one counts them."""
        return next(one.load["queued"] or 0.0 for one in self.client.instances() if one.id == HELD)

    def signal(self, number: signal.Signals) -> float:
        """Send a signal; when."""
        os.kill(self.process.process.pid, number)
        return time.monotonic()

    def close(self) -> None:
        self.ends.set()
        self.thread.join()
        self.client.close()


def beat(peers: list[Peer], ends: threading.Event) -> None:
    """Heartbeats of all instances, each to the next conductor that answers."""
    turns = count()
    specs = [InstanceSpec(f"m{n}", MODEL, Role.MIXED, PROFILE) for n in range(4)]
    clients = [ConductorClient(peer.url, timeout_s=0.5, retries=0) for peer in peers]
    with contextlib.ExitStack() as stack:
        for client in clients:
            stack.callback(client.close)
        while not ends.wait(0.1):
            for spec in (*specs, InstanceSpec(HELD, HELD, Role.MIXED, PROFILE)):
                for _ in clients:
                    with contextlib.suppress(ConductorUnavailable):
                        clients[next(turns) % len(clients)].register(spec, Load())
                        break


@pytest.fixture
def peers(tmp_path: Path) -> Iterator[list[Peer]]:
    """Three conductors that know all instances, and requests that come to each."""
    (tmp_path / "settings.toml").write_text(SETTINGS)
    ends = threading.Event()
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(RedisServer(tmp_path))
        options = (
            "--share",
            f"{server.url}?timeout=5",
            "--config",
            str(tmp_path / "settings.toml"),
        )
        made = []
        for _ in range(3):
            port = free_port()
            process = Process("--listen", f"127.0.0.1:{port}", "--log-level", "warning", *options)
            stack.enter_context(process)
            made.append(Peer(f"http://127.0.0.1:{port}", process))
        for peer in made:
            peer.process.wait_until_it_answers(peer.url)
        beats = threading.Thread(target=beat, args=(made, ends))
        beats.start()
        stack.callback(beats.join)
        stack.callback(ends.set)
        for peer in made:
            wait_until(lambda p=peer: len(p.client.instances()) == 5, "it knows all instances")  # type: ignore[misc]
            peer.thread.start()
            stack.callback(peer.close)
        yield made


def all_count(peers: list[Peer], requests: int, since: float, what: str) -> None:
    """Wait until all of these count so many requests that stay; says how long that took."""
    for peer in peers:
        wait_until(lambda p=peer: p.held() == requests, what, PATIENCE_S)  # type: ignore[misc]
    print(f"{time.monotonic() - since:.2f} s: {what}")


def decides_on(peer: Peer, since: float, what: str) -> None:
    """It has decided all the time, and goes on."""
    told = len(peer.decided_at)
    wait_until(lambda: len(peer.decided_at) > told + 10, what)
    at = [since, *(one for one in peer.decided_at if one >= since)]
    longest_s = max(after - before for before, after in pairwise(at))
    print(f"{what}: {len(at) - 1} decisions, never {longest_s:.2f} s without one")
    assert peer.errors == []


@pytest.mark.slow
def test_one_is_killed_under_load_and_another_stopped(peers: list[Peer]) -> None:
    first, second, third = peers
    for peer in peers:
        for number in range(STAY):
            placed = peer.client.schedule(Request(f"{peer.url}-{number}"[7:], HELD, 2000))
            assert not isinstance(placed, Rejection)
    all_count(peers, 3 * STAY, time.monotonic(), "each counts what the others have promised")
    for peer in peers:
        wait_until(lambda p=peer: len(p.decided_at) > 20, "there is load")  # type: ignore[misc]

    killed_at = first.signal(signal.SIGKILL)
    all_count([second, third], 2 * STAY, killed_at, "what the killed one had promised is gone")
    decides_on(second, killed_at, "the second goes on")
    decides_on(third, killed_at, "the third goes on")

    stopped_at = second.signal(signal.SIGSTOP)
    all_count([third], STAY, stopped_at, "so is what the stopped one had")
    time.sleep(max(0.0, stopped_at + STOPPED_S - time.monotonic()))
    decides_on(third, stopped_at, "the third goes on alone")

    continued_at = second.signal(signal.SIGCONT)
    all_count([second, third], 2 * STAY, continued_at, "it is back, and both agree")
    decides_on(third, continued_at, "the third goes on beside it")
    told = len(second.decided_at)
    wait_until(lambda: len(second.decided_at) > told + 10, "the second decides again")
    assert second.errors == [], "it was late, and lost nothing"

    def one_leads() -> bool:
        plans = [peer.client.plans() for peer in (second, third)]
        return plans[0].leads != plans[1].leads and plans[0].leader == plans[1].leader != ""

    wait_until(one_leads, "one leads, and both know which")
    for peer in (second, third):
        for number in range(STAY):
            name = f"{peer.url}-{number}"[7:]
            third.client.observe(RequestEvent(name, "finished", conductor=peer.url))
    all_count([second, third], 0, time.monotonic(), "what has ended counts nowhere")
