"""`tiffin conductor --record`, a process: what it was told is in the file when it has stopped."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from apisupport import MODEL
from serversupport import Process

from tiffin.bench.traces.recordings import read_recording
from tiffin.conductor.client import ConductorClient
from tiffin.conductor.records import InstanceSpec, Load, Request, RequestEvent, Role
from tiffin.kvstore.cli.local.local_redis import free_port

if TYPE_CHECKING:
    from pathlib import Path

PROFILE = "llama-3.1-8b.h100.tp1.vllm"
KEYS = tuple(bytes([number]) * 16 for number in range(1, 4))


@pytest.mark.slow
def test_a_conductor_records_until_it_is_stopped(tmp_path: Path) -> None:
    path, url = tmp_path / "requests.jsonl", f"http://127.0.0.1:{free_port('127.0.0.1')}"
    listen = url.removeprefix("http://")
    with Process("--listen", listen, "--record", str(path), "--policy", "least_loaded") as one:
        one.wait_until_it_answers(url)
        with ConductorClient(url) as client:
            for name, role in (("p", Role.PREFILL), ("d", Role.DECODE)):
                client.register(InstanceSpec(name, MODEL, role, PROFILE), Load())
            for number in range(3):
                client.schedule(Request(f"r{number}", MODEL, 2000, KEYS[: number + 1]))
                client.observe(RequestEvent(f"r{number}", "first_token"))
                client.observe(RequestEvent(f"r{number}", "tokens", 7))
            client.observe(RequestEvent("r0", "finished"))
            client.observe(RequestEvent("r1", "cancelled"))
        status, log = one.end()
    assert status == 0, log
    assert "lost 0" in log
    recording = read_recording(path)
    assert [r.outcome for r in recording.requests] == ["finished", "cancelled", "unfinished"]
    assert [r.output_tokens for r in recording.requests] == [8, 8, 8]
    assert [len(r.blocks) for r in recording.requests] == [1, 2, 3]
    assert recording.requests[0].blocks == recording.requests[2].blocks[:1]
    assert {r.policy for r in recording.requests} == {"least_loaded"}
    assert sorted(i.id for i in recording.instances) == ["d", "p"]
    assert recording.settings[0][1]["policy"]["name"] == "least_loaded"
    ttfts_s = [r.ttft_s or 0.0 for r in recording.requests]
    assert all(0 < ttft_s < 60 for ttft_s in ttfts_s), ttfts_s
    assert b"01010101" not in path.read_bytes(), "no key is in it"


@pytest.mark.slow
def test_where_it_can_not_record_it_does_not_start(tmp_path: Path) -> None:
    with Process("--listen", "127.0.0.1:0", "--record", str(tmp_path / "none" / "x")) as one:
        assert one.process.wait(timeout=60) != 0
        assert "can't record to" in one.log()
