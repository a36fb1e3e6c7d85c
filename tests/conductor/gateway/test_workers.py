"""Several processes that serve one port as one gateway."""

from __future__ import annotations

import asyncio
import math
import os
import re
import signal
import time
from typing import TYPE_CHECKING

import httpx
import msgspec
import pytest
from apisupport import MODEL
from directory.ports import free_port
from serversupport import GatewayProcess, served

from tiffin.conductor.client import ConductorClient
from tiffin.conductor.core import Conductor
from tiffin.conductor.gateway.clients.client_settings import ClientSettings
from tiffin.conductor.gateway.config import GatewayConfig, GatewayLimits
from tiffin.conductor.gateway.gateway import CapacityGate
from tiffin.conductor.gateway.metrics import GatewayMetrics
from tiffin.conductor.gateway.workers.client_shares import part_of
from tiffin.conductor.gateway.workers.shared_counts import SharedCounts, size_of
from tiffin.conductor.gateway.workers.worker_metrics import WorkerMetrics, merged, socket_of
from tiffin.conductor.records import InstanceSpec, Role
from tiffin.conductor.wire.answers import Refusal

if TYPE_CHECKING:
    from pathlib import Path

PATIENCE_S = 60.0


def test_limits_hold_for_all_workers_together() -> None:
    memory = bytearray(size_of(2))
    limits = GatewayLimits(requests=3, held_bytes=2048)
    counts = [SharedCounts(memory, number) for number in range(2)]
    gates = [CapacityGate(limits, GatewayMetrics(), one) for one in counts]
    for gate in (gates[0], gates[1], gates[1]):
        gate.enter()
    with pytest.raises(Refusal, match="3 requests"):
        gates[0].enter()
    gates[0].hold(1500)
    with pytest.raises(Refusal, match="too long"):
        gates[1].hold(1000)
    gates[0].leave(1500)
    gates[1].hold(1000)
    assert [gate.requests for gate in gates] == [0, 2]
    counts[1].clear()
    assert (counts[0].requests, counts[0].held_bytes) == (0, 0)


def test_a_class_leaves_room_for_the_others() -> None:
    limits = GatewayLimits(requests=4, class_shares={"batch": 0.5})
    gate = CapacityGate(limits, GatewayMetrics(), SharedCounts.alone())
    gate.enter("batch")
    gate.enter("normal")
    with pytest.raises(Refusal, match="2 requests are under way, and what is left is not for 'ba"):
        gate.enter("batch")
    gate.enter("normal")
    gate.enter()
    with pytest.raises(Refusal, match="4 requests are under way: try again"):
        gate.enter("normal")
    gate.leave(0)
    gate.leave(0)
    gate.leave(0)
    gate.enter("batch")


def test_clients_get_of_each_worker_their_part() -> None:
    client = ClientSettings(requests_per_minute=100, concurrent_requests=3, tokens_per_day=1000)
    config = GatewayConfig(clients={"app": client})
    part = part_of(config, 4).clients["app"]
    assert (part.requests_per_minute, part.concurrent_requests) == (25, 1)
    assert (part.tokens_per_day, part.tokens_per_minute) == (250, None)
    assert part_of(config, 4).limits == config.limits, "which are counted together"
    shared = msgspec.structs.replace(config, quota_file="/var/lib/tiffin/quotas.sqlite")
    assert part_of(shared, 4).clients["app"].tokens_per_day == 1000


def test_a_scrape_adds_the_workers_up() -> None:
    one, other = GatewayMetrics(), GatewayMetrics()
    one.requests.labels("/v1/completions", "200").inc(3)
    other.requests.labels("/v1/completions", "200").inc(4)
    other.requests.labels("/v1/completions", "503").inc()
    for metrics, up, seconds in ((one, 1, 0.1), (other, 0, 0.3)):
        metrics.conductor_up.set(up)
        metrics.instances.set(5 + up)
        metrics.total_s.observe(seconds)
    text = merged([one.text().decode(), other.text().decode()])
    lines = text.splitlines()
    name = 'tiffin_gateway_requests_total{route="/v1/completions",status='
    assert f'{name}"200"}} 7.0' in lines
    assert f'{name}"503"}} 1.0' in lines
    assert "tiffin_gateway_conductor_up 0.0" in lines
    assert "tiffin_gateway_instances 6.0" in lines
    assert "tiffin_gateway_workers 2.0" in lines
    assert "tiffin_gateway_request_duration_seconds_count 2.0" in lines
    assert len([line for line in lines if line.startswith("# TYPE")]) == len(
        [line for line in one.text().decode().splitlines() if line.startswith("# TYPE")]
    )
    # A series stands behind the comments of its family.
    at = lines.index(f'{name}"503"}} 1.0')
    assert lines[at - 1].startswith(name)


def test_a_worker_that_does_not_answer_is_left_out(tmp_path: Path) -> None:
    async def scenario() -> None:
        workers = [WorkerMetrics(tmp_path, number, 3, GatewayMetrics().text) for number in range(3)]
        async with workers[0].served(), workers[1].served():
            assert socket_of(tmp_path, 1).exists()
            assert b"tiffin_gateway_workers 2.0" in await workers[0].of_all()

    asyncio.run(scenario())


def test_counters_do_not_fall_when_a_worker_ends(tmp_path: Path) -> None:
    """Whether it is gone, started again, or ended once more: what was told of it stays."""
    asked = 'tiffin_gateway_requests_total{route="/x",status="200"}'
    took = "tiffin_gateway_request_duration_seconds_count"

    def worker(number: int, requests: int) -> WorkerMetrics:
        metrics = GatewayMetrics()
        metrics.requests.labels("/x", "200").inc(requests)
        metrics.in_flight.set(requests)
        for _ in range(requests):
            metrics.total_s.observe(0.1)
        return WorkerMetrics(tmp_path, number, 2, metrics.text)

    async def numbers(one: WorkerMetrics) -> list[float]:
        told = dict(line.rsplit(" ", 1) for line in (await one.of_all()).decode().splitlines())
        names = (asked, took, "tiffin_gateway_requests_in_flight", "tiffin_gateway_workers")
        return [float(told[name]) for name in names]

    async def scenario() -> None:
        first = worker(0, 3)
        async with first.served():
            async with worker(1, 4).served():
                assert await numbers(first) == [7, 7, 7, 2]
            assert await numbers(first) == [7, 7, 3, 1]
            other = worker(1, 2)
            async with other.served():
                assert await numbers(first) == [9, 9, 5, 2]
                assert await numbers(other) == [9, 9, 5, 2]
            async with worker(1, 0).served():
                assert await numbers(first) == [9, 9, 3, 2]

    asyncio.run(scenario())


@pytest.mark.slow
def test_they_are_one_gateway(tmp_path: Path) -> None:
    """One port, one sum of metrics; a worker that is killed is started again, and the others serve
    meanwhile; a signal stops all."""
    config = tmp_path / "gateway.json"
    config.write_text('{"refresh_s": 0.05}')
    listen = f"127.0.0.1:{free_port()}"
    url = f"http://{listen}"

    def number(metric: str) -> float:
        try:
            text = httpx.get(f"{url}/metrics", trust_env=False).text
        except httpx.TransportError:  # the connection was one of a worker that was killed
            return math.nan
        return sum(
            float(value) for value in re.findall(rf"^{metric}\S* (\S+)$", text, re.MULTILINE)
        )

    with served(Conductor()) as conductor, ConductorClient(conductor) as client:
        profile = "llama-3.1-8b.h100.tp1.vllm"
        client.register(InstanceSpec("m0", MODEL, Role.MIXED, profile, url="http://127.0.0.1:9"))
        options = ("--listen", listen, "--conductor", conductor, "--config", str(config))
        with GatewayProcess(*options, "--workers", "2") as process:
            process.wait_until_it_answers(url)
            deadline = time.monotonic() + PATIENCE_S
            while number("tiffin_gateway_workers") != 2:
                assert time.monotonic() < deadline
            asked = 24
            for _ in range(asked):  # each on a connection of its own
                body = {"model": MODEL, "prompt": [1]}
                said = httpx.post(f"{url}/v1/completions", json=body, trust_env=False)
                assert said.status_code == 503, said.text
            assert number('tiffin_gateway_requests_total{route="/v1/completions"') == asked
            path = f"/proc/{process.process.pid}/task/{process.process.pid}/children"
            with open(path, encoding="ascii") as file:
                children = [int(pid) for pid in file.read().split()]
            assert len(children) == 2
            os.kill(children[0], signal.SIGKILL)
            for workers in (1, 2):
                while number("tiffin_gateway_workers") != workers:
                    assert time.monotonic() < deadline
                told = number('tiffin_gateway_requests_total{route="/v1/completions"')
                assert told == asked, "a counter does not fall"
            status, log = process.end(signal.SIGTERM)
    assert status == 0, log
    assert f"the gateway answers at {url}/v1" in log
    assert "is started again" in log
    assert "Traceback" not in log
    assert not any(os.path.exists(f"/proc/{pid}") for pid in children)


@pytest.mark.slow
def test_workers_that_can_not_start_end_the_gateway() -> None:
    with GatewayProcess("--workers", "2", "--conductor", "ftp://there") as process:
        assert process.process.wait(PATIENCE_S) == 2
        assert "http://HOST:PORT" in process.log()
