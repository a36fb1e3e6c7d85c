"""Blocks whose size nobody has said can't be fetched: they would seem to come in no time."""

from __future__ import annotations

import pytest
from starlette.testclient import TestClient

from tiffin.conductor.api.app import create_app
from tiffin.conductor.core import Conductor
from tiffin.conductor.events.index_updates import Added
from tiffin.conductor.records import Decision, InstanceSpec, Load, Request, Role

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
    assert any("a has no block_bytes" in one.message for one in caplog.records)
