"""Many conversations over a real vLLM that prefills and a real one that decodes; and what clients
see, under load, when a part of that breaks: each part is a process of its own.

Every answer is compared with that of one instance that computes all of it. The processes start
once; a test starts again what it has killed, as an operator would, and afterwards nothing is left.

TIFFIN_VLLM=/path/to/venv/bin/python pytest -m slow \\
    tests/conductor/gateway/test_split_faults_vllm.py
"""

from __future__ import annotations

import contextlib
import itertools
import signal
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import httpx
import psutil
import pytest
from kvsupport import is_quiet, wait_until
from splitloadsupport import DEADLINE_S, Load, Outcome, asked
from splitsupport import ANSWER_TOKENS, BLOCK_TOKENS, NODE_BYTES, Split, body_of, split_vllm
from vllmsupport import MARKS, prompt

from tiffin.kvstore import Client

if TYPE_CHECKING:
    from collections.abc import Iterator

    from connectors.vllmserver import VllmServer

pytestmark = MARKS

CONVERSATIONS = 25
TURNS = 4
# Tokens of the first prompt, and of what users add: below a block, whole blocks, more.
FIRST_TOKENS = (100, BLOCK_TOKENS, 700, 2 * BLOCK_TOKENS, 1100)
MORE_TOKENS = (BLOCK_TOKENS - ANSWER_TOKENS, 90, 2 * BLOCK_TOKENS - ANSWER_TOKENS, 300)
LONG_ANSWER_TOKENS = 150
PATIENCE_S = 3.0  # of engines with the pool: less than the node stands still
QUIET_S = 60.0
STANDSTILL_S = 10.0
NO_ROOM_BYTES = 512 << 10  # half a block


@dataclass
class World:
    """`conversations`: of each, its turns' prompts and what is right to say. `script`: prompts for
    clients that do not converse, some with long answers."""

    split: Split
    conversations: list[list[tuple[list[int], list[int]]]]
    script: list[tuple[list[int], list[int]]]
    processes: int = field(default_factory=lambda: processes())
    seeds: Iterator[int] = field(default_factory=lambda: itertools.count(1))

    def load(self) -> Load:
        return Load(self.split.door.gateway_url, self.script, next(self.seeds))

    def await_loads(self) -> None:
        """Return when the decode instance loads from the pool again."""
        before = self.split.loaded_tokens()
        wait_until(lambda: self.split.loaded_tokens() > before, "blocks are loaded again", 60.0)

    def await_decided(self) -> None:
        """Return when the conductor has placed a request again."""
        ids, expected = self.conversations[0][0]
        with httpx.Client(base_url=self.split.door.gateway_url, trust_env=False) as http:

            def decided() -> bool:
                one = asked(http, ids, expected, False)
                return one.answered and not one.fallback

            wait_until(decided, "the conductor decides again", 60.0)

    def assert_quiet(self) -> None:
        """Nobody has anything left of the requests, and all answer."""
        split = self.split
        for one in (split.prefill, split.decode):
            assert one.healthy()
        with contextlib.suppress(AssertionError):  # says less than what follows
            wait_until(lambda: not self._left(), "nothing is left behind", QUIET_S)
        assert self._left() == {}

    def _left(self) -> dict[str, Any]:
        """What is left of requests."""
        split = self.split
        with Client.open(split.node.url) as client:
            quiet = is_quiet(client.statistics())
        left: dict[str, Any] = {"node": not quiet, "processes": processes() - self.processes}
        for name, one in (("prefill", split.prefill), ("decode", split.decode)):
            for gauge in ("num_requests_running", "num_requests_waiting"):
                left[f"{name} {gauge}"] = one.gauge(gauge)
        gateway = metrics_of(split.door.gateway_url, "tiffin_gateway_")
        for gauge in ("requests_in_flight", "requests_queued", "held_bytes"):
            left[f"gateway {gauge}"] = gateway[gauge]
        conductor = metrics_of(split.door.conductor_url, "tiffin_conductor_")
        left["conductor"] = conductor["requests_in_flight"]
        for instance in instances_of(split):
            load = {name: value for name, value in instance["load"].items() if value}
            left[f"load of {instance['id']}"] = load
        return {name: value for name, value in left.items() if value}


def processes() -> int:
    """How many processes this one has started, and these, that are there."""
    return len(psutil.Process().children(recursive=True))


def metrics_of(url: str, prefix: str) -> dict[str, float]:
    """The metrics without labels."""
    lines = httpx.get(f"{url}/metrics", trust_env=False).text.splitlines()
    named = (line.removeprefix(prefix).rpartition(" ") for line in lines if line.startswith(prefix))
    return {name: float(value) for name, _, value in named if "{" not in name}


def instances_of(split: Split) -> list[dict[str, Any]]:
    """The instances, as the conductor knows them."""
    answer = httpx.get(f"{split.door.conductor_url}/v1/instances", trust_env=False)
    return list(answer.json()["instances"])


def converse(split: Split, number: int) -> list[tuple[list[int], list[int]]]:
    """A conversation's prompts, and what one instance that computes all of it says to them."""
    ids = prompt(number, FIRST_TOKENS[number % len(FIRST_TOKENS)])
    turns = []
    for turn in range(TURNS):
        said = split.alone(ids)
        turns.append((ids, said))
        more = MORE_TOKENS[(number + turn) % len(MORE_TOKENS)]
        ids = [*ids, *said, *prompt(1000 * number + turn, more)]
    return turns


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    with split_vllm(
        tmp_path_factory.mktemp("faults"),
        lookup_timeout_s=PATIENCE_S,
        handoff_timeout_s=PATIENCE_S,
    ) as split:
        with ThreadPoolExecutor(4) as clients:
            talks = list(clients.map(partial(converse, split), range(CONVERSATIONS)))
            prompts = [prompt(9000 + number, 200 + 350 * number) for number in range(8)]
            long = list(clients.map(partial(split.alone, tokens=LONG_ANSWER_TOKENS), prompts))
        script = [turns[number % TURNS] for number, turns in enumerate(talks)]
        yield World(split, talks, [*script, *zip(prompts, long, strict=True)])


def test_a_hundred_prompts_of_conversations(world: World) -> None:
    """Several at once, every other one streamed: tokens are those of one instance, and the decode
    instance has loaded the blocks."""
    before = world.split.loaded_tokens()

    def talk(number: int) -> list[Outcome]:
        with httpx.Client(base_url=world.split.door.gateway_url, trust_env=False) as http:
            http.timeout = DEADLINE_S
            turns = enumerate(world.conversations[number])
            return [asked(http, *pair, (number + turn) % 2 == 0) for turn, pair in turns]

    with ThreadPoolExecutor(5) as clients:
        outcomes = [one for ends in clients.map(talk, range(CONVERSATIONS)) for one in ends]
    for one in outcomes:
        one.assert_right(may_fail=False)
        assert one.route == ("prefill", "decode")
    prompts = [ids for turns in world.conversations for ids, _ in turns]
    assert len(prompts) == len(outcomes) == 100
    most = sum(len(ids) // BLOCK_TOKENS * BLOCK_TOKENS for ids in prompts)
    # On a busy machine a lookup or a decision may take too long.
    assert 0.9 * most <= world.split.loaded_tokens() - before <= most
    assert sum(not one.fallback for one in outcomes) > 90
    world.assert_quiet()


def leave(split: Split, ids: list[int], after_s: float | None, stream: bool) -> None:
    """Ask for a long answer, and hang up: after so many seconds without any of it, None: after its
    first token."""
    body = {**body_of(ids), "max_tokens": 900, "stream": stream}
    with httpx.Client(base_url=split.door.gateway_url, trust_env=False) as http:
        http.timeout = httpx.Timeout(DEADLINE_S, read=DEADLINE_S if after_s is None else after_s)
        with (
            contextlib.suppress(httpx.ReadTimeout),
            http.stream("POST", "/v1/completions", json=body) as response,
        ):
            assert response.status_code == 200, response.read()
            first = next(response.iter_lines())
            assert stream, f"all of the answer is there before {after_s} s: {first[:200]}"
            assert first.startswith("data: {"), first


def test_clients_hang_up(world: World) -> None:
    """While their prompts are prefilled, between the instances, and in mid-stream."""
    split = world.split
    before = cancelled(split)
    prompts = [ids for ids, _ in world.script[-8:]]
    ways = [(None, True), *itertools.product((0.02, 0.1, 0.3), (True, False))]
    with world.load() as load, ThreadPoolExecutor(4) as others:
        load.await_answers()
        for after_s, stream in ways:
            leaving = partial(leave, split, after_s=after_s, stream=stream)
            list(others.map(leaving, prompts))
        load.await_answers()
    load.assert_right()
    # A first token may be there before 0.3 s: that client leaves after it, as others do.
    # Who leaves at once may be gone before the gateway has read what it asked.
    left = len(ways) * len(prompts)
    assert 0.9 * left <= cancelled(split) - before <= left
    world.assert_quiet()


def cancelled(split: Split) -> float:
    """The requests whose client hung up, as the gateway has seen."""
    return metrics_of(split.door.gateway_url, "tiffin_gateway_")["cancelled_total"]


def test_the_node_stands_still(world: World) -> None:
    """Requests are computed by the decode instance meanwhile: none fails."""
    with world.load() as load:
        load.await_answers()
        with world.split.node.stopped():
            ends = time.monotonic() + STANDSTILL_S
            load.await_answers()
            time.sleep(max(0.0, ends - time.monotonic()))
        load.await_answers()
        world.await_loads()
    load.assert_right()
    world.assert_quiet()


def test_the_node_is_killed(world: World) -> None:
    """The same, and the engines find the new one by themselves."""
    with world.load() as load:
        load.await_answers()
        world.split.node.kill()
        load.await_answers()
        world.split.node.start()
        world.await_loads()
        load.await_answers()
    load.assert_right()
    world.assert_quiet()


def test_the_node_has_no_room(world: World) -> None:
    """What the prefill instance can't save, the other one computes."""
    node = world.split.node
    with world.load() as load:
        load.await_answers()
        node.restart(dram=NO_ROOM_BYTES)
        load.await_answers(48)
        node.restart(dram=NODE_BYTES)
        world.await_loads()
        load.await_answers()
    load.assert_right()
    world.assert_quiet()


def test_the_conductor_is_killed(world: World) -> None:
    """The instances take turns: no request fails."""
    door = world.split.door
    with world.load() as load:
        load.await_answers()
        door.conductor.end(signal.SIGKILL)
        load.await_answers()
        door.conductor.start()
        door.conductor.wait_until_it_answers(door.conductor_url)
        world.await_decided()
        load.await_answers()
    load.assert_right()
    assert any(one.fallback for one in load.outcomes)
    world.assert_quiet()


@pytest.mark.parametrize("name", ["prefill", "decode"])
def test_an_instance_is_killed(world: World, name: str) -> None:
    """There is no other one: its requests fail, and say so."""
    instance: VllmServer = getattr(world.split, name)
    with world.load() as load:
        load.await_answers()
        killed_at = time.monotonic()
        instance.kill_all()
        load.await_ends()
        instance.start()
        instance.wait()
        world.await_decided()
        served_at = time.monotonic()
        load.await_answers(32)
        world.await_loads()
    load.assert_right(killed_at, served_at)
    errors = Counter(one.error for one in load.outcomes)
    # On a busy machine the conductor may be late, and no other instance can be asked.
    nobody = {"no_instance", f"rejected_no_{name}", "unavailable"}
    assert nobody & set(errors)
    assert set(errors) <= {"", "engine_failed", "500", *nobody}
    world.assert_quiet()
