"""A recording has what a service was told: one line for each request, when it has ended."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

import pytest
from apisupport import MODEL, profile, spec_body
from starlette.testclient import TestClient

from tiffin.conductor.api.app import create_app
from tiffin.conductor.core import Conductor
from tiffin.conductor.core.settings import Settings, patched
from tiffin.conductor.recording.lines import (
    HeaderLine,
    InstanceLine,
    LeftLine,
    RequestLine,
    SettingsLine,
)
from tiffin.conductor.recording.recorder import Recorder

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tiffin.conductor.api.conductor_service import Service
    from tiffin.conductor.recording.lines import Line

KEYS = ["0" * 31 + "1", "0" * 31 + "2"]


class Recorded:
    """A service over REST, its clock, and the lines of its recording."""

    def __init__(self, open_max: int = 100, **settings: Any) -> None:
        self.now_s = 100.0
        self.lines: list[Line] = []
        self.keys: list[tuple[bytes, ...]] = []
        core = Conductor(patched(Settings(), settings), dice=random.Random(1), profile=profile)
        recorder = Recorder(self._put, open_max)
        recorder.begin(core.settings, self.now_s, 1e9)
        self.recorder = recorder
        app = create_app(core, clock=lambda: self.now_s, recorder=recorder)
        self.service: Service = app.state.service
        self.http = TestClient(app, base_url="http://localhost")

    def _put(self, line: Line, keys: tuple[bytes, ...]) -> None:
        self.lines.append(line)
        self.keys.append(keys)

    def register(self, name: str = "i1", **changes: Any) -> None:
        assert self.http.put(f"/v1/instances/{name}", json=spec_body(**changes)).status_code == 204
        self.service.tick()

    def ask(self, name: str = "r", **more: Any) -> int:
        body = {"request_id": name, "model": MODEL, "prompt_tokens": 1500, **more}
        return int(self.http.post("/v1/schedule", json=body).status_code)

    def tell(self, event: str, at_s: float, name: str = "r", tokens: int = 0) -> None:
        self.now_s = 100.0 + at_s
        body = {"json": {"tokens": tokens}} if tokens else {}
        self.http.post(f"/v1/requests/{name}/{event}", **body)

    @property
    def requests(self) -> list[RequestLine]:
        return [line for line in self.lines if isinstance(line, RequestLine)]


@pytest.fixture
def recorded() -> Iterator[Recorded]:
    made = Recorded()
    with made.http:
        made.register()
        yield made


def test_a_request_is_a_line_when_it_has_ended(recorded: Recorded) -> None:
    recorded.now_s = 101.0
    recorded.ask(
        block_keys=KEYS, tenant="", objectives={"ttft_s": 3.0}, output_tokens=20, priority="high"
    )
    recorded.tell("prefill_done", 1.4)
    recorded.tell("first_token", 1.5)
    recorded.tell("tokens", 2.5, tokens=16)
    assert recorded.requests == []
    recorded.tell("tokens", 3.1, tokens=4)
    recorded.tell("finished", 9.0)
    (line,) = recorded.requests
    assert (line.arrival_s, line.prefilled_s, line.ttft_s) == (1.0, 0.4, 0.5)
    assert line.tbt_s == pytest.approx(1.6 / 20)
    assert (line.output_tokens, line.output_tokens_expected) == (21, 20)
    assert (line.outcome, line.prefill, line.decode) == ("finished", "i1", "i1")
    assert (line.ttft_objective_s, line.priority, line.decisions) == (3.0, "high", 1)
    assert recorded.keys[-1] == tuple(bytes.fromhex(key) for key in KEYS)


def test_a_repeated_question_is_one_request(recorded: Recorded) -> None:
    recorded.ask()
    recorded.now_s += 0.5
    recorded.ask()
    recorded.tell("cancelled", 2.0)
    (line,) = recorded.requests
    assert (line.arrival_s, line.outcome, line.decisions) == (0.0, "cancelled", 1)


def test_one_that_is_placed_again_keeps_its_arrival(recorded: Recorded) -> None:
    recorded.register("i2")
    recorded.ask()
    recorded.tell("first_token", 0.2)
    first = recorded.service.core.decision("r")
    recorded.now_s = 101.0
    recorded.ask(exclude=[getattr(first, "prefill", "")])
    recorded.tell("first_token", 1.5)
    recorded.tell("finished", 2.0)
    (line,) = recorded.requests
    assert (line.arrival_s, line.ttft_s, line.decisions) == (0.0, 1.5, 2)
    assert line.prefill != getattr(first, "prefill", "")


def test_a_rejection_has_its_reason(recorded: Recorded) -> None:
    recorded.http.patch("/v1/policy", json={"admission": {"mode": "predictive"}})
    assert recorded.ask(objectives={"ttft_s": 1e-6}) == 429
    (line,) = recorded.requests
    assert (line.outcome, line.reason, line.prefill) == ("rejected", "ttft", "")
    assert line.predicted_ttft_s is not None
    assert line.ttft_s is None


def test_who_is_rejected_after_all_is_rejected() -> None:
    """By the second look of admission in mode baseline, and by a request of a higher class."""
    made = Recorded(
        queue={"waiting_max": 1, "ahead_max": 1, "ahead_s": 0.0}, admission={"mode": "baseline"}
    )
    with made.http:
        made.register()
        made.ask("late", objectives={"tbt_s": 1e-6})
        made.tell("prefill_done", 0.5, "late")
        for name, priority in (("runs", "normal"), ("low", "low"), ("high", "high")):
            made.now_s += 1e-3
            made.ask(name, priority=priority)
    found = {line.id: (line.outcome, line.reason) for line in made.requests}
    assert found["late"] == ("rejected", "tbt")
    assert found["low"] == ("rejected", "preempted")


def test_who_is_not_heard_of_has_expired_and_who_runs_is_unfinished(recorded: Recorded) -> None:
    recorded.ask("lost")
    recorded.now_s += 119.0
    recorded.ask("runs")
    recorded.now_s += 5.0
    recorded.service.tick()
    recorded.recorder.end()
    assert [(line.id, line.outcome) for line in recorded.requests] == [
        ("lost", "expired"),
        ("runs", "unfinished"),
    ]


def test_of_too_many_the_oldest_are_forgotten() -> None:
    made = Recorded(open_max=2)
    with made.http:
        made.register()
        for name in "abc":
            made.ask(name)
            made.tell("alive", 0.1, name)
        made.recorder.end()
    assert [line.id for line in made.requests] == ["b", "c"]


def test_instances_and_settings_are_lines_when_they_change(recorded: Recorded) -> None:
    recorded.service.tick()
    recorded.now_s = 103.0
    recorded.register("i2", role="decode")
    recorded.http.patch("/v1/policy", json={"policy": {"name": "random"}})
    recorded.http.delete("/v1/instances/i1?now=true")
    recorded.service.tick()
    header, first, second, settings, left = recorded.lines
    assert isinstance(header, HeaderLine)
    assert (header.began_at, header.tiffin_recording) == (1e9, 1)
    assert isinstance(first, InstanceLine)
    assert first.latency == profile("test").latency
    assert isinstance(second, InstanceLine)
    assert (second.id, second.role, second.at_s) == ("i2", "decode", 3.0)
    assert isinstance(settings, SettingsLine)
    assert settings.settings["policy"]["name"] == "random"
    assert left == LeftLine(at_s=3.0, id="i1")


def test_ids_of_tenants_are_apart(recorded: Recorded) -> None:
    recorded.ask(tenant="acme")
    recorded.ask(tenant="other")
    recorded.recorder.end()
    assert [(line.id, line.tenant) for line in recorded.requests] == [("r", "acme"), ("r", "other")]
