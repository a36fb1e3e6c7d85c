"""The soak of the gateway detects what it looks for; a short run of it finds nothing."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import socket
import subprocess
import sys
import time
from typing import TYPE_CHECKING

import psutil
import pytest

from .soak import campaign
from .soak.campaign import WorkerKill, uncounted, unexplained
from .soak.clients import STREAM_TOKENS, Answer, Broken, Connection, Load, judge, request
from .soak.front_door import clients_of, has_ended
from .soak.memory import LIVE_ON, Growth, Memory, grown, memory_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from .soak.memory import Sample

SHORT_S = 25.0


def answer(status: int, body: str | bytes) -> Answer:
    return Answer(status, body=bytearray(body if isinstance(body, bytes) else body.encode()))


def error(code: str) -> str:
    return json.dumps({"error": {"code": code, "message": "no"}})


def stream(tokens: int, last: str) -> str:
    return 'data: {"choices": [{}]}\n\n' * tokens + f"data: {last}\n\n"


@pytest.mark.parametrize(
    ("status", "body", "what", "clear"),
    [
        (200, '{"choices": [{}]}', "answer", True),
        (200, '{"choices": []}', "no choices", False),
        (200, '{"choi', "no JSON", False),
        (503, error("not_placed"), "503 not_placed", True),
        (500, error("not_placed"), "500 not_placed", False),
        (500, error("internal_error"), "500 internal_error", False),
        (502, "<html>", "no JSON", False),
    ],
)
def test_an_answer_is_whole_or_a_clear_error(
    status: int, body: str, what: str, *, clear: bool
) -> None:
    said, found = judge(answer(status, body), stream=False)
    assert what in said
    assert found == clear


@pytest.mark.parametrize(
    ("body", "what", "clear"),
    [
        (stream(STREAM_TOKENS, "[DONE]"), "stream", True),
        (stream(STREAM_TOKENS - 1, "[DONE]"), "19 of 20 tokens", False),
        (stream(3, error("engine_failed")), "event engine_failed", True),
        (stream(3, error("internal_error")), "event internal_error", False),
        (stream(3, '{"choices": [{}]}'), "without [DONE]", False),
        ("", "without [DONE]", False),
    ],
)
def test_a_stream_ends_or_tells_of_an_error(body: str, what: str, *, clear: bool) -> None:
    said, found = judge(answer(200, body), stream=True)
    assert what in said
    assert found == clear


def test_a_connection_may_break_with_its_own_worker_alone() -> None:
    kills = [WorkerKill(10.0, 10.1, frozenset({4000}))]
    own = (10.2, Broken(4000, 1.0, "reset"))
    new = (10.2, Broken(0, 10.05, "reset"))
    other = (10.2, Broken(4001, 1.0, "reset"))
    later = (60.0, Broken(4000, 1.0, "reset"))
    assert unexplained([own, new], kills) == []
    assert len(unexplained([own, other, later], kills)) == 2


def test_a_worker_lives_as_long_as_its_last_thread() -> None:
    """Its first thread is a zombie before that, and the system still gives it connections: those
    broke after it was taken for dead."""
    exit_thread = {"x86_64": 60, "aarch64": 93}[os.uname().machine]
    program = (
        "import ctypes, sys, threading; threading.Thread(target=sys.stdin.read).start(); "
        f"ctypes.CDLL(None).syscall({exit_thread}, 0)"
    )
    with subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE) as process:
        while psutil.Process(process.pid).status() != psutil.STATUS_ZOMBIE:
            time.sleep(0.01)
        assert not has_ended(process.pid)
        process.kill()
        while not has_ended(process.pid):
            time.sleep(0.01)
        process.wait()
    assert has_ended(process.pid)


def test_fallbacks_that_the_metric_lacks_are_found() -> None:
    assert uncounted(answers=5, metric=4.0, uncertain=1) == []
    assert uncounted(answers=5, metric=4.0, uncertain=0) == ["1 fallbacks were not counted"]


def samples(growth_mib: float, lives: Sequence[str] = LIVE_ON, seconds: int = 900) -> list[Sample]:
    """Samples of processes that grow by so much in all; what is of files grows in any case."""

    def at(s: int) -> Memory:
        own_mib = 90 + growth_mib * s / seconds
        return Memory(own_mib, own_mib + 30 + 5 * s / seconds)

    return [(s, {f"{name} 7": at(s) for name in lives}) for s in range(seconds)]


def test_memory_that_grows_is_found() -> None:
    memory = memory_of(samples(0.0), 900.0)
    assert list(memory) == [f"{name} 7" for name in LIVE_ON]
    assert {(one.from_min, one.grown_mib) for one in memory.values()} == {(5.0, 0.0)}
    assert grown(memory, 900.0) == []
    more = memory_of(samples(9.0), 900.0)
    assert grown(more, 900.0) == [
        f"{name} 7 grew by 5.1 MiB from minute 5 to the end" for name in LIVE_ON
    ]
    assert grown(memory_of(samples(0.0, ["gateway", "worker"]), 900.0), 900.0) == [
        "the conductor did not live to the end"
    ]


def test_a_shorter_run_is_watched_for_the_same_part_and_is_told() -> None:
    memory = memory_of(samples(9.0, seconds=360), 360.0)
    assert {one.from_min for one in memory.values()} == {2.0}
    assert {round(one.grown_mib, 1) for one in memory.values()} == {5.1}
    assert grown(memory, 360.0) == []
    one = Growth(10.0, Memory(90.0, 120.0), Memory(91.5, 119.0))
    assert one.told() == {
        "own_grown": 1.5, "own_at_minute_10": 90.0, "own_at_the_end": 91.5,
        "rss_at_minute_10": 120.0, "rss_at_the_end": 119.0,
    }  # fmt: skip


def test_a_connection_that_breaks_within_an_answer_says_from_where() -> None:
    async def half(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 10\r\n\r\nhalf")
        writer.close()

    async def scenario() -> None:
        server = await asyncio.start_server(half, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        raw, _ = request(port, random.Random(1))
        with pytest.raises(Broken) as broken:
            await Connection(port).ask(raw)
        assert broken.value.port != 0
        load = Load(port, seed=1)
        with contextlib.suppress(TimeoutError):
            await load.run(rate=50.0, seconds=0.2)
        assert set(load.outcomes) == {"broken connection"}
        assert load.findings == []
        load.close()
        server.close()

    asyncio.run(scenario())


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_no_kill_costs_an_answer_without_a_word() -> None:
    report = campaign.soak(SHORT_S, seed=1, calm_s=3.0)
    assert report["answers"] == [], report
    assert report["leaks"] == [], report
    assert report["outcomes"]["answer"] > 0
    assert report["outcomes"]["stream"] > 0
    assert len(report["faults"]) >= 2, report["faults"]  # a busy machine has time for no more


ACCEPTS_TWO = """
import socket, sys, time
with socket.create_server(("127.0.0.1", 0)) as door:
    print(door.getsockname()[1], flush=True)
    held = [door.accept() for _ in range(2)]
    print("accepted", flush=True)
    time.sleep(600)
"""


def test_clients_of_a_process_are_those_that_it_has_accepted_and_those_that_wait() -> None:
    command = [sys.executable, "-c", ACCEPTS_TWO]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        port = int(process.stdout.readline())
        clients = [socket.create_connection(("127.0.0.1", port)) for _ in range(3)]
        assert process.stdout.readline() == "accepted\n"
        found = clients_of(process.pid, port)
        assert found == {client.getsockname()[1] for client in clients}
        for client in clients:
            client.close()
        process.kill()
