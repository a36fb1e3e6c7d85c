"""Real Redis servers for tests: single, with replicas and sentinels, or a cluster.

    with RedisServer(tmp_path) as server:
        directory = open_directory(server.url)

Each has a folder, a free port and no persistence, so that `restart` after `kill` finds it empty.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import time
from typing import TYPE_CHECKING, Any, Self

import redis
from directory.ports import free_port

from tiffin.kvstore.cli.local.local_redis import need_redis

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

START_S = 20.0
# A failover takes a few of these; less than 1 s is too short for a busy machine with two cores.
NODE_TIMEOUT_MS = 1000


def speaks_tls() -> bool:
    """Whether the server was built with TLS: then its error is about the missing certificate."""
    command = [need_redis(), "--port", "0", "--tls-port", str(free_port())]
    run = subprocess.run(command, capture_output=True, text=True, timeout=START_S)
    return "tls-cert-file" in run.stdout + run.stderr


def wait_until(holds: Callable[[], bool], what: str, patience_s: float = START_S) -> None:
    """Until `holds()` is true; errors of a server that is not up yet count as false."""
    give_up = time.monotonic() + patience_s
    while True:
        with contextlib.suppress(redis.RedisError, OSError):
            if holds():
                return
        assert time.monotonic() < give_up, f"never: {what}"
        time.sleep(0.02)


class RedisServer:
    """One process. Starts as a context manager, or with `start`."""

    def __init__(
        self,
        folder: Path,
        *arguments: str,
        port: int | None = None,
        password: str | None = None,
        sentinel_of: RedisServer | None = None,
    ) -> None:
        self.port = port or free_port()
        self.address = f"127.0.0.1:{self.port}"
        self.password = password
        self.folder = folder / f"redis-{self.port}"
        self.folder.mkdir(parents=True, exist_ok=True)
        self._process: subprocess.Popen[bytes] | None = None
        self._clients: list[redis.Redis] = []
        common = ["--port", str(self.port), "--bind", "127.0.0.1", "--dir", str(self.folder)]
        if sentinel_of is not None:
            config = self.folder / "sentinel.conf"
            config.write_text(
                f"sentinel monitor tiffin 127.0.0.1 {sentinel_of.port} 2\n"
                f"sentinel down-after-milliseconds tiffin {NODE_TIMEOUT_MS}\n"
                "sentinel failover-timeout tiffin 3000\n"
            )
            self._command = [need_redis(), str(config), "--sentinel", *common]
        else:
            quiet = ["--save", "", "--appendonly", "no", "--repl-diskless-sync-delay", "0"]
            secret = ["--requirepass", password] if password else []
            self._command = [need_redis(), *common, *quiet, *secret, *arguments]

    @property
    def url(self) -> str:
        """For `open_directory`."""
        return f"redis://{self.address}/0"

    def start(self) -> None:
        """Start, and wait until it answers."""
        assert self._process is None, "already running"
        with (self.folder / "log").open("ab") as log:
            self._process = subprocess.Popen(self._command, stdout=log, stderr=log)
        wait_until(self._answers, f"{self.address} answers; see {self.folder}/log")

    def _answers(self) -> bool:
        assert self._process is not None
        assert self._process.poll() is None, (self.folder / "log").read_text()
        # Only connects: a TLS-only server (--port 0) takes no plain text; its tests talk to it.
        with socket.create_connection(("127.0.0.1", self.port), timeout=1.0):
            return True

    def client(self, **options: Any) -> redis.Redis:
        """A plain client of the server, to inspect and forge entries; closed with the server."""
        options = {"password": self.password, "protocol": 2, **options}
        made: redis.Redis = redis.Redis(host="127.0.0.1", port=self.port, **options)
        self._clients.append(made)
        return made

    def stop(self) -> None:
        """End it, if it runs."""
        self._end(signal.SIGTERM)
        for client in self._clients:
            client.close()
        self._clients.clear()

    def kill(self) -> None:
        """kill -9."""
        self._end(signal.SIGKILL)

    def restart(self) -> None:
        """kill -9, and start again: empty, on the same port."""
        self.kill()
        self.start()

    def pause(self) -> None:
        """SIGSTOP: the kernel accepts connections, and the server never answers."""
        assert self._process is not None
        os.kill(self._process.pid, signal.SIGSTOP)

    def resume(self) -> None:
        """SIGCONT."""
        assert self._process is not None
        os.kill(self._process.pid, signal.SIGCONT)

    def _end(self, number: signal.Signals) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        os.kill(process.pid, signal.SIGCONT)  # a stopped process does not see SIGTERM
        process.send_signal(number)
        try:
            process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()


class _Servers:
    """Several servers that start and stop together."""

    def __init__(self, servers: Sequence[RedisServer]) -> None:
        self.servers = list(servers)

    def __enter__(self) -> Self:
        try:
            for server in self.servers:
                server.start()
            self.join()
        except BaseException:
            self.stop()
            raise
        return self

    def join(self) -> None:
        """Join the servers into one group; overridden."""

    def stop(self) -> None:
        for server in self.servers:
            server.stop()

    def __exit__(self, *_: object) -> None:
        self.stop()


class RedisCluster(_Servers):
    """`masters` shards; if `replicas`, server i + masters is the replica of server i."""

    def __init__(self, folder: Path, *, masters: int = 3, replicas: bool = False) -> None:
        self.masters = masters
        super().__init__(
            [
                RedisServer(
                    folder,
                    *("--cluster-enabled", "yes"),
                    *("--cluster-node-timeout", str(NODE_TIMEOUT_MS)),
                    *("--cluster-port", str(free_port())),
                    # Shards that still answer go on serving their slots.
                    *("--cluster-require-full-coverage", "no"),
                    *("--cluster-replica-validity-factor", "0"),
                )
                for _ in range(masters * (2 if replicas else 1))
            ]
        )

    @property
    def url(self) -> str:
        """All servers as seeds."""
        return f"redis+cluster://{','.join(server.address for server in self.servers)}"

    def join(self) -> None:
        clients = [server.client() for server in self.servers]
        first, count = clients[0], self.masters
        for server in self.servers[1:]:
            bus = _bus_port(server)
            first.execute_command("CLUSTER MEET", "127.0.0.1", str(server.port), str(bus))
        for i, client in enumerate(clients[:count]):
            begin, end = 16384 * i // count, 16384 * (i + 1) // count - 1
            client.execute_command("CLUSTER ADDSLOTSRANGE", str(begin), str(end))
        everybody = len(self.servers)
        for client in clients:
            wait_until(lambda c=client: _knows(c, everybody), "all servers have met")  # type: ignore[misc]
        for i, client in enumerate(clients[count:]):
            identity = clients[i].execute_command("CLUSTER MYID").decode()
            wait_until(lambda c=client, i=identity: _replicate(c, i), "its master is known")  # type: ignore[misc]
            wait_until(lambda c=client: _synced(c), "the replica is in step")  # type: ignore[misc]
        for client in clients:
            wait_until(lambda c=client: _formed(c), "the cluster is formed")  # type: ignore[misc]


def _bus_port(server: RedisServer) -> int:
    return int(server.client().config_get("cluster-port")["cluster-port"])


def _cluster_info(client: redis.Redis) -> dict[str, str]:
    text = client.execute_command("CLUSTER INFO")
    text = text.decode() if isinstance(text, bytes) else text
    if isinstance(text, dict):
        return text
    return dict(line.split(":", 1) for line in text.split())


def _knows(client: redis.Redis, everybody: int) -> bool:
    return int(_cluster_info(client)["cluster_known_nodes"]) == everybody


def _formed(client: redis.Redis) -> bool:
    info = _cluster_info(client)
    return info["cluster_state"] == "ok" and int(info["cluster_slots_assigned"]) == 16384


def _replicate(client: redis.Redis, master: str) -> bool:
    client.execute_command("CLUSTER REPLICATE", master)
    return True


def _synced(client: redis.Redis) -> bool:
    return client.info("replication").get("master_link_status") == "up"


class RedisSentinels(_Servers):
    """A master, a replica and three sentinels, which call the master `tiffin`."""

    def __init__(self, folder: Path) -> None:
        self.master = RedisServer(folder)
        replica_of = ("--replicaof", f"127.0.0.1 {self.master.port}")
        self.replica = RedisServer(folder, *replica_of)
        self.sentinels = [RedisServer(folder, sentinel_of=self.master) for _ in range(3)]
        super().__init__([self.master, self.replica, *self.sentinels])

    @property
    def url(self) -> str:
        return f"redis+sentinel://{','.join(s.address for s in self.sentinels)}/tiffin"

    def join(self) -> None:
        replica = self.replica.client()
        wait_until(lambda: _synced(replica), "the replica is in step")
        for sentinel in self.sentinels:
            client = sentinel.client()
            wait_until(lambda c=client: _watches(c), "the sentinels know each other")  # type: ignore[misc]


def _watches(sentinel: redis.Redis) -> bool:
    words = sentinel.execute_command("SENTINEL MASTER", "tiffin")
    if isinstance(words, list):
        words = dict(zip(words[::2], words[1::2], strict=True))
    state = {_text(k): _text(v) for k, v in words.items()}
    return state["num-other-sentinels"] == "2" and state["num-slaves"] == "1"


def _text(word: object) -> str:
    return word.decode() if isinstance(word, bytes) else str(word)
