"""Silent instances are named: in refusals, and where operators look."""

from __future__ import annotations

import hashlib

import pytest
from apisupport import Recorder
from coresupport import conductor, prompt, spec
from starlette.testclient import TestClient

from tiffin.conductor.api.app import create_app
from tiffin.conductor.core.silence import NAMED_MAX, silent
from tiffin.conductor.records import Load, Rejection
from tiffin.conductor.service.server import tell_lost
from tiffin.conductor.web.auth import Grant, Right, Tokens


def test_those_that_were_heard_last_come_first_and_no_more_than_ten() -> None:
    made = conductor(*(spec(f"i{n}") for n in range(14)), core={"forget_s": 100.0})
    assert silent(made.cluster, 5.0) == []
    for n in range(14):
        made.heartbeat(f"i{n}", Load(), n / 10)
    made.tick(20.0)
    named = silent(made.cluster, 20.0)
    assert len(named) == NAMED_MAX + 1
    assert named[0] == "i13 is registered, silent for 19 s"
    assert named[-1] == "and 4 more"
    made.heartbeat("i13", Load(), 20.0)
    assert silent(made.cluster, 20.0)[0].startswith("i12 ")
    made.drain("i12", 20.0)
    made.tick(40.0)
    assert not any(name.startswith("i12 ") for name in silent(made.cluster, 40.0))


def test_a_refusal_names_those_of_its_model() -> None:
    made = conductor(spec("engine-1"))
    made.tick(12.0)
    outcome = made.schedule(prompt("r"), 12.0)
    assert isinstance(outcome, Rejection)
    assert outcome.reason == "no_prefill"
    assert outcome.message.endswith("; engine-1 is registered, silent for 12 s")
    assert silent(made.cluster, 12.0, "another") == []


@pytest.mark.parametrize("tokens", [False, True])
def test_readyz_tells_whoever_has_a_token(tokens: bool) -> None:
    core = Recorder()
    rights = (
        Tokens({hashlib.sha256(b"t" * 32).digest(): Grant(frozenset({Right.READ}))})
        if tokens
        else Tokens()
    )
    app = create_app(core, auth=rights, clock=lambda: now)
    now = 0.0
    with TestClient(app, base_url="http://localhost") as http:
        service = app.state.service
        for name in ("engine-1", "engine-2"):
            core.register(spec(name), now)
        now = 5.0
        service.announce(None, "engine-2", Load())
        now = 12.0
        service.tick()
        known = {"authorization": f"Bearer {'t' * 32}"}
        said = http.get("/readyz", headers=known)
        assert (said.status_code, said.json()["notes"]) == (
            200,
            ["engine-1 is registered, silent for 12 s"],
        )
        if tokens:
            assert http.get("/readyz").json()["notes"] == []


def test_the_log_names_each_once_when_it_is_lost_and_once_when_it_is_back(
    caplog: pytest.LogCaptureFixture,
) -> None:
    made = conductor(spec("engine-1"), spec("engine-2"), core={"forget_s": 100.0})
    made.heartbeat("engine-2", Load(), 11.0)
    known: set[str] = set()
    with caplog.at_level("INFO", logger="tiffin.conductor"):
        for now in (5.0, 12.0, 12.1, 13.0):
            made.tick(now)
            known = tell_lost(made.cluster, known)
        made.heartbeat("engine-1", Load(), 14.0)
        known = tell_lost(made.cluster, known)
        made.tick(40.0)
        known = tell_lost(made.cluster, known)
        made.tick(200.0)
        known = tell_lost(made.cluster, known)
    assert [line.getMessage() for line in caplog.records] == [
        "engine-1 is silent, and gets nothing new until it is heard again",
        "engine-1, which was silent, is heard again",
        "engine-1 is silent, and gets nothing new until it is heard again",
        "engine-2 is silent, and gets nothing new until it is heard again",
        "engine-1, which was silent, is taken off the list",
        "engine-2, which was silent, is taken off the list",
    ]
