"""What operators read from the gateway's /metrics is what clients measure: a real vLLM prefills,
another one decodes.

TIFFIN_VLLM=/path/to/venv/bin/python pytest -m slow tests/conductor/gateway/test_latency_vllm.py
"""

from __future__ import annotations

import json
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import streamclient
from latencysupport import SHARES, exact, quantile, total
from splitsupport import Split, body_of, split_vllm
from vllmsupport import MARKS, prompt

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = MARKS

CLIENTS = 3
STREAMS = 60  # of each client
ANSWER_TOKENS = 96  # so that more than a hundred gaps are above the p99
PATIENCE_S = 300.0


@pytest.fixture(scope="module")
def split(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Split]:
    folder = tmp_path_factory.mktemp("latency")
    # A model whose steps take ten milliseconds, as those of real ones do. In production engines are
    # on other machines: here the gateway and its clients go first.
    with split_vllm(folder, niceness=10, size={"hidden": 768, "layers": 8}) as it:
        yield it


def bodies(seed: int, streams: int) -> str:
    """Requests with prompts of many lengths, a line each."""
    prompts = (prompt(1000 * seed + n, 40 + (n * 397 + seed * 131) % 600) for n in range(streams))
    made = ({**body_of(ids), "max_tokens": ANSWER_TOKENS, "stream": True} for ids in prompts)
    return "".join(json.dumps(one) + "\n" for one in made)


def run_clients(url: str, seed: int, streams: int) -> list[list[float]]:
    """Run all clients at a time; returns the arrivals of each stream's tokens."""
    command = [sys.executable, str(Path(streamclient.__file__)), url.removeprefix("http://")]
    clients = [
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        for _ in range(CLIENTS)
    ]
    try:
        for number, one in enumerate(clients):
            assert one.stdin is not None
            one.stdin.write(bodies(seed + number, streams))
            one.stdin.close()
            one.stdin = None
        said = [one.communicate(timeout=PATIENCE_S)[0] for one in clients]
    finally:
        for one in clients:
            one.kill()
            one.wait()
    assert [one.returncode for one in clients] == [0] * CLIENTS
    return [json.loads(line) for text in said for line in text.splitlines()]


def test_quantiles_are_those_of_the_clients(split: Split) -> None:
    run_clients(split.door.gateway_url, 1, 4)  # warms up
    before = split.gateway.get("/metrics").content
    streams = run_clients(split.door.gateway_url, 10, STREAMS)
    after = split.gateway.get("/metrics").content
    assert len(streams) == CLIENTS * STREAMS

    measured = {
        ("ttft", "prefill"): [one[0] for one in streams],
        ("itl", "decode"): [b - a for one in streams for a, b in pairwise(one)],
    }
    off: dict[tuple[str, str, float], float] = {}
    for (name, role), seconds in measured.items():
        metric = f"tiffin_gateway_{name}_seconds"
        now, then = (total(text, f"{metric}_count", role=role) for text in (after, before))
        assert now - then == len(seconds)
        for share in SHARES:
            found = quantile(after, metric, share, before, role=role)
            client = exact(seconds, share)
            off[name, role, share] = found / client - 1
            print(
                f"{name} of {role:7} p{100 * share:.0f}: client {1e3 * client:7.2f} ms, "
                f"/metrics {1e3 * found:7.2f} ms, {off[name, role, share]:+.1%}"
            )
    assert {key: one for key, one in off.items() if abs(one) > 0.05} == {}
