"""Blocks whose size nobody has said can't be fetched: they would seem to come in no time."""

from __future__ import annotations

import pytest
from starlette.testclient import TestClient

from tiffin.conductor.api.app import create_app
from tiffin.conductor.core import Conductor
from tiffin.conductor.core.silence import unmeasured
from tiffin.conductor.events.index_updates import Added
from tiffin.conductor.records import (
    Decision,
    InstanceSpec,
    Load,
    Objectives,
    Rejection,
    Request,
    Role,
)

MODEL, PROFILE = "llama-3.1-8b", "llama-3.1-8b.h100.tp1.vllm"
KEYS = tuple(bytes([number]) * 16 for number in range(16))


def cluster(block_bytes: int) -> Conductor:
    """Two idle instances; one has all of a prompt, and is busy for long."""
    core = Conductor()
    for name in ("has", "lacks"):
        spec = InstanceSpec(name, MODEL, Role.MIXED, PROFILE, block_bytes=block_bytes)
        core.register(spec, now=0.0)
    core.apply(Added("has", "hbm", list(KEYS)), 0.0)
    core.heartbeat("has", Load(queued_prefill_tokens=500_000, queued=20), 0.0)
    return core


@pytest.mark.parametrize(("block_bytes", "fetched"), [(64 << 20, True), (0, False)])
def test_only_blocks_of_a_known_size_are_fetched(block_bytes: int, fetched: bool) -> None:
    decision = cluster(block_bytes).schedule(Request("r", MODEL, 8192, keys=KEYS), now=0.0)
    assert isinstance(decision, Decision)
    assert decision.prefill == "lacks"
    assert bool(decision.fetches) == fetched
    assert bool(decision.cached_tokens) == fetched


def test_it_is_said_at_the_registration_and_in_the_status(
    caplog: pytest.LogCaptureFixture,
) -> None:
    body = {"model": MODEL, "role": "mixed", "profile": PROFILE}
    with TestClient(create_app(Conductor()), base_url="http://localhost") as http:
        assert http.put("/v1/instances/sized", json={**body, "block_bytes": 1 << 20}).is_success
        assert http.put("/v1/instances/alone", json={**body, "fetches": False}).is_success
        assert http.get("/readyz").json()["notes"] == []
        assert http.put("/v1/instances/a", json=body).is_success
        (note,) = http.get("/readyz").json()["notes"]
    assert note == "without block_bytes nothing is fetched or copied for a"
    assert note in [one.message for one in caplog.records]


@pytest.mark.parametrize("block_bytes", [64 << 20, 0])
def test_a_prompt_of_an_unknown_size_is_not_handed_over_even_from_a_busy_instance(
    block_bytes: int,
) -> None:
    core = Conductor()
    core.register(InstanceSpec("both", MODEL, Role.MIXED, PROFILE, block_bytes=block_bytes), 0.0)
    core.register(InstanceSpec("decodes", MODEL, Role.DECODE, PROFILE), 0.0)
    core.heartbeat("both", Load(running=200, context_tokens=900_000), 0.0)
    objectives = Objectives(tbt_s=core.latency("both")[3] * 1.5)
    decision = core.schedule(Request("r", MODEL, 8192, objectives=objectives), now=0.0)
    if block_bytes:
        assert isinstance(decision, Decision)
        assert decision.decode == "decodes"
    else:
        assert isinstance(decision, Rejection)
        assert decision.reason == "tbt"


def test_who_hands_over_blocks_of_an_unknown_size_prefills_only_if_nobody_else_does() -> None:
    core = Conductor()

    def prefills(name: str) -> str:
        decision = core.schedule(Request(name, MODEL, 8192), now=0.0)
        assert isinstance(decision, Decision)
        return decision.prefill

    core.register(InstanceSpec("decodes", MODEL, Role.DECODE, PROFILE), 0.0)
    core.register(InstanceSpec("unsized", MODEL, Role.PREFILL, PROFILE), 0.0)
    assert prefills("alone") == "unsized"  # and the hand-over counts as sent in no time
    assert unmeasured(core.cluster.specs)[1:] == [
        "without block_bytes what unsized hands over counts as sent in no time"
    ]
    core.register(InstanceSpec("sized", MODEL, Role.PREFILL, PROFILE, block_bytes=1 << 20), 0.0)
    assert [prefills(f"beside-{n}") for n in range(8)] == ["sized"] * 8
