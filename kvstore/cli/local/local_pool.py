"""A pool on one machine: nodes, and if wanted a Redis, as children of one process.

    with LocalPool(LocalPoolOptions(nodes=2, redis=True)) as pool:
        Client.open(pool.url)

Everything they have but their NVMe tiers lies in one private folder, which goes with the pool.
Nothing is restarted unless that was asked for, and nothing outlives this process
(`child_processes.py`).
"""

from __future__ import annotations

import math
import shlex
import shutil
import signal
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from socket import gethostname
from typing import TYPE_CHECKING, Literal, NamedTuple, Self
from urllib.parse import urlencode

from ...client.client import Client
from ...credentials import read_token
from ...directory import open_directory
from ...directory.url import check_pool
from ...errors import InvalidInput, NodeUnavailable, TiffinError
from ...sizes import parse_bytes
from .child_processes import ChildProcess
from .local_redis import free_port, need_redis, redis_command
from .token_file import make_secret_file

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from types import TracebackType

    from ...directory.base import NodeRecord

# Children of one supervisor. A machine has one node; several are for trying things out.
NODES_MAX = 64

# Starting touches all of a node's DRAM: some seconds per 10 GiB.
START_S = 600.0
# What a stop may take beyond writing back to NVMe.
STOP_S = 15.0
_LOOK_S = 0.05
REDIS = "redis"

# Ports are found by trying; another process may take one in between.
_PORT_ATTEMPTS = 5

# The first restart comes after this, each further one after twice as long, up to the maximum; who
# ran as long as that begins anew.
RESTART_FIRST_S = 1.0
RESTART_MAX_S = 60.0


@dataclass(frozen=True, slots=True)
class LocalPoolOptions:
    """What to start. Raises InvalidInput.

    `dram` is each node's. `nvme` is a directory, in which each node gets a folder with its name,
    and each node's bytes. `directory`: a URL for `open_directory`; with `redis`, one of our own.
    Neither is possible for a single node only. `more`: further options of `tiffin node`.
    """

    nodes: int = 2
    dram: str = "1GiB"
    nvme: tuple[Path, int] | None = None
    listen_host: str = "127.0.0.1"
    pool: str = "default"
    redis: bool = False
    directory: str = ""
    token_file: Path | None = None
    restart: bool = False
    flush_s: float = 30.0
    more: str = ""

    def __post_init__(self) -> None:
        if not 1 <= self.nodes <= NODES_MAX:
            raise InvalidInput(f"--nodes {self.nodes}: 1 to {NODES_MAX} are possible")
        if self.redis and self.directory:
            raise InvalidInput("--redis and --directory: choose one")
        if self.nodes > 1 and not (self.redis or self.directory):
            raise InvalidInput("several nodes need a directory: give --redis or --directory URL")
        if self.directory and not self.directory.startswith(("redis", "valkey")):
            raise InvalidInput(
                f"--directory {self.directory}: the nodes are processes of their own, so it has to "
                "be a Redis: redis://HOST:6379"
            )
        parse_bytes(self.dram)
        check_pool(self.pool)
        if self.listen_host in ("0.0.0.0", "::", "*", ""):
            raise InvalidInput(
                f"--listen-host {self.listen_host} is every address of this machine; give the one "
                "under which others reach it"
            )

    @property
    def networked(self) -> bool:
        """Whether the nodes listen on the network."""
        return self.redis or bool(self.directory)


class Happening(NamedTuple):
    """Something that a person wants to know of a child. `lines`: the end of its log."""

    name: str
    kind: Literal["up", "ended", "again"]
    words: str
    lines: Sequence[str] = ()


@dataclass(slots=True)
class Backoff:
    """When to start again what has ended. Pure."""

    delay_s: float = RESTART_FIRST_S

    def ended(self, ran_s: float, now: float) -> float:
        """When to start it again."""
        if ran_s >= RESTART_MAX_S:
            self.delay_s = RESTART_FIRST_S
        at = now + self.delay_s
        self.delay_s = min(RESTART_MAX_S, 2 * self.delay_s)
        return at


@dataclass(slots=True)
class _Member:
    """One child, its incarnations one after the other."""

    name: str
    command: Sequence[str]
    log: Path
    at_death: signal.Signals
    is_up: Callable[[], bool]
    child: ChildProcess | None = None
    up: bool = False
    start_at: float = math.inf
    backoff: Backoff = field(default_factory=Backoff)

    def start(self) -> None:
        self.child = ChildProcess(self.name, self.command, self.log, at_death=self.at_death)
        self.up, self.start_at = False, math.inf

    @property
    def alive(self) -> bool:
        return self.child is not None and self.child.alive


def split_options(more: str) -> list[str]:
    """The further options of `tiffin node` as words. Raises InvalidInput."""
    try:
        return shlex.split(more)
    except ValueError as error:  # a quotation mark without its pair
        raise InvalidInput(f"options of nodes {more!r}: {error}") from error


class LocalPool:
    """The children and their folder. Use it from one thread, and start it from the main one."""

    def __init__(self, options: LocalPoolOptions) -> None:
        self.options = options
        self.folder = Path(tempfile.mkdtemp(prefix="tiffin-up-"))
        self.directory = options.directory
        self.token_file = options.token_file
        self._members: list[_Member] = []
        self._names = [f"{self._prefix}-{number}" for number in range(1, options.nodes + 1)]

    @property
    def _prefix(self) -> str:
        # In a directory that others use too, names should tell machines apart.
        return gethostname() if self.options.directory else "node"

    # -- what was started ------------------------------------------------------------------------

    @property
    def names(self) -> list[str]:
        """The nodes' names."""
        return list(self._names)

    def socket(self, index: int = 0) -> Path:
        """A node's unix socket."""
        return self.folder / f"{self._names[index]}.sock"

    @property
    def url(self) -> str:
        """What clients open. Each finds a node of this machine as its home."""
        return self.url_at_home(None)

    def url_at_home(self, home: Path | None) -> str:
        """The same, with the node at this socket as the home of whoever opens it."""
        if not self.directory:
            return f"unix:{home or self.socket()}"
        parameters = {} if self.options.pool == "default" else {"pool": self.options.pool}
        parameters["token_file"] = str(self.token_file)
        if home is not None:
            parameters["home"] = str(home)
        mark = "&" if "?" in self.directory else "?"
        return f"{self.directory}{mark}{urlencode(parameters, safe='/')}"

    def records(self) -> dict[str, NodeRecord]:
        """What the directory knows of our nodes, by name; {} without a directory.

        Raises DirectoryUnavailable.
        """
        if not self.directory:
            return {}
        token = read_token(self.token_file) if self.token_file is not None else b""
        directory = open_directory(self.directory, pool=self.options.pool, token=token)
        try:
            # Of two of one name the newer is the one that runs.
            found = sorted(directory.nodes().values(), key=lambda record: record.started_at)
        finally:
            directory.close()
        sockets = {str(self.socket(index).resolve()) for index in range(len(self._names))}
        return {record.name: record for record in found if record.socket in sockets}

    def pids(self) -> dict[str, int]:
        """The process of each child that runs."""
        return {
            member.name: member.child.process.pid
            for member in self._members
            if member.child is not None and member.child.alive
        }

    # -- starting --------------------------------------------------------------------------------

    def start(
        self, tell: Callable[[Happening], None] = lambda _: None, timeout_s: float = START_S
    ) -> Self:
        """Start everything and wait until it is up. `tell` hears of each.

        Raises NodeUnavailable if a child ends first or time is up, InvalidInput, and
        DirectoryUnavailable if the directory that was named does not answer. Then nothing is left.
        """
        try:
            self._start(tell, timeout_s)
        except BaseException:
            self.stop()
            raise
        return self

    def _start(self, tell: Callable[[Happening], None], timeout_s: float) -> None:
        if self.token_file is not None:
            read_token(self.token_file)
        elif self.options.networked:
            self.token_file = make_secret_file(self.folder / "token")
        if self.options.redis:
            self._start_redis(tell, timeout_s)
        elif self.directory:
            self.records()
        for index, name in enumerate(self._names):
            self._add(name, self._node_command(index), signal.SIGTERM, self._node_is_up(index))
        self._wait_for_all(tell, timeout_s)

    def _start_redis(self, tell: Callable[[Happening], None], timeout_s: float) -> None:
        binary = need_redis()
        home = self.folder / "redis"
        home.mkdir(mode=0o700)
        secret = make_secret_file(self.folder / "redis-password", "the password")
        host = self.options.listen_host
        shown = f"[{host}]" if ":" in host else host
        for attempt in range(1, _PORT_ATTEMPTS + 1):
            port = free_port(host)
            command = redis_command(binary, home, secret, host, port)
            self.directory = f"redis://{shown}:{port}?password_file={secret}"
            self._add(REDIS, command, signal.SIGKILL, self._redis_is_up)
            try:
                return self._wait_for_all(tell, timeout_s)
            except NodeUnavailable:
                if attempt == _PORT_ATTEMPTS or not self._port_was_taken():
                    raise
                self._members.clear()
        return None

    def _port_was_taken(self) -> bool:
        child = self._members[-1].child
        return child is not None and any("in use" in line for line in child.last_lines())

    def _add(
        self,
        name: str,
        command: Sequence[str],
        at_death: signal.Signals,
        is_up: Callable[[], bool],
    ) -> None:
        member = _Member(name, command, self.folder / f"{name}.log", at_death, is_up)
        self._members.append(member)
        member.start()

    def _node_command(self, index: int) -> list[str]:
        options, name = self.options, self._names[index]
        command = [sys.executable, "-m", "tiffin.kvstore", "node", "--name", name]
        command += ["--socket", str(self.socket(index)), "--dram", options.dram]
        if options.nvme is not None:
            folder, nbytes = options.nvme
            command += ["--nvme", f"{folder / name}:{nbytes}", "--flush-s", str(options.flush_s)]
        if self.directory:
            host = options.listen_host
            command += ["--listen", f"[{host}]:0" if ":" in host else f"{host}:0"]
            command += ["--directory", self.directory, "--pool", options.pool]
            command += ["--token-file", str(self.token_file)]
        return command + split_options(options.more)

    def _redis_is_up(self) -> bool:
        try:
            directory = open_directory(self.directory, pool=self.options.pool)
            try:
                directory.nodes()
            finally:
                directory.close()
        except TiffinError:
            return False
        return True

    def _node_is_up(self, index: int) -> Callable[[], bool]:
        def is_up() -> bool:
            try:
                with Client.open(f"unix:{self.socket(index)}", name="tiffin up") as client:
                    numbers = client.statistics()
            except TiffinError:
                return False
            return not self.directory or bool(numbers["directory"]["number"])

        return is_up

    def _wait_for_all(self, tell: Callable[[Happening], None], timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        while not all(member.up for member in self._members):
            for happening in self.look(restart=False):
                tell(happening)
                if happening.kind == "ended":
                    why = f": {happening.lines[-1].strip()}" if happening.lines else ""
                    raise NodeUnavailable(
                        f"{happening.name} {happening.words} while it was started{why}"
                    )
            if time.monotonic() > deadline:
                late = [member.name for member in self._members if not member.up]
                raise NodeUnavailable(f"{', '.join(late)} did not start within {timeout_s:.0f} s")
            time.sleep(_LOOK_S)

    # -- supervising -----------------------------------------------------------------------------

    def look(self, *, restart: bool | None = None) -> list[Happening]:
        """What has happened since the last look; starts again what is due. Call it often."""
        restart = self.options.restart if restart is None else restart
        now, found = time.monotonic(), []
        for member in self._members:
            child = member.child
            if child is None:
                if now >= member.start_at:
                    member.start()
                    found.append(Happening(member.name, "again", "is started again"))
                continue
            child.trim_log()
            if not child.alive:
                words = child.end_in_words()
                if restart:
                    member.start_at = member.backoff.ended(now - child.started_at, now)
                    words += f"; it is started again in {member.start_at - now:.0f} s"
                member.child, member.up = None, False
                found.append(Happening(member.name, "ended", words, child.last_lines()))
            elif not member.up and member.is_up():
                member.up = True
                found.append(Happening(member.name, "up", "is up"))
        return found

    @property
    def running(self) -> int:
        """Nodes that run or are to be started again."""
        return sum(
            member.alive or member.start_at < math.inf
            for member in self._members
            if member.name in self._names
        )

    # -- stopping --------------------------------------------------------------------------------

    def stop(self) -> list[str]:
        """Stop everything: nodes first, which write back to NVMe and leave the directory. Returns
        the names of those that had to be killed. Safe to repeat."""
        killed: list[str] = []
        try:
            for group in (self._names, [REDIS]):
                children = [m.child for m in self._members if m.child and m.name in group]
                for child in children:
                    child.ask_to_stop()
                deadline = time.monotonic() + STOP_S + self.options.flush_s
                killed += [
                    child.name
                    for child in children
                    if not child.collect(deadline - time.monotonic())
                ]
        finally:
            for member in self._members:
                if member.child is not None:
                    member.child.kill()
            self._members.clear()
            shutil.rmtree(self.folder, ignore_errors=True)
        return killed

    def __enter__(self) -> Self:
        return self.start() if not self._members else self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()
