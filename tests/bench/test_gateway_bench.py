"""The gateway's benchmark runs and gives the rows that it promises. No timing is asserted."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import typer
from childsupport import descendants, environment
from kvsupport import wait_until
from rowsupport import check
from typer.testing import CliRunner

from tiffin.bench.gateway import cli
from tiffin.bench.gateway import fleet as fleet_module
from tiffin.bench.gateway.fleet import MODEL, TEXT, fleet, short_body, stream_body
from tiffin.bench.gateway.processes import stub_engine
from tiffin.bench.gateway.processes.clients import Outcome
from tiffin.bench.gateway.setting import Setting, Sizes
from tiffin.bench.gateway.streams import shortfall
from tiffin.bench.gateway.suite import SUITE
from tiffin.bench.network.setting import LOOPBACK, await_answer
from tiffin.bench.peers.routers import ROUTERS, answers
from tiffin.bench.vllm.engine_process import GroupProcess
from tiffin.bench.vllm.engine_process import service as process_of
from tiffin.conductor.console import SERVICE
from tiffin.kvstore.cli.local.local_redis import free_port

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

pytestmark = pytest.mark.skipif(
    any(find_spec(name) is None for name in SERVICE), reason="needs the extra conductor"
)

TINY = Sizes(
    at_once=(1, 4), turns=1, requests=40, alone=10, streams=(4,), stream_tokens=5, gap_s=0.001,
    held=10, beside_at_once=(1, 4), beside_streams=(4,),
)  # fmt: skip
NAMES = {
    "requests": ["requests-1", "requests-4"],
    "cpu": ["cpu", "cpu-conductor"],
    "workers": ["cpu-workers"],
    "latency": ["added-ids", "added-text", "added-loaded"],
    "streams": ["tokens-4", "cpu-token-4"],
    "memory": ["stream-memory"],
}


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_measurements_give_rows_with_limits(name: str) -> None:
    found = SUITE.run(Setting(TINY), [name], lambda _: None)
    assert not found.traces
    assert not found.missing
    assert [row.name for row in found.rows] == NAMES[name]
    if name != "memory":  # so few streams may not make it grow at all
        check(found.rows)


@pytest.mark.slow
def test_requests_and_streams_go_all_the_way() -> None:
    """What the clients count is what the engine sent, through every side; refusals are told from
    failures, and streams that are dropped leave nothing behind."""
    with fleet(Setting(TINY), {"limits": {"requests": 4}}) as it:
        assert ("nginx" in it.sides) == (
            shutil.which("nginx", path="/usr/sbin:/usr/bin") is not None
        )
        for port in it.sides.values():
            outcome = it.ask(port, short_body(TEXT), requests=20, at_once=2)
            assert (outcome.statuses, len(outcome.seconds)) == ({"200": 20}, 20)
            assert outcome.fallbacks == 0
            streamed = it.ask(port, stream_body(7, 0.001), requests=8, rate=200.0 / 50)
            assert streamed.tokens == 7 * 8
        busy = it.ask(it.gateway, short_body(gap_s=0.5), requests=12, at_once=12)
        assert busy.statuses == {"200": 4, "503": 8}
        assert len(busy.refused_s) == 8
        assert busy.reasons == {"gateway_busy": 8}
        crowd = it.ask(it.gateway, stream_body(7, 0.05), requests=12, at_once=12)
        assert shortfall([crowd], 7) == "8 streams refused (gateway_busy)"
        held = it.ask(it.gateway, stream_body(2, 3600.0), hold=4)
        assert held.tokens == 4
        it.drop()
        assert it.resident_bytes("gateway") > 1 << 20
        while it.ask(it.gateway, short_body(), requests=1, at_once=1).statuses == {"503": 1}:
            pass  # until the gateway has noticed


def test_what_streams_lack_is_told_apart() -> None:
    """A stream that was refused has lost nothing; one that ended well with too few tokens has."""
    whole = Outcome(seconds=[1.0, 1.0], statuses={"200": 2}, tokens=10)
    assert shortfall([whole], 5) == ""
    short = Outcome(
        seconds=[1.0], statuses={"200": 1, "503": 2, "ConnectionResetError": 3}, tokens=4,
        reasons={"not_placed_in_time": 2},
    )  # fmt: skip
    assert shortfall([whole, short], 5) == (
        "2 streams refused (not_placed_in_time), 3 streams failed (ConnectionResetError), "
        "1 tokens lost"
    )


# -- routers of others -----------------------------------------------------------------------------


def test_routers_that_are_not_installed_are_named_with_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    app = typer.Typer()
    cli.commands(app)
    done = CliRunner().invoke(app, ["bench", "gateway", "--quick", "--row", "routers", "--json"])
    assert done.exit_code == 0, done.output
    plain = json.loads(done.stdout)
    assert plain["rows"] == []
    assert list(plain["missing"]) == list(ROUTERS)
    for name in ROUTERS:
        assert f"left out {name}: not installed: make bench-peers installs it" in done.stderr
    assert "vLLM's router not installed" in plain["environment"]["device"]["text"]


@contextlib.contextmanager
def double(
    name: str, python: Path, urls: Sequence[str], model: str
) -> Iterator[tuple[GroupProcess, int]]:
    """Of a router: one more stub engine, which answers as those behind it would."""
    assert (name, model, len(urls)) == ("sglang", MODEL, fleet_module.INSTANCES)
    port = free_port(LOOPBACK)
    command = [str(python), "-m", stub_engine.__name__, str(port)]
    with process_of(name, command) as process:
        await_answer(process.popen, lambda: answers(port, ROUTERS[name]), name)
        yield process, port


@pytest.mark.slow
def test_ours_stands_beside_a_router_and_the_missing_ones_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "sglang" / "bin"
    folder.mkdir(parents=True)
    (folder / "python").write_text(f'#!/bin/sh\n[ "$1" = -c ] || exec {sys.executable} "$@"\n')
    (folder / "python").chmod(0o755)
    monkeypatch.setattr(fleet_module, "router", double)
    found = SUITE.run(Setting(TINY, environments=tmp_path), ["routers"], lambda _: None)
    assert not found.traces
    assert found.missing is not None
    assert list(found.missing) == ["vllm-router", "production-stack"]
    assert [row.name for row in found.rows] == [
        *(f"sglang-{kind}-{n}" for n in (1, 4) for kind in ("requests", "p50", "p99", "cpu")),
        *("sglang-tokens-4", "sglang-cpu-token-4"),
    ]
    check(found.rows)
    for row in found.rows:
        assert "ours" not in row.note, "nothing was refused"


@pytest.mark.slow
@pytest.mark.parametrize("name", ROUTERS)
def test_a_real_router_passes_on_all_that_it_gets(name: str) -> None:
    """Where `bench/peers/install.sh` has filled the folder that TIFFIN_PEERS names."""
    folder = Path(os.environ.get("TIFFIN_PEERS", "no-such-folder")).absolute()
    setting = Setting(TINY, environments=folder)
    there = setting.routers()
    if name not in there:
        pytest.skip(setting.left_out[name])
    with fleet(setting, routers={name: there[name]}) as it:
        port = it.routers[name]
        short = it.ask(port, short_body(TEXT), requests=40, at_once=4)
        assert (short.statuses, len(short.seconds)) == ({"200": 40}, 40)
        streamed = it.ask(port, stream_body(7, 0.001, TEXT), requests=8, at_once=8)
        assert shortfall([streamed], 7) == ""
        assert it.cpu_s(name) > 0


@pytest.mark.slow
@pytest.mark.parametrize("number", [2, 3, 4, 5])
def test_nothing_outlives_a_benchmark_that_is_told_to_stop(tmp_path: Path, number: int) -> None:
    """It was killed at once, and all went on. Then a process did, of which it was told before it
    knew that it had started that: here the one of this number, itself being the first."""
    program = (
        "import typer; from tiffin.bench.gateway.cli import commands; "
        "app = typer.Typer(); commands(app); app()"
    )
    command = [sys.executable, "-c", program, "bench", "gateway", "--row", "requests"]
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    with subprocess.Popen(
        [*command, "--out", str(tmp_path)],
        env=environment(temporary),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    ) as bench:
        while len(descendants(temporary)) < number:
            assert bench.poll() is None
        bench.send_signal(signal.SIGTERM)
        assert bench.wait(30) != 0
    wait_until(lambda: not descendants(temporary), "all have ended", timeout_s=30)
    assert list(temporary.iterdir()) == []
