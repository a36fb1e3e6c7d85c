"""Peers beside ours: what is missing is said, turns are fair, the processes' protocol, the table.
No peer is installed here: doubles stand in for them, and no timing is asserted."""

from __future__ import annotations

import contextlib
import json
import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import typer
from rowsupport import check
from typer.testing import CliRunner

from tiffin.bench.peers import cli, dynamo, sglang, table
from tiffin.bench.peers.blocks import PLACES, Theirs, compared
from tiffin.bench.peers.conversations import Http, completion, conversations
from tiffin.bench.peers.environments import PEERS, python_of, version_of
from tiffin.bench.peers.hashing import hashed
from tiffin.bench.peers.setting import PROCESSES, Setting, Sizes
from tiffin.bench.peers.suite import SUITE
from tiffin.bench.peers.turns import PeerRow, Turns, in_turns
from tiffin.bench.store.setting import KIB
from tiffin.bench.suite import Missing, SuiteReport
from tiffin.bench.vllm.engine_process import GroupProcess
from tiffin.kvstore.errors import NodeUnavailable
from tiffin.kvstore.format.schema import HASHES

if TYPE_CHECKING:
    from collections.abc import Iterator

TINY = Sizes(
    rounds=2,
    blocks=((64 * KIB, 2),),
    calls=2,
    workers=4,
    prompt_blocks=6,
    shared_blocks=2,
    event_blocks=2,
    events=8,
    resident_blocks=100,
    hashes=1,
    backends=2,
    conversations=3,
    requests=3,
)
# A peer's process, on the protocol of the real ones.
DOUBLE = """
import sys
sys.path.insert(0, sys.argv[1])
from serving import serve, take_stdout, timed
answers = take_stdout()
print("what a library prints")
def fail(): raise ValueError("no such block")
quick = lambda calls, **_: timed(calls, lambda: None)
serve(answers, {"put": quick, "get": quick, "hash": quick, "fail": fail})
"""


@contextlib.contextmanager
def double() -> Iterator[GroupProcess]:
    process = GroupProcess("the double", [sys.executable, "-c", DOUBLE, str(PROCESSES)])
    try:
        process.ready()
        yield process
    finally:
        process.end()


@pytest.fixture
def setting(tmp_path: Path) -> Setting:
    return Setting(TINY, tmp_path)


def a_row(name: str, ratios: tuple[float, ...]) -> PeerRow:
    turns = Turns([[ratio] for ratio in ratios], [[1.0] for _ in ratios])
    return turns.row("mooncake", name, "what", "theirs", "us", 1.0)


# -- environments ----------------------------------------------------------------------------------


def test_peers_that_are_not_installed_are_left_out_with_the_command(setting: Setting) -> None:
    found = SUITE.run(setting, SUITE.measurements, lambda _: None)
    assert not found.rows
    assert not found.crashed
    assert found.missing is not None
    assert list(found.missing) == ["mooncake", "lmcache", "dynamo", "sglang"]
    for name, lack in found.missing.items():
        assert lack.startswith("not installed: make bench-peers installs it")
        assert f"install.sh python3 {setting.folder} {name}" in lack
    assert "Dynamo not installed" in found.environment["device"]["text"]


def test_an_environment_that_cannot_import_its_peer_is_missing_with_the_reason(
    tmp_path: Path,
) -> None:
    folder = tmp_path / "dynamo" / "bin"
    folder.mkdir(parents=True)
    (folder / "python").symlink_to(sys.executable)
    with pytest.raises(Missing, match=r"can't import dynamo\._core: ModuleNotFoundError"):
        python_of(tmp_path, "dynamo")
    assert version_of(tmp_path, "dynamo") == "unknown"


def test_what_is_installed_is_what_was_run() -> None:
    script = (PROCESSES.parent / "install.sh").read_text()
    for peer in PEERS.values():
        assert peer.requirement in script
        assert peer.tested in peer.requirement


def test_the_command_without_peers_says_so_and_succeeds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    app = typer.Typer()
    cli.commands(app)
    done = CliRunner().invoke(app, ["bench", "peers", "--quick", "--json"])
    assert done.exit_code == 0, done.output
    plain = json.loads((tmp_path / "out" / "bench-peers.json").read_text())
    assert json.loads(done.stdout) == plain
    assert list(plain["missing"]) == list(SUITE.measurements)
    for name in SUITE.measurements:
        assert f"left out {name}: " in done.stderr
    assert "in 0 of 0 rows" in done.stderr


def test_an_unknown_peer_is_refused() -> None:
    app = typer.Typer()
    cli.commands(app)
    done = CliRunner().invoke(app, ["bench", "peers", "--row", "redis"])
    assert done.exit_code == 2
    assert "mooncake, lmcache, dynamo, sglang" in done.stderr


# -- turns -----------------------------------------------------------------------------------------


def test_sides_take_turns_in_alternating_order_and_the_first_turn_does_not_count() -> None:
    said: list[str] = []

    def side(name: str, seconds: float) -> list[float]:
        said.append(name)
        return [seconds * len(said)]

    turns = in_turns(lambda: side("o", 1.0), lambda: side("t", 2.0), rounds=3)
    assert "".join(said) == "ot" + "ot" + "to" + "ot"
    assert turns.ours == [[3.0], [6.0], [7.0]]
    assert turns.theirs == [[8.0], [10.0], [16.0]]


def test_a_ratio_belongs_to_a_turn_so_a_slow_minute_cancels_out() -> None:
    turns = Turns(ours=[[1.0, 1.0], [9.0, 9.0], [1.0, 1.0]], theirs=[[2.0], [18.0], [4.0]])
    row = turns.row("mooncake", "get", "what", "theirs", "ms", 1000.0)
    assert row.ratios == (0.5, 0.5, 0.25)
    assert row.ratio == 0.5
    assert row.name == "mooncake-get"
    plain = row.plain()
    assert (plain["ratio"], plain["ratio_low"], plain["ratio_high"]) == (0.5, 0.25, 0.5)
    assert plain["peer"] == "mooncake"
    assert row.value.p50 == 1000.0


# -- the table -------------------------------------------------------------------------------------


def test_the_tables_have_every_row_with_its_range() -> None:
    report = SuiteReport("peers", {}, {})
    report.rows += [a_row("get", (0.5, 0.25, 0.75)), a_row("put", (2.0, 3.0, 4.0))]
    lines = table.markdown(report).splitlines()
    assert len(lines) == 4
    assert {line.count("|") for line in lines} == {9}
    assert "| `mooncake-get` | 0.5 |" in lines[2]
    assert "**0.5** | 0.25 to 0.75 |" in lines[2]
    assert "**3** | 2 to 4 |" in lines[3]
    assert table.table(report).row_count == 2
    assert table.verdict(report) == "ours took less, or as much, in 1 of 2 rows"
    report.crashed["dynamo"] = "it died"
    assert table.verdict(report).endswith(", 1 crashed")


# -- the processes ---------------------------------------------------------------------------------


def test_the_protocol_answers_line_by_line_and_keeps_prints_out() -> None:
    with double() as process:
        assert len(process.tell("put", calls=3)) == 3
        assert process.tell("get", calls=0) == []
        with pytest.raises(NodeUnavailable, match=r"what a library prints[^!]*no such block"):
            process.tell("fail")


def test_scripts_of_peers_import_nothing_of_ours() -> None:
    for script in PROCESSES.glob("*.py"):
        assert "tiffin" not in script.read_text().replace("Tiffin", "").lower(), script


@pytest.mark.slow
@pytest.mark.parametrize("place", PLACES)
def test_blocks_give_rows_at_every_place(setting: Setting, place: str) -> None:
    @contextlib.contextmanager
    def theirs(block_bytes: int, count: int) -> Iterator[Theirs]:
        assert (block_bytes, count) == TINY.blocks[0]
        with double() as process, double() as server:
            yield Theirs(process, (server,))

    affinity = os.sched_getaffinity(0)
    rows = compared(setting, "mooncake", place, theirs)
    assert os.sched_getaffinity(0) == affinity
    names = [f"mooncake-{place}-{verb}-64KiB" for verb in ("put", "get", "get-verified")]
    assert [row.name for row in rows] == names
    check(rows)


def test_turns_of_large_batches_are_short() -> None:
    sizes = Sizes(calls=20, turn_bytes=1000)
    assert [sizes.calls_of(nbytes) for nbytes in (1, 100, 600, 5000)] == [20, 10, 1, 1]


def test_keys_give_a_row(setting: Setting) -> None:
    with double() as process:
        rows = [hashed(setting, "lmcache", process, "its hash", name) for name in HASHES]
    assert [row.name for row in rows] == [
        f"lmcache-keys{name}" for name in ("", "-sha256", "-blake2b")
    ]
    check(rows)


class Told:
    """A double of Dynamo's process, that answers every command at once."""

    def __init__(self) -> None:
        self.commands: list[tuple[str, dict[str, Any]]] = []

    def tell(self, name: str, **arguments: Any) -> Any:
        self.commands.append((name, arguments))
        calls = arguments.get("calls")
        return 1e-3 if calls is None else [1e-3] * calls


def test_the_index_gives_rows(setting: Setting) -> None:
    told: Any = Told()
    rows = [
        dynamo._memory(setting, told),
        dynamo._applied(setting, told),
        *dynamo._matched(setting, told),
    ]
    kinds = [f"{kind}{scores}" for kind in dynamo._KINDS for scores in ("", "-scores")]
    assert [row.name.removeprefix("dynamo-index-") for row in rows] == [
        *("memory", "apply"),
        *(f"match-{kind}" for kind in kinds),
    ]
    check(rows[1:])


def test_both_indexes_hold_the_same() -> None:
    index = dynamo._Index(TINY)
    assert set(index._scores(index._prompt("hot")).values()) == {6}
    assert sorted(index._scores(index._prompt("private")).values()) == [2, 2, 2, 6]
    assert index._scores(index._prompt("miss")) == {}


# -- the router ------------------------------------------------------------------------------------


def test_conversations_share_their_beginning_as_text_and_as_ids() -> None:
    one, other = conversations(2)
    assert conversations(2)[0] == one
    assert one.text[:4096] == other.text[:4096]
    assert one.ids[:1024] == other.ids[:1024]
    assert len(one.ids) == -(-len(one.text) // 4)
    assert one.ids != other.ids


def test_trivial_workers_answer_completions() -> None:
    with sglang._backends(TINY) as ports:
        for port in ports:
            with Http(port) as http:
                body = json.loads(http.ask(completion("x" * 100_000)))
                assert body["choices"][0]["text"] == "yes"
                assert len(http.seconds([completion([1, 2, 3])] * 3)) == 3


@pytest.mark.slow
def test_our_gateway_and_our_schedule_stand_beside_a_router(
    setting: Setting, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The double of the router is one more trivial worker."""

    @contextlib.contextmanager
    def router(
        name: str, python: Path, urls: list[str], model: str
    ) -> Iterator[tuple[GroupProcess, int]]:
        assert (name, model) == ("sglang", "bench")
        assert len(urls) == setting.sizes.backends
        port = sglang.free_port(sglang.LOOPBACK)
        command = [sys.executable, str(sglang.backends.__file__), str(port)]
        process = GroupProcess("the router's double", command)
        try:
            process.ready()
            yield process, port
        finally:
            process.end()

    monkeypatch.setattr(sglang.routers, "router", router)
    monkeypatch.setattr(Setting, "python", lambda self, name: Path(sys.executable))
    rows = sglang.sglang(replace(setting))
    assert [row.name for row in rows] == [
        f"sglang-{way}-{what}" for way in ("text", "ids", "schedule") for what in ("latency", "cpu")
    ]
    check(rows)


# -- the peers themselves --------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("name", SUITE.measurements)
def test_a_real_peer(name: str) -> None:
    """Where `bench/peers/install.sh` has filled the folder that TIFFIN_PEERS names. Mooncake needs
    the loopback of a network namespace of its own, as `make bench-peers` makes one."""
    folder = Path(os.environ.get("TIFFIN_PEERS", "no-such-folder")).absolute()
    found = SUITE.run(Setting(TINY, folder), [name], lambda _: None)
    if found.missing:
        pytest.skip(found.missing[name])
    assert not found.crashed, found.traces
    check([row for row in found.rows if "memory" not in row.name])
