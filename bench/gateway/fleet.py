"""What is measured: a stub engine, a conductor, a gateway and nginx, each a process of its own."""

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

from tiffin.kvstore.cli.local.local_redis import free_port
from tiffin.kvstore.errors import NodeUnavailable

from ..conductor.processes.peer import PeerProcess, peer
from ..conductor.service import COMMANDS, accepts, lacking
from ..network.setting import LOOPBACK, await_answer, cpu_seconds, running
from .processes.clients import Outcome

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from .setting import Setting

MODEL = "stub"
TOKEN_IDS = list(range(1000, 1200))
TEXT = "Where does the lunch of Mumbai come from, and who carries it? " * 12
# More than one, as the conductor compares instances; all are the one stub.
INSTANCES = 8
# Instances register once and then send no heartbeats.
_SETTINGS = {"core": {"heartbeat_timeout_s": 3600.0}}
_PROCESSES = "tiffin.bench.gateway.processes"
# One process, as ours is. Connections to the stub are kept; a stream is passed on as it comes.
_NGINX = """
daemon off; master_process off; pid nginx.pid; error_log stderr error;
events {{ worker_connections 8192; }}
http {{
  access_log off; client_body_temp_path body; proxy_temp_path proxy;
  fastcgi_temp_path fastcgi; uwsgi_temp_path uwsgi; scgi_temp_path scgi;
  upstream engines {{ server 127.0.0.1:{engine}; keepalive 1024; keepalive_requests 1000000; }}
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
    """The running processes. `engine`, `gateway` and `nginx` are ports, nginx's 0 if there is
    none; `pids` has a process by name, `gateway` with those of its workers."""

    clients: PeerProcess
    engine: int
    gateway: int
    nginx: int
    pids: dict[str, list[int]] = field(default_factory=dict)

    @property
    def beside(self) -> str:
        """What the gateway is compared with: nginx, or without it the engine alone."""
        return "nginx" if self.nginx else "engine"

    @property
    def sides(self) -> dict[str, int]:
        """Ports by name, in the order of the turns."""
        found = {"engine": self.engine, "nginx": self.nginx, "gateway": self.gateway}
        return {name: port for name, port in found.items() if port}

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


def stream_body(tokens: int, gap_s: float) -> dict[str, Any]:
    """A request for a streamed answer, a token each `gap_s`."""
    asked = {"stream": True, "max_tokens": tokens, "gap_s": gap_s}
    return {"model": MODEL, "prompt": TOKEN_IDS, **asked}


@contextlib.contextmanager
def fleet(
    setting: Setting, config: Mapping[str, Any] | None = None, workers: int = 1
) -> Iterator[Fleet]:
    """Start everything. `config` is the gateway's. Raises Missing, NodeUnavailable."""
    lacking()
    engine, conductor, gateway, nginx = (free_port(LOOPBACK) for _ in range(4))
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="tiffin-bench-")))
        clients = stack.enter_context(
            peer("the clients", [sys.executable, "-m", f"{_PROCESSES}.clients"])
        )
        it = Fleet(clients, engine, gateway, 0)

        def start(name: str, port: int, *command: str) -> None:
            process = stack.enter_context(running(command))
            await_answer(process, lambda: accepts(port), name)
            it.pids[name] = [process.pid]

        start("engine", engine, sys.executable, "-m", f"{_PROCESSES}.stub_engine", str(engine))
        program = shutil.which("nginx") or shutil.which("nginx", path="/usr/sbin")
        if program is not None:
            it.nginx = nginx
            (folder / "nginx.conf").write_text(_NGINX.format(engine=engine, port=nginx))
            start("nginx", nginx, program, "-p", str(folder), "-c", "nginx.conf")
        quiet = ("--log-level", "error")
        listen = ("--listen", f"{LOOPBACK}:{conductor}")
        start("conductor", conductor, sys.executable, "-c", COMMANDS, "conductor", *listen, *quiet)
        _register(conductor, engine)
        command = [*(sys.executable, "-c", GATEWAY, "gateway"), *quiet]
        command += ["--listen", f"{LOOPBACK}:{gateway}"]
        command += ["--conductor", f"http://{LOOPBACK}:{conductor}"]
        if config:
            (folder / "gateway.json").write_text(json.dumps(config))
            command += ["--config", str(folder / "gateway.json")]
        if workers > 1:
            command += ["--workers", str(workers)]
        start("gateway", gateway, *command)
        if workers > 1:
            it.pids["gateway"] = _workers_of(it.pids["gateway"][0], gateway, workers)
        yield it


# The command `tiffin gateway`, also where no `tiffin` is installed.
GATEWAY = (
    "import typer; from tiffin.conductor.gateway.cli import commands;"
    " app = typer.Typer(); app.callback()(lambda: None); commands(app); app()"
)


def _register(conductor: int, engine: int) -> None:
    from tiffin.conductor.client import ConductorClient
    from tiffin.conductor.cost.latency_profiles import DEFAULT
    from tiffin.conductor.records import InstanceSpec, Role

    with ConductorClient(f"http://{LOOPBACK}:{conductor}") as client:
        client.patch(_SETTINGS)
        for number in range(INSTANCES):
            url = f"http://{LOOPBACK}:{engine}"
            client.register(InstanceSpec(f"e{number}", MODEL, Role.MIXED, DEFAULT, url=url))


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
