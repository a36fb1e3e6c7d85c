"""What is measured: stub engines, a conductor, a gateway, nginx and other routers, each a process
of its own. The stub engines are one process."""

from __future__ import annotations

import contextlib
import json
import shutil
import sys
import tempfile
import time
import urllib.request
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tiffin.kvstore.cli.local.local_redis import free_port, free_ports
from tiffin.kvstore.errors import NodeUnavailable

from ..conductor.processes.peer import PeerProcess, peer
from ..conductor.service import COMMANDS, accepts, need_service
from ..network.setting import LOOPBACK, await_answer, cpu_seconds
from ..peers.routers import router
from ..store.setting import running
from .processes.clients import Outcome

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from .setting import Setting

MODEL = "stub"
TOKEN_IDS = list(range(1000, 1200))
TEXT = "Where does the lunch of Mumbai come from, and who carries it? " * 12
# So many, and so quick by their profile, that they could carry 3,900 requests of 200 tokens per
# second. The conductor holds back what an engine would not begin within 0.3 s: of eight with its
# default profile, which could carry 67, nearly all requests, and what is measured would be that.
INSTANCES = 32
_PROFILE = "llama-3.1-8b.h100.tp1.vllm"
# Instances register once and then send no heartbeats.
_SETTINGS = {"core": {"heartbeat_timeout_s": 3600.0}}
_QUIET = ("--log-level", "error")
_PROCESSES = "tiffin.bench.gateway.processes"
# One process, as ours is. Connections to the stub are kept; a stream is passed on as it comes.
_NGINX = """
daemon off; master_process off; pid nginx.pid; error_log stderr error;
events {{ worker_connections 8192; }}
http {{
  access_log off; client_body_temp_path body; proxy_temp_path proxy;
  fastcgi_temp_path fastcgi; uwsgi_temp_path uwsgi; scgi_temp_path scgi;
  upstream engines {{ {servers} keepalive 1024; keepalive_requests 1000000; }}
  server {{
    listen 127.0.0.1:{port} backlog=4096; keepalive_requests 1000000; client_max_body_size 8m;
    location / {{
      proxy_pass http://engines; proxy_http_version 1.1; proxy_set_header Connection "";
      proxy_buffering off;
    }}
  }}
}}
"""


@dataclass(slots=True)
class Fleet:
    """The running processes. `engines`, `gateway` and `nginx` are ports, nginx's 0 if there is
    none; `routers` has those of others by name. `pids` has a process by name, `gateway` with those
    of its workers."""

    clients: PeerProcess
    engines: list[int]
    gateway: int = 0
    nginx: int = 0
    routers: dict[str, int] = field(default_factory=dict)
    pids: dict[str, list[int]] = field(default_factory=dict)

    @property
    def beside(self) -> str:
        """What the gateway is compared with: nginx, or without it the engine alone."""
        return "nginx" if self.nginx else "engine"

    @property
    def sides(self) -> dict[str, int]:
        """Ports by name, in the order of the turns."""
        found = {"engine": self.engines[0], "nginx": self.nginx, "gateway": self.gateway}
        return {name: port for name, port in found.items() if port} | self.routers

    def cpu_s(self, name: str) -> float:
        """The CPU time of a process so far."""
        return cpu_seconds(self.pids[name])

    def resident_bytes(self, name: str) -> int:
        """The memory of a process."""
        return sum(_resident_bytes(pid) for pid in self.pids[name])

    def ask(self, port: int, body: Mapping[str, Any], **how: Any) -> Outcome:
        """Let the clients send requests; see `processes/clients.py`. Raises NodeUnavailable."""
        return Outcome(**self.clients.ask(json.dumps({"port": port, "body": body, **how})))

    def drop(self) -> None:
        """Let the clients hang up on the streams that they hold."""
        self.clients.ask('{"drop": true}')


def short_body(prompt: list[int] | str = TOKEN_IDS, **more: Any) -> dict[str, Any]:
    """A request for a short answer."""
    return {"model": MODEL, "prompt": prompt, "max_tokens": 1, **more}


def stream_body(tokens: int, gap_s: float, prompt: list[int] | str = TOKEN_IDS) -> dict[str, Any]:
    """A request for a streamed answer, a token each `gap_s`."""
    asked = {"stream": True, "max_tokens": tokens, "gap_s": gap_s}
    return {"model": MODEL, "prompt": prompt, **asked}


@contextlib.contextmanager
def fleet(
    setting: Setting,
    config: Mapping[str, Any] | None = None,
    workers: int = 1,
    routers: Mapping[str, Path] | None = None,
) -> Iterator[Fleet]:
    """Start everything. `config` is the gateway's; `routers` are those of others to start, each
    with the Python of its environment. Raises MissingExtra, NodeUnavailable."""
    need_service()
    with contextlib.ExitStack() as stack:
        start = _Start(stack)
        start.engines()
        start.nginx()
        for name, python in (routers or {}).items():
            setting.tell(f"{name} starts")
            start.router(name, python)
        start.gateway(start.conductor(), config or {}, workers)
        yield start.fleet


class _Start:
    """Starts the processes of a fleet; they end with `stack`."""

    def __init__(self, stack: contextlib.ExitStack) -> None:
        self._stack = stack
        self._folder = Path(
            stack.enter_context(tempfile.TemporaryDirectory(prefix="tiffin-bench-"))
        )
        command = [sys.executable, "-m", f"{_PROCESSES}.clients"]
        clients = stack.enter_context(peer("the clients", command))
        self.fleet = Fleet(clients, free_ports(LOOPBACK, INSTANCES))

    def _process(self, name: str, port: int, *command: str) -> None:
        process = self._stack.enter_context(running(command))
        await_answer(process, lambda: accepts(port), name)
        self.fleet.pids[name] = [process.pid]

    def engines(self) -> None:
        """The stub engines."""
        ports = self.fleet.engines
        module = f"{_PROCESSES}.stub_engine"
        self._process("engine", ports[-1], sys.executable, "-m", module, *map(str, ports))

    def nginx(self) -> None:
        """nginx, if it is installed."""
        program = shutil.which("nginx") or shutil.which("nginx", path="/usr/sbin")
        if program is None:
            return
        port = self.fleet.nginx = free_port(LOOPBACK)
        servers = " ".join(f"server {LOOPBACK}:{one};" for one in self.fleet.engines)
        config = _NGINX.format(servers=servers, port=port)
        (self._folder / "nginx.conf").write_text(config, encoding="ascii")
        self._process("nginx", port, program, "-p", str(self._folder), "-c", "nginx.conf")

    def router(self, name: str, python: Path) -> None:
        """A router of others."""
        urls = [f"http://{LOOPBACK}:{one}" for one in self.fleet.engines]
        process, port = self._stack.enter_context(router(name, python, urls, MODEL))
        self.fleet.routers[name] = port
        self.fleet.pids[name] = [process.popen.pid]

    def conductor(self) -> int:
        """The conductor, with an instance for each engine; its port."""
        port = free_port(LOOPBACK)
        listen = ("--listen", f"{LOOPBACK}:{port}", *_QUIET)
        self._process("conductor", port, sys.executable, "-c", COMMANDS, "conductor", *listen)
        _register(port, self.fleet.engines)
        return port

    def gateway(self, conductor: int, config: Mapping[str, Any], workers: int) -> None:
        """The gateway."""
        port = self.fleet.gateway = free_port(LOOPBACK)
        options = ["--listen", f"{LOOPBACK}:{port}", *_QUIET]
        options += ["--conductor", f"http://{LOOPBACK}:{conductor}"]
        if config:
            path = self._folder / "gateway.json"
            path.write_text(json.dumps(config), encoding="ascii")
            options += ["--config", str(path)]
        if workers > 1:
            options += ["--workers", str(workers)]
        self._process("gateway", port, sys.executable, "-c", GATEWAY, "gateway", *options)
        if workers > 1:
            (supervisor,) = self.fleet.pids["gateway"]
            self.fleet.pids["gateway"] = _workers_of(supervisor, port, workers)


# The command `tiffin gateway`, also where no `tiffin` is installed.
GATEWAY = (
    "import typer; from tiffin.conductor.gateway.cli import commands;"
    " app = typer.Typer(); app.callback()(lambda: None); commands(app); app()"
)


def _register(conductor: int, engines: list[int]) -> None:
    from tiffin.conductor.client import ConductorClient
    from tiffin.conductor.records import InstanceSpec, Role

    with ConductorClient(f"http://{LOOPBACK}:{conductor}") as client:
        client.patch(_SETTINGS)
        for number, port in enumerate(engines):
            url = f"http://{LOOPBACK}:{port}"
            client.register(InstanceSpec(f"e{number}", MODEL, Role.MIXED, _PROFILE, url=url))


def _workers_of(process: int, port: int, count: int) -> list[int]:
    """The pids of a gateway's workers, once all of them serve. Raises NodeUnavailable."""
    path = Path(f"/proc/{process}/task/{process}/children")
    said = f"tiffin_gateway_workers {count}.0\n".encode()
    for _ in range(600):
        with urllib.request.urlopen(f"http://{LOOPBACK}:{port}/metrics") as answer:
            if said in answer.read():
                return [int(one) for one in path.read_text(encoding="ascii").split()]
        time.sleep(0.1)
    raise NodeUnavailable(f"the gateway's {count} workers did not start")


def _resident_bytes(pid: int) -> int:
    lines = Path(f"/proc/{pid}/status").read_text(encoding="ascii").splitlines()
    (resident,) = (line for line in lines if line.startswith("VmRSS:"))
    return int(resident.split()[1]) * 1024
