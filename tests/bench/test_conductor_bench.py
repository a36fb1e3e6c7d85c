"""The conductor's benchmark runs and gives the rows that it promises. No timing is asserted."""

from __future__ import annotations

import http.server
import json
import sys
import threading
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import typer
from rowsupport import check
from typer.testing import CliRunner

from tiffin.bench.conductor import cli, decision
from tiffin.bench.conductor.decision import HOT, PRIVATE, Traffic
from tiffin.bench.conductor.load import RequestLoad, events_of_an_answer
from tiffin.bench.conductor.processes.peer import peer
from tiffin.bench.conductor.setting import BLOCK_TOKENS, Setting, Sizes
from tiffin.bench.conductor.stalls import FLOODS, STALLS
from tiffin.bench.conductor.suite import SUITE
from tiffin.bench.store.rows import Row, Target, single
from tiffin.conductor.console import SERVICE
from tiffin.conductor.errors import InvalidRequest
from tiffin.conductor.prefill.policy_registry import names as policy_names
from tiffin.kvstore import extras
from tiffin.kvstore.errors import NodeUnavailable

if TYPE_CHECKING:
    from collections.abc import Iterator

TINY = Sizes(
    instances=20,
    prompt_blocks=8,
    shared_blocks=2,
    warm_decisions=5,
    rounds=10,
    policy_rounds=2,
    index_blocks=3200,
    index_rounds=1,
    folded_blocks=64,
    connections=3,
    prompts=4,
    requests=10,
    turns=2,
    answers=8,
    stall_requests=20,
    stall_turns=1,
    busy_s=0.5,
)
NAMES = {
    "decision": [
        *("decision-private", "schedule-private", "decision-hot", "schedule-hot"),
        *("decision-short", "schedule-short"),
    ],
    "policies": [f"policy-{name}" for name in policy_names()],
    "walk": ["index-walk-private", "index-walk-hot"],
    "events": ["index-events"],
    "resync": ["index-resync"],
    "folding": ["folding-events"],
    "busy": ["busy"],
}

ROW = Row("decision", "what", "us", single(3.0), "limit", single(4.0), (Target("p50", "<=", 9.0),))


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_measurements_give_rows_with_limits(name: str) -> None:
    found = SUITE.run(Setting(TINY), [name], lambda _: None)
    assert not found.traces
    assert not found.missing
    assert [row.name for row in found.rows] == NAMES[name]
    check(found.rows)


@pytest.mark.slow
@pytest.mark.skipif(
    any(find_spec(name) is None for name in SERVICE), reason="needs the extra conductor"
)
@pytest.mark.parametrize(
    ("name", "kinds"), [pytest.param("stalls", STALLS, marks=pytest.mark.slow), ("floods", FLOODS)]
)
def test_what_others_do_is_beside_nothing(name: str, kinds: dict[str, str]) -> None:
    found = SUITE.run(Setting(TINY), [name], lambda _: None)
    assert not found.traces
    if not found.missing:
        kind = name.removesuffix("s")
        assert [row.name for row in found.rows] == [f"{kind}-{k.replace('_', '-')}" for k in kinds]
        check(found.rows)


# -- requests --------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [PRIVATE, HOT])
def test_each_request_finds_all_of_its_blocks_on_an_instance(kind: str) -> None:
    traffic = Traffic(TINY, kind)
    for _ in range(5):
        assert traffic.loop() == TINY.prompt_blocks
        decided = traffic.decide().flight.decision
        made = traffic.schedule()
        assert decided.cached_tokens == made.cached_tokens == BLOCK_TOKENS * TINY.prompt_blocks
        assert kind == PRIVATE or not made.fetches  # if its holder is busy, blocks may be fetched
        traffic.next()


@pytest.mark.slow
def test_deciding_changes_nothing_and_requests_end() -> None:
    traffic = Traffic(TINY, PRIVATE)
    before = traffic.in_flight
    traffic.decide()
    assert traffic.in_flight == before == TINY.warm_decisions
    for _ in range(1500):
        traffic.go_on()
    # Requests come 10 ms apart and end after seconds. Otherwise queues, and so times, would grow.
    assert TINY.warm_decisions < traffic.in_flight < 1000


def test_keys_of_a_request_are_objects_of_its_own() -> None:
    traffic = Traffic(TINY, HOT)
    asked, other = traffic._asked
    assert asked.keys == other.keys == tuple(traffic._looked_up)
    assert not {id(key) for key in asked.keys} & {id(key) for key in (*other.keys, *traffic._keys)}


# -- the service -----------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.skipif(
    any(find_spec(name) is None for name in SERVICE), reason="needs the extra conductor"
)
def test_a_service_and_a_plain_one_are_asked_in_turns() -> None:
    found = SUITE.run(Setting(TINY), ["service"], lambda _: None)
    assert not found.traces
    assert not found.missing
    assert [row.name for row in found.rows] == ["service-cpu", "service-latency"]
    check(found.rows)
    cpu, latency = found.rows
    assert cpu.value.samples == cpu.limit.samples == TINY.turns
    assert latency.value.samples == latency.limit.samples == TINY.turns * TINY.requests


@pytest.mark.slow
@pytest.mark.skipif(
    any(find_spec(name) is None for name in SERVICE), reason="needs the extra conductor"
)
def test_whole_requests_are_told_in_batches_and_in_single_calls() -> None:
    found = SUITE.run(Setting(TINY), ["whole-requests"], lambda _: None)
    assert not found.traces
    assert [row.name for row in found.rows] == ["whole-requests", "whole-requests-single"]
    check(found.rows)
    kinds = [event.kind for event in events_of_an_answer()]
    assert (kinds[0], kinds[-1], set(kinds[1:-1])) == ("first_token", "finished", {"tokens"})


def test_without_the_libraries_of_the_service_it_is_left_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(extras, "find_spec", lambda _: None)
    found = SUITE.run(Setting(TINY), ["service"], lambda _: None)
    assert not found.crashed
    assert 'pip install "tiffin[conductor]"' in found.missing["service"]


@pytest.fixture
def refusing() -> Iterator[int]:
    """The port of a service that answers 503."""

    class Refuse(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            self.send_response(503)
            self.send_header("Content-Length", "4")
            self.end_headers()
            self.wfile.write(b"busy")

        def log_message(self, format: str, *arguments: Any) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Refuse) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        yield server.server_address[1]
        server.shutdown()
        thread.join()


def test_refused_requests_are_no_measurement(refusing: int) -> None:
    load = RequestLoad(refusing, "m", connections=2, prompts=2, prompt_blocks=4, shared_blocks=1)
    command = [sys.executable, "-m", "tiffin.bench.conductor.load", load.text()]
    with (
        peer("who asks", command) as asking,
        pytest.raises(NodeUnavailable, match=r"who asks has ended: (?s:.*)answered 503: busy"),
    ):
        asking.ask("ask 2")


# -- Dynamo ----------------------------------------------------------------------------------------

# A double of Dynamo: counts reservations, and answers like its wheel.
_CORE = """
class SelectionService:
    def __init__(self, indexer_threads):
        self.workers, self.reserved = set(), set()
        print("a log on standard output")
    async def upsert_worker(self, worker):
        assert worker["block_size"] == 512
        self.workers.add(worker["worker_id"])
    async def select(self, request):
        assert len(self.workers) == 20
        assert len(request["block_hashes"]) == len(request["sequence_hashes"]) == 8
        return {"worker_id": 3}
    async def select_and_reserve(self, request):
        assert request["selection_id"] not in self.reserved
        self.reserved.add(request["selection_id"])
        return await self.select(request)
    async def free_reservation(self, selection_id):
        self.reserved.remove(selection_id)
    def shutdown(self):
        pass
"""


@pytest.fixture
def python(tmp_path: Path) -> Path:
    """A Python whose package `dynamo` is the double."""
    package = tmp_path / "packages" / "dynamo"
    package.mkdir(parents=True)
    (package / "_core.py").write_text(_CORE)
    program = tmp_path / "python"
    program.write_text(f'#!/bin/sh\nPYTHONPATH={package.parent} exec {sys.executable} "$@"\n')
    program.chmod(0o755)
    return program


@pytest.mark.slow
def test_dynamo_takes_turns_with_us(python: Path) -> None:
    found = SUITE.run(Setting(TINY, python), ["dynamo"], lambda _: None)
    assert not found.traces
    assert not found.missing
    assert [row.name for row in found.rows] == [
        f"dynamo-{call}-{kind}" for kind in (PRIVATE, HOT) for call in ("select", "reserve")
    ]
    check(found.rows)
    assert all(row.value.samples == row.limit.samples == TINY.rounds for row in found.rows)
    assert [row.target_text for row in found.rows] == ["ratio <= 1", "information"] * 2


def test_without_dynamo_it_is_left_out_and_named(tmp_path: Path) -> None:
    found = SUITE.run(Setting(TINY), ["dynamo"], lambda _: None)
    assert "--dynamo" in found.missing["dynamo"]
    found = SUITE.run(Setting(TINY, tmp_path / "python"), ["dynamo"], lambda _: None)
    assert "docs/benchmarks.md" in found.missing["dynamo"]
    assert not found.crashed


def test_a_dynamo_that_fails_says_why(python: Path, tmp_path: Path) -> None:
    core = tmp_path / "packages" / "dynamo" / "_core.py"
    core.write_text(_CORE.replace("return {", 'raise RuntimeError("no worker") #'))
    found = SUITE.run(Setting(TINY, python), ["dynamo"], lambda _: None)
    assert "Dynamo has ended" in found.crashed["dynamo"]
    assert found.crashed["dynamo"].rstrip().endswith("RuntimeError: no worker")


# -- the program -----------------------------------------------------------------------------------


def test_what_the_conductor_refuses_ends_only_its_own_measurement(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refused(setting: Setting) -> list[Row]:
        raise InvalidRequest("give less")

    monkeypatch.setattr(decision, "decisions", refused)
    found = SUITE.run(Setting(TINY), ["decision", "walk"], lambda _: None)
    assert "InvalidRequest: give less" in found.crashed["decision"]
    assert [row.name for row in found.rows] == NAMES["walk"]


def test_the_program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Sizes, "quick", classmethod(lambda cls: TINY))
    monkeypatch.setitem(SUITE.measurements, "decision", lambda _: [ROW])
    app, bench = typer.Typer(), typer.Typer()
    app.add_typer(bench, name="bench")
    bench.callback()(lambda: None)
    cli.commands(app)
    arguments = ["bench", "conductor", "--quick", "--json", "--out", str(tmp_path)]
    done = CliRunner().invoke(app, [*arguments, "--row", "decision", "--row", "dynamo"])
    assert done.exit_code == 0, done.output
    plain: dict[str, Any] = json.loads((tmp_path / "bench-conductor.json").read_text())
    assert json.loads(done.stdout) == plain
    assert [row["name"] for row in plain["rows"]] == ["decision"]
    assert plain["crashed"] == {}
    assert list(plain["missing"]) == ["dynamo"]
    assert plain["sizes"]["instances"] == TINY.instances
    assert "left out dynamo" in done.stderr

    done = CliRunner().invoke(app, ["bench", "conductor", "--row", "nothing"])
    assert done.exit_code == 2


def test_the_docs_name_every_measurement() -> None:
    page = (Path(__file__).parents[2] / "docs" / "benchmarks.md").read_text(encoding="utf-8")
    section = page[page.index("## The conductor") :]
    for name in SUITE.measurements:
        assert f"`{name}`" in section, name
