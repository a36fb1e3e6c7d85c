"""The `tiffin` program as its users see it: help, tables, JSON, and errors in one clear line."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import tempfile
from typing import TYPE_CHECKING

import pytest
from kvsupport import (
    EXTENT,
    SCHEMA,
    TIFFIN,
    Daemon,
    PoolOptions,
    assert_conserved,
    command_environment,
    fresh_prefix,
    payloads_of,
)

from tiffin.kvstore import Client
from tiffin.kvstore.tiers.slab import SLAB_NAME

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

Run = "Callable[..., subprocess.CompletedProcess[str]]"


@pytest.fixture
def run(commands_folder: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Run the program with arguments, in a terminal of so many columns."""

    def tiffin(*arguments: object, columns: int = 300) -> subprocess.CompletedProcess[str]:
        shape = {"COLUMNS": str(columns), "TERM": "dumb"}
        return subprocess.run(
            [*TIFFIN, *map(str, arguments)],
            env={**command_environment(commands_folder), **shape},
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )

    return tiffin


def words(text: str) -> str:
    """Without the frames and line breaks that a narrow terminal makes."""
    return " ".join(text.replace("│", " ").split())


class TestHelp:
    @pytest.mark.slow
    def test_the_program_says_what_it_can_do(self, run: Run) -> None:
        shown = run("--help")
        assert shown.returncode == 0
        for command in ("node", "status", "inspect"):
            assert command in shown.stdout

    @pytest.mark.slow
    @pytest.mark.parametrize(
        ("command", "example"),
        [
            ("node", "tiffin node --dram 64GiB --nvme /var/lib/tiffin:500GiB"),
            ("status", "tiffin status --json"),
            ("inspect", "tiffin inspect /var/lib/tiffin"),
        ],
    )
    def test_every_command_shows_examples(self, run: Run, command: str, example: str) -> None:
        shown = run(command, "--help")
        assert shown.returncode == 0
        assert "Examples" in shown.stdout
        assert example in words(shown.stdout)

    @pytest.mark.slow
    def test_the_version(self, run: Run) -> None:
        assert run("--version").stdout.startswith("tiffin 0.")


class TestStatus:
    @pytest.fixture
    def daemon(self, shared_daemon: Callable[[PoolOptions], Daemon]) -> Daemon:
        return shared_daemon(PoolOptions())

    def test_tables_for_people(self, run: Run, daemon: Daemon) -> None:
        prefix = fresh_prefix(2)
        with Client.open(daemon.url, name="engine-7") as client:
            client.put(prefix, payloads_of(prefix))
            with client.get(prefix):
                shown = run("status", "--socket", daemon.socket)
            client.remove(prefix)
        assert shown.returncode == 0
        assert "dram" in shown.stdout
        assert "128 KiB" in shown.stdout
        assert "engine-7" in shown.stdout
        assert "hit rate" in shown.stdout

    @pytest.mark.slow
    @pytest.mark.parametrize("name", ["[/]", "[bold]x", "a[0]"])
    def test_a_clients_name_is_shown_as_it_is(self, run: Run, daemon: Daemon, name: str) -> None:
        with Client.open(daemon.url, name=name):
            shown = run("status", "--socket", daemon.socket)
        assert shown.returncode == 0, shown.stderr
        assert name in shown.stdout

    @pytest.mark.slow
    def test_json_for_programs(self, run: Run, daemon: Daemon) -> None:
        shown = run("status", "--socket", daemon.socket, "--json")
        numbers = json.loads(shown.stdout)
        assert shown.returncode == 0
        assert_conserved(numbers)
        assert numbers["tiers"]["dram"]["capacity_bytes"] == 16 * EXTENT


class TestNode:
    @pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
    def test_it_stops_cleanly_and_keeps_what_it_had(
        self, own_daemon: Callable[..., Daemon], number: int
    ) -> None:
        daemon = own_daemon(nvme=64 * EXTENT)
        prefix = fresh_prefix(4)
        with Client.open(daemon.url) as client:
            client.put(prefix, payloads_of(prefix))
        daemon.signal(number)
        assert daemon.process.wait(20) == 0
        assert not daemon.socket.exists()
        assert "Traceback" not in daemon.log()
        daemon.start()
        with Client.open(daemon.url) as client:
            assert client.match(prefix).blocks == 4

    @pytest.mark.slow
    def test_it_stops_cleanly_with_clients_connected(
        self, own_daemon: Callable[..., Daemon]
    ) -> None:
        daemon = own_daemon()
        prefix = fresh_prefix(2)
        with Client.open(daemon.url) as client:
            client.put(prefix, payloads_of(prefix))
            blocks, slots = client.get(prefix), client.reserve(fresh_prefix(1))
            daemon.signal(signal.SIGTERM)
            assert daemon.process.wait(20) == 0
            assert "Traceback" not in daemon.log()
            blocks.release()
            slots.abort()


class TestInspect:
    @pytest.fixture
    def slab(self, tmp_path: Path) -> Path:
        """The directory of an NVMe tier with four blocks."""
        prefix = fresh_prefix(4)
        with Client.open(f"embedded:?dram=1MiB&nvme={tmp_path}:1MiB") as client:
            client.put(prefix, payloads_of(prefix))
        return tmp_path

    def test_a_healthy_slab(self, run: Run, slab: Path) -> None:
        shown = run("inspect", slab)
        assert shown.returncode == 0, shown.stderr
        assert "4 blocks, 0 damaged" in words(shown.stdout)
        report = json.loads(run("inspect", slab / SLAB_NAME, "--json").stdout)
        assert [block["damage"] for block in report["blocks"]] == [""] * 4
        assert {block["token_count"] for block in report["blocks"]} == {SCHEMA.block_tokens}

    @pytest.mark.slow
    def test_a_damaged_block_is_named_and_the_exit_code_is_1(self, run: Run, slab: Path) -> None:
        report = json.loads(run("inspect", slab, "--json").stdout)
        with open(slab / SLAB_NAME, "r+b") as file:
            data_offset = file.seek(0, 2) - report["capacity_bytes"]
            file.seek(data_offset + report["blocks"][2]["offset"] + SCHEMA.header_bytes + 5)
            byte = file.read(1)[0]
            file.seek(-1, 1)
            file.write(bytes([byte ^ 1]))
        shown = run("inspect", slab, "--json")
        damage = [block["damage"] for block in json.loads(shown.stdout)["blocks"]]
        assert shown.returncode == 1
        assert [bool(text) for text in damage] == [False, False, True, False]
        assert "1 damaged" in words(run("inspect", slab).stdout)
        assert run("inspect", slab, "--no-verify").returncode == 0  # headers are fine


class TestErrors:
    """Exit code 2, one line on stderr that says what to do, no traceback."""

    @pytest.mark.slow
    def test_an_error_stays_one_line_in_a_narrow_terminal(self, run: Run, tmp_path: Path) -> None:
        """So that `Start one with: ...` can be copied, and logs have a line per error."""
        done = run("status", "--socket", tmp_path / "none.sock", columns=40)
        self._check(done, f"Start one with: tiffin node --socket {tmp_path}/none.sock")

    @pytest.mark.slow
    @pytest.mark.parametrize("name", ["[bold]", "[/]", "[red", "a[1]"])
    def test_brackets_in_names_are_only_brackets(self, run: Run, tmp_path: Path, name: str) -> None:
        self._check(run("inspect", tmp_path / name), f"no slab at {tmp_path}/{name}")

    def _check(self, done: subprocess.CompletedProcess[str], *parts: str) -> None:
        assert done.returncode == 2, done
        assert "Traceback" not in done.stderr
        assert done.stdout == ""
        for part in parts:
            assert part in words(done.stderr), done.stderr
        assert len(done.stderr.strip().splitlines()) == 1, done.stderr

    @pytest.mark.slow
    def test_status_without_a_node(self, run: Run, tmp_path: Path) -> None:
        path = tmp_path / "none.sock"
        done = run("status", "--socket", path)
        self._check(done, f"Start one with: tiffin node --socket {path}")

    @pytest.mark.slow
    def test_status_of_something_else(self, run: Run) -> None:
        with tempfile.TemporaryDirectory() as folder, socket.socket(socket.AF_UNIX) as listener:
            listener.bind(f"{folder}/x")
            self._check(run("status", "--socket", f"{folder}/x"), "no node answers")

    @pytest.mark.slow
    @pytest.mark.parametrize(
        ("arguments", "part"),
        [
            (["--dram", "nonsense"], "'nonsense' is not a size"),
            (["--dram", "0"], "at least 4 KiB"),
            (["--dram", "500TiB"], "no DRAM tier"),
            (["--nvme", "/path"], "write a directory and a size"),
            (["--nvme", "/dev/null/x:1MiB"], "no NVMe tier"),
            (["--policy", "random"], "lru, lfu"),
            (["--high-watermark", "1.5"], "watermarks"),
            (["--write-lease-s", "0"], "write_lease_s must be positive"),
        ],
        ids=str,
    )
    def test_a_node_that_cannot_start(
        self, run: Run, tmp_path: Path, arguments: list[str], part: str
    ) -> None:
        done = run("node", "--socket", tmp_path / "s", "--dram", "1MiB", *arguments)
        self._check(done, part)

    @pytest.mark.slow
    def test_a_node_on_a_busy_socket(
        self, run: Run, shared_daemon: Callable[[PoolOptions], Daemon]
    ) -> None:
        daemon = shared_daemon(PoolOptions())
        done = run("node", "--socket", daemon.socket, "--dram", "1MiB")
        self._check(done, "another node listens", "choose another --socket")
        Client.open(daemon.url).close()

    @pytest.mark.slow
    def test_a_node_on_a_directory_of_another(
        self, run: Run, own_daemon: Callable[..., Daemon], tmp_path: Path
    ) -> None:
        daemon = own_daemon(nvme=64 * EXTENT)
        size = f"{daemon.nvme}:{64 * EXTENT}"
        done = run("node", "--socket", tmp_path / "s", "--dram", "1MiB", "--nvme", size)
        self._check(done, "in use by another node")

    @pytest.mark.slow
    @pytest.mark.parametrize(("content", "part"), [(None, "no slab at"), (b"x" * 9000, "magic")])
    def test_inspect_of_what_is_no_slab(
        self, run: Run, tmp_path: Path, content: bytes | None, part: str
    ) -> None:
        if content is not None:
            (tmp_path / SLAB_NAME).write_bytes(content)
        self._check(run("inspect", tmp_path), part)

    @pytest.mark.slow
    @pytest.mark.parametrize(
        "arguments", [["nod"], ["node", "--speed", "9"], ["node", "--dram"], ["inspect"]], ids=str
    )
    def test_usage_errors_are_the_usual_ones(self, run: Run, arguments: list[str]) -> None:
        done = run(*arguments)
        assert done.returncode == 2
        assert "Traceback" not in done.stderr
        assert "Error" in done.stderr

    @pytest.mark.slow
    def test_an_unknown_log_level(self, run: Run) -> None:
        done = run("node", "--log-level", "loud")
        assert done.returncode == 2
        assert "Traceback" not in done.stderr
        assert "debug, info, warning or error" in words(done.stderr)
