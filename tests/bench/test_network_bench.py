"""The network's benchmark runs and gives the rows that it promises. No timing is asserted."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import typer
from rowsupport import check
from typer.testing import CliRunner

from tiffin.bench.network import cli, mooncake, setting
from tiffin.bench.network.plain import PlainSockets
from tiffin.bench.network.setting import Metered, Setting, Sizes, cpu_seconds
from tiffin.bench.network.suite import SUITE
from tiffin.bench.store.rows import Row, Target, single
from tiffin.bench.store.setting import KIB, MIB
from tiffin.kvstore.errors import NodeUnavailable
from tiffin.messenger.wire.frame_tags import can_tag_bytes

TINY = Sizes(
    rounds=2,
    block_bytes=(1 * MIB, 2 * MIB),
    transfer_bytes=4 * MIB,
    calls=3,
    scattered_block_bytes=1 * MIB,
    scattered_blocks=4,
    prefix_blocks=16,
    layered_block_bytes=2 * MIB,
    readers=(1, 3),
    reader_bytes=2 * MIB,
    read_bytes=8 * MIB,
    reader_rounds=2,
)
NAMES = {
    "remote-get": [
        f"remote-{what}-{size}{verified}"
        for size in ("1MiB", "2MiB")
        for verified in ("", "-verified")
        for what in ("get", "cpu")
    ],
    "remote-small": ["remote-64KiB", "remote-64KiB-verified"],
    "tags": [
        f"tags-{what}-{size}"
        for size in ("64KiB", "1MiB")
        for what in ("frames", *(["bytes"] if can_tag_bytes() else []))
    ],
    "scattered": ["scattered-2KiB"],
    "first-layer": ["first-layer", "first-layer-verified"],
    "readers": ["readers-1", "readers-3"],
}

ROW = Row(
    "scattered", "what", "GB/s", single(3.0), "limit", single(4.0), (Target("ratio", ">=", 0.6),)
)


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_measurements_give_rows_with_limits(name: str) -> None:
    found = SUITE.run(Setting(TINY), [name], lambda _: None)
    assert not found.crashed
    assert not found.missing
    assert [row.name for row in found.rows] == NAMES[name]
    check(found.rows)


@pytest.mark.slow
def test_a_prefix_is_located_in_redis_in_one_round_trip() -> None:
    found = SUITE.run(Setting(TINY), ["locate"], lambda _: None)
    assert not found.crashed
    check(found.rows)
    leased, trips = found.rows
    assert leased.name == "locate-and-lease"
    # The node's heartbeats are counted too, so it is not exactly one.
    assert trips.value.p50 == pytest.approx(1.0, abs=0.5)


# -- missing dependencies, and crashes -------------------------------------------------------------


def test_what_is_not_installed_is_left_out_and_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TIFFIN_REDIS_SERVER", "no-such-server")
    found = SUITE.run(Setting(TINY), ["locate", "mooncake"], lambda _: None)
    assert not found.crashed
    assert not found.rows
    assert "redis-server" in found.missing["locate"]
    assert "--mooncake" in found.missing["mooncake"]

    found = SUITE.run(Setting(TINY, tmp_path / "bin" / "python"), ["mooncake"], lambda _: None)
    assert "docs/benchmarks.md" in found.missing["mooncake"]


def test_a_node_that_ends_at_once_is_an_error_and_not_a_minute() -> None:
    with (
        pytest.raises(NodeUnavailable, match="did not start"),
        setting.remote_node(1 * MIB, ["--no-such-option"]),
    ):
        pass


# -- the program -----------------------------------------------------------------------------------


def test_the_program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Sizes, "quick", classmethod(lambda cls: TINY))
    monkeypatch.setitem(SUITE.measurements, "scattered", lambda _: [ROW])
    app, bench = typer.Typer(), typer.Typer()
    app.add_typer(bench, name="bench")
    bench.callback()(lambda: None)
    cli.commands(app)
    arguments = ["bench", "network", "--quick", "--json", "--out", str(tmp_path)]
    done = CliRunner().invoke(app, [*arguments, "--row", "scattered", "--row", "mooncake"])
    assert done.exit_code == 0, done.output
    plain: dict[str, Any] = json.loads((tmp_path / "bench-network.json").read_text())
    assert json.loads(done.stdout) == plain
    assert [row["name"] for row in plain["rows"]] == ["scattered"]
    assert plain["crashed"] == {}
    assert list(plain["missing"]) == ["mooncake"]
    assert plain["sizes"]["rounds"] == TINY.rounds
    assert plain["environment"]["cores"] >= 1
    assert "left out mooncake" in done.stderr

    done = CliRunner().invoke(app, ["bench", "network", "--row", "nothing"])
    assert done.exit_code == 2


# -- limits and clocks -----------------------------------------------------------------------------


def test_the_plain_sender_sends_each_byte_of_its_memory() -> None:
    nbytes = 3 * MIB + 5
    with PlainSockets(nbytes) as plain:
        whole = np.zeros(nbytes, np.uint8)
        plain.fetch([whole])
        parts = [np.zeros(length, np.uint8) for length in (1, 64 * KIB, 1 * MIB)]
        plain.fetch(parts, at=7)
    assert whole.any()
    joined = np.concatenate(parts)
    assert np.array_equal(joined, whole[7 : 7 + len(joined)])


def test_a_plain_sender_that_died_is_noticed() -> None:
    with PlainSockets(1 * MIB) as plain:
        plain.fetch([np.zeros(64 * KIB, np.uint8)])
        plain._sender.kill()
        plain._sender.wait()
        with pytest.raises(ConnectionError):
            plain.fetch([np.zeros(64 * KIB, np.uint8)])


def test_cpu_time_is_that_of_the_processes_named() -> None:
    before_s = cpu_seconds([os.getpid()])
    while time.process_time() - before_s < 0.05:
        pass
    assert 0.05 <= cpu_seconds([os.getpid()]) - before_s <= 5.0
    # A process named twice is counted twice.
    assert cpu_seconds([os.getpid()] * 2) > cpu_seconds([os.getpid()])

    with pytest.raises(OSError, match="argument"):
        cpu_seconds([2**22 + 1])


def test_a_meter_notes_each_run() -> None:
    slept = Metered(lambda: time.sleep(0.001), [os.getpid()])
    for _ in range(3):
        slept()
    assert len(slept.seconds) == 3
    assert all(seconds > 0 for seconds in slept.seconds)


# -- Mooncake --------------------------------------------------------------------------------------

# A double of Mooncake: stores nothing, but answers like its package.
_STORE = """
class MooncakeDistributedStore:
    def setup(self, *arguments):
        self.sizes = {}
        return 0
    def register_buffer(self, address, nbytes):
        return 0
    def put_from(self, key, address, nbytes):
        self.sizes[key] = nbytes
        return 0
    def get_into(self, key, address, nbytes):
        return self.sizes[key]
    def unregister_buffer(self, address):
        return 0
    def close(self):
        return 0
"""
_MASTER = """#!/bin/sh
exec {python} -c "
import socket, sys
port = int([a for a in sys.argv if a.startswith('--rpc_port=')][0].split('=')[1])
server = socket.create_server(('127.0.0.1', port))
while True:
    server.accept()[0].close()
" "$@"
"""


@pytest.fixture
def python(tmp_path: Path) -> Path:
    """A Python whose package `mooncake` is the double, with a `mooncake_master` beside it."""
    package = tmp_path / "packages" / "mooncake"
    package.mkdir(parents=True)
    (package / "store.py").write_text(_STORE)
    program = tmp_path / "bin" / "python"
    program.parent.mkdir()
    program.write_text(f'#!/bin/sh\nPYTHONPATH={package.parent} exec {sys.executable} "$@"\n')
    master = program.with_name("mooncake_master")
    master.write_text(_MASTER.format(python=sys.executable))
    program.chmod(0o755)
    master.chmod(0o755)
    return program


@pytest.mark.slow
def test_mooncake_takes_turns_with_us(python: Path) -> None:
    sizes = replace(TINY, block_bytes=(1 * MIB,))
    found = SUITE.run(Setting(sizes, python), ["mooncake"], lambda _: None)
    assert not found.crashed
    assert not found.missing
    names = [row.name for row in found.rows]
    assert names == ["mooncake-get-1MiB", "mooncake-cpu-1MiB", "mooncake-64KiB"]
    check(found.rows)


@pytest.mark.slow
def test_mooncake_is_stopped_whenever_we_are_measured(
    python: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[set[str]] = []
    theirs: list[mooncake._Mooncake] = []
    ours, stop = mooncake.get, mooncake._Mooncake.stop

    def stop_and_remember(self: mooncake._Mooncake) -> None:
        theirs.append(self)
        stop(self)

    def look_and_get(*arguments: Any) -> None:
        seen.append({state_of(pid) for pid in theirs[-1].pids} if theirs else {"never stopped"})
        ours(*arguments)

    monkeypatch.setattr(mooncake._Mooncake, "stop", stop_and_remember)
    monkeypatch.setattr(mooncake, "get", look_and_get)
    found = SUITE.run(
        Setting(replace(TINY, block_bytes=(1 * MIB,)), python), ["mooncake"], lambda _: None
    )
    assert not found.crashed
    assert len(seen) > mooncake._WARM_CALLS
    assert {state for states in seen for state in states} == {"T"}
    # A stopped process must be continued, or it would never notice that it has to end.
    assert all(not Path(f"/proc/{pid}").exists() for one in theirs for pid in one.pids)


def state_of(pid: int) -> str:
    """The state letter of ps(1), for example `T` for a stopped process."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def test_a_process_of_mooncake_that_died_is_noticed_when_it_is_to_be_stopped(
    python: Path,
) -> None:
    with mooncake._mooncake(Setting(TINY, python), 64 * KIB, 2) as theirs:
        theirs.stop()
        theirs.resume()
        assert len(theirs.get(2, times=3)) == 3
        os.kill(theirs.pids[-1], signal.SIGKILL)
        os.waitid(os.P_PID, theirs.pids[-1], os.WEXITED | os.WNOWAIT)
        with pytest.raises(NodeUnavailable, match="has ended"):
            theirs.stop()
    assert all(not Path(f"/proc/{pid}").exists() for pid in theirs.pids)


def test_a_mooncake_that_does_not_start_says_why(python: Path, tmp_path: Path) -> None:
    store = tmp_path / "packages" / "mooncake" / "store.py"
    store.write_text(_STORE.replace("return 0", "return -1", 1))
    found = SUITE.run(Setting(TINY, python), ["mooncake"], lambda _: None)
    assert "Mooncake's holder has ended" in found.crashed["mooncake"]
    assert found.crashed["mooncake"].rstrip().endswith("setup failed with -1")


@pytest.mark.slow
def test_bytes_that_mooncake_does_not_have_are_no_measurement(python: Path, tmp_path: Path) -> None:
    store = tmp_path / "packages" / "mooncake" / "store.py"
    store.write_text(_STORE.replace("return self.sizes[key]", "return -704"))
    found = SUITE.run(Setting(TINY, python), ["mooncake"], lambda _: None)
    assert "Mooncake's reader has ended" in found.crashed["mooncake"]
    assert found.crashed["mooncake"].rstrip().endswith("get_into bench-1048576-0 failed with -704")
