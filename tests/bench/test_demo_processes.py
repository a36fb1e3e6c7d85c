"""The demo's processes: their messages reach the demo, and a process that dies is named."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import threading
from typing import TYPE_CHECKING, Any

import psutil
import pytest
from kvsupport import wait_until

from tiffin.bench.demo.engines import children as demo_children
from tiffin.bench.demo.engines.children import Crew, EngineProcess
from tiffin.bench.serving import presence
from tiffin.bench.serving.errors import ProcessFailed
from tiffin.conductor.errors import ConductorUnavailable, UnknownRequest
from tiffin.conductor.records import InstanceSpec, Load, RequestEvent, Role

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

# Answers a message with {"done": ...}, except "quiet"; exits on "end", with a text or status 3.
ECHO = """
import json, sys
for line in sys.stdin:
    order = json.loads(line)
    if "end" in order:
        sys.exit("these are my last words" if order["end"] else 3)
    if "quiet" not in order:
        print(json.dumps({"done": order}), flush=True)
"""


@pytest.fixture
def children(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[EngineProcess]]:
    (tmp_path / "echo_child.py").write_text(ECHO)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    started = [EngineProcess(name, ["echo_child"], tmp_path) for name in ("one", "two")]
    yield started
    for child in started:
        child.stop()
        assert child.process.returncode is not None


def nothing() -> None:
    """A `look` that finds nothing wrong."""


def ended(process: psutil.Process) -> bool:
    try:
        return bool(process.status() == psutil.STATUS_ZOMBIE)  # nobody may collect it
    except psutil.NoSuchProcess:
        return True


def test_a_child_that_is_busy_ends_when_the_demo_is_killed(tmp_path: Path) -> None:
    """One that does not come to the end of its stdin."""
    (tmp_path / "busy_child.py").write_text("import time\ntime.sleep(600)\n")
    demo = (
        "import pathlib, sys, time\n"
        "from tiffin.bench.demo.engines.children import EngineProcess\n"
        "child = EngineProcess('busy', ['busy_child'], pathlib.Path(sys.argv[1]))\n"
        "print(child.process.pid, flush=True)\n"
        "time.sleep(600)\n"
    )
    path = os.pathsep.join((str(tmp_path), os.environ.get("PYTHONPATH", "")))
    with subprocess.Popen(
        [sys.executable, "-c", demo, str(tmp_path)],
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": path},
    ) as parent:
        child = None
        try:
            assert parent.stdout is not None
            child = psutil.Process(int(parent.stdout.readline()))
            # It has no command line while it is being started.
            wait_until(lambda: "busy_child" in " ".join(child.cmdline()), "it has begun")
            parent.kill()
            wait_until(lambda: ended(child), "it has ended")
        finally:
            parent.kill()  # the end of `with` waits for it
            if child is not None:
                with contextlib.suppress(psutil.NoSuchProcess):
                    child.kill()


def test_answers_come_in_the_order_of_the_names(children: list[EngineProcess]) -> None:
    crew = Crew(children, nothing)
    crew.send("two", {"n": 1})
    assert crew.wait_for("done", ["two"], 20.0) == {"two": {"n": 1}}
    assert crew.ask(["two", "one"], {"n": 2}, 20.0) == [{"n": 2}, {"n": 2}]
    assert crew.poll(0.0) is None


def test_a_child_that_dies_is_named_with_its_last_words(children: list[EngineProcess]) -> None:
    crew = Crew(children, nothing)
    crew.send("two", {"end": True})
    with pytest.raises(ProcessFailed, match=r"(?s)two died and ended with status 1.*my last words"):
        crew.next(20.0)
    with pytest.raises(ProcessFailed, match="two died and ended with status 1"):
        crew.send("two", {"n": 1})


def test_silence_and_wrong_answers_are_failures(
    children: list[EngineProcess], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(demo_children, "DEATH_S", 0.01)  # no process is about to die
    crew = Crew(children, nothing)
    with pytest.raises(ProcessFailed, match="said nothing"):
        crew.ask(["one"], {"quiet": 1}, 0.0)
    crew.send("one", {"n": 1})
    with pytest.raises(ProcessFailed, match="instead of 'ready'"):
        crew.wait_for("ready", ["one"], 20.0)


def test_whoever_waits_looks_at_what_else_may_have_died(children: list[EngineProcess]) -> None:
    def look() -> None:
        raise ProcessFailed("node-1 was killed")

    with pytest.raises(ProcessFailed, match="node-1"):
        Crew(children, look).next(20.0)


# -- presence --------------------------------------------------------------------------------------


class Service:
    """The service behind all client doubles; `fails` is raised by every call."""

    def __init__(self) -> None:
        self.registered: list[tuple[InstanceSpec, Load]] = []
        self.events: list[RequestEvent] = []
        self.fails: Exception | None = None
        self.open = 0
        self.beaten = threading.Event()

    def __call__(self, url: str) -> Service:
        self.open += 1
        return self

    def register(self, spec: InstanceSpec, load: Load) -> None:
        self.registered.append((spec, load))
        if len(self.registered) >= 4:
            self.beaten.set()
        self._fail()

    def observe(self, event: RequestEvent) -> None:
        self.events.append(event)
        self._fail()

    def close(self) -> None:
        self.open -= 1

    def _fail(self) -> None:
        if self.fails is not None:
            raise self.fails


@pytest.fixture
def service(monkeypatch: pytest.MonkeyPatch) -> Service:
    made = Service()
    monkeypatch.setattr(presence, "ConductorClient", made)
    monkeypatch.setattr(presence, "HEARTBEAT_S", 0.005)
    return made


SPEC = InstanceSpec("prefill-1", "m", Role.PREFILL, "p")


def loads() -> Callable[[], Load]:
    """0, 1, 2, ... requests."""
    numbers: Any = iter(range(1_000_000))
    return lambda: Load(queued=next(numbers))


def test_an_instance_registers_with_its_load_again_and_again(service: Service) -> None:
    with presence.Presence("http://c", SPEC, loads()) as here:
        assert service.registered[:1] == [(SPEC, Load(queued=0))]
        here.say("r", "tokens", 7)
        assert service.beaten.wait(20.0)
    assert [load.queued for _, load in service.registered[:4]] == [0, 1, 2, 3]
    assert service.events == [RequestEvent("r", "tokens", 7)]
    assert service.open == 0


def test_a_conductor_that_is_away_does_not_stop_the_work(
    service: Service, caplog: pytest.LogCaptureFixture
) -> None:
    with presence.Presence("http://c", SPEC, loads()) as here:
        service.fails = ConductorUnavailable("no answer")
        said = "did not take a heartbeat: no answer"
        wait_until(lambda: caplog.text.count(said) >= 2, "it is said, and tried again")
        service.fails = UnknownRequest("it has expired")
        here.say("r", "finished")
    assert "did not take 'finished' of 'r': it has expired" in caplog.text


def test_one_that_cannot_register_leaves_nothing_open(service: Service) -> None:
    service.fails = ConductorUnavailable("no answer")
    with pytest.raises(ConductorUnavailable):
        presence.Presence("http://c", SPEC, loads())
    assert service.open == 0
    assert len(service.registered) == 1
