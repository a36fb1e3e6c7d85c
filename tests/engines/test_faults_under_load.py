"""Two servers under load, one with a node and one with a pool, while what they store to breaks.

Every answer is compared with that of an engine without a pool. The servers start once: the tests
harm what is around them, in turn, and the last one kills an engine.
"""

from __future__ import annotations

import random
import time
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import openai
import pytest
from directory.ports import free_port
from directory.redisserver import RedisServer
from generationsupport import Engine, Tokens, converse_with_many, loadable, transfer
from kvsupport import Daemon, damage, is_quiet, wait_until
from loadsupport import CLIENTS, DEADLINE_S, Load, leave
from serversupport import Server
from tcpsupport import Relay

from tiffin.kvstore import Client

if TYPE_CHECKING:
    import socket
    from collections.abc import Iterator
    from pathlib import Path

    from tiffin.kvstore import Prefix

pytestmark = pytest.mark.timeout(900)

NODE_BYTES = 256 << 20
SMALL_NODE_BYTES = 8 << 20  # seven blocks; the prompts have some thirty
# A load must be able to fail well before its request does.
SETTINGS = {"load_timeout_s": 2.0}
QUIET_S = 60.0  # the longest that a lease of a killed engine may last


class SlowRelay(Relay):
    """A relay that can rest after each 16 KiB."""

    rest_s = 0.0

    def _pump(self, source: socket.socket, sink: socket.socket, counted: bool) -> None:
        slow: Any = _Slow(source, self)
        super()._pump(slow, sink, counted)


class _Slow:
    """A socket from which little is received at a time."""

    def __init__(self, source: socket.socket, relay: SlowRelay) -> None:
        self._source, self._relay = source, relay

    def recv(self, nbytes: int) -> bytes:
        time.sleep(self._relay.rest_s)
        return self._source.recv(min(nbytes, 16 << 10))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._source, name)


@dataclass
class World:
    """`direct` knows the node `near`; `pooled` has it as its home in a pool, with a directory and
    with the node `far`, behind a `relay`. `script`: prompts and their answers; `blocks`: all of
    their blocks. `distant`: prompts that only `far` has, each to be asked once."""

    near: Daemon
    far: Daemon
    redis: RedisServer
    relay: SlowRelay
    pool_url: str
    direct: Server
    pooled: Server
    script: list[tuple[Tokens, Tokens]]
    blocks: list[tuple[int, Prefix]]
    distant: list[tuple[Tokens, Tokens, Prefix]]
    seeds: Iterator[int] = field(default_factory=lambda: iter(range(100)))

    def load(self) -> Load:
        return Load([self.direct, self.pooled], self.script, next(self.seeds))

    def await_loads(self) -> None:
        """Return when both servers load again."""
        for server in (self.direct, self.pooled):
            before = server.counter("loaded_tokens")
            wait_until(
                lambda server=server, before=before: server.counter("loaded_tokens") > before,  # type: ignore[misc]
                "a server loads from the pool again",
                60.0,
            )

    def load_distant(self) -> None:
        """A prompt that is far away is loaded from there, once the directory has it."""
        prompt, said, prefix = self.distant.pop()
        with Client.open(self.pool_url) as client:
            wait_until(lambda: client.match(prefix).blocks == len(prefix), "it is listed", 60.0)
        answer = self.pooled.complete(prompt)
        assert (answer.tokens, answer.cached) == (said, loadable(prompt, 128))

    def statistics(self, node: Daemon) -> dict[str, Any]:
        with Client.open(node.url) as client:
            return client.statistics()

    def assert_quiet(self) -> None:
        """No lease and no reservation is left, and the servers are well."""
        for node in (self.near, self.far):
            wait_until(
                lambda node=node: is_quiet(self.statistics(node)),  # type: ignore[misc]
                "no lease and no reservation is left",
                QUIET_S,
            )
        assert self.direct.healthy()
        assert self.pooled.healthy()


def store(model: Path, node: Daemon, script: list[tuple[Tokens, Tokens]]) -> list[Prefix]:
    """Store the blocks of prompts in a node; returns their names."""
    with Engine(model, transfer(node.url, ""), max_num_seqs=8) as engine:
        engine.generate([prompt for prompt, _ in script])
        return [engine.prefix(prompt) for prompt, _ in script]


def blocks_of(prefixes: list[Prefix]) -> list[tuple[int, Prefix]]:
    """Each block once: the number of a prompt that has it, and the prefix that ends with it."""
    found = {
        prefix.keys[index]: (number, prefix[: index + 1])
        for number, prefix in enumerate(prefixes)
        for index in range(len(prefix))
    }
    return list(found.values())


@pytest.fixture(scope="module")
def world(model_folders: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    model, folder = model_folders / "llama", tmp_path_factory.mktemp("faults")
    with Engine(model, enable_prefix_caching=False, max_num_seqs=8) as engine:
        turns = converse_with_many(engine, seed=4, conversations=10)
        (*_, distant) = converse_with_many(engine, seed=5, conversations=16, turns=3)
    script = [pair for turn in turns for pair in zip(turn.prompts, turn.said, strict=True)]
    with ExitStack() as stack:
        redis = stack.enter_context(RedisServer(folder))
        member = ("--directory", redis.url, "--pool", "faults")
        near = Daemon(dram=NODE_BYTES, options=[*member, "--listen", "127.0.0.1:0"])
        stack.callback(near.close)
        port = free_port()
        relay = SlowRelay(("127.0.0.1", port))
        stack.callback(relay.close)
        behind = ("--listen", f"127.0.0.1:{port}")
        behind += ("--advertise", f"127.0.0.1:{relay.address[1]}")
        far = Daemon(dram=NODE_BYTES, options=[*member, *behind])
        stack.callback(far.close)
        blocks = blocks_of(store(model, near, script))
        far_script = list(zip(distant.prompts, distant.said, strict=True))
        far_prefixes = store(model, far, far_script)
        pool_url = f"{redis.url}?pool=faults&admission=never"
        home_url = f"{pool_url}&home={near.socket}"
        direct, pooled = (
            stack.enter_context(Server(model, transfer(url, "", **SETTINGS), folder / name))
            for url, name in ((near.url, "direct.log"), (home_url, "pooled.log"))
        )
        yield World(
            *(near, far, redis, relay, f"{pool_url}&home=none", direct, pooled, script, blocks),
            [(*pair, prefix) for pair, prefix in zip(far_script, far_prefixes, strict=True)],
        )


def test_without_a_fault_both_load_all(world: World) -> None:
    """What the other tests compare with."""
    for server in (world.direct, world.pooled):
        answers = server.generate([prompt for prompt, _ in world.script])
        assert [answer.tokens for answer in answers] == [said for _, said in world.script]
        cached = [answer.cached for answer in answers]
        assert cached == [loadable(prompt, 128) for prompt, _ in world.script]
    world.load_distant()
    world.assert_quiet()


def test_a_node_is_killed_and_comes_back(world: World) -> None:
    with world.load() as load:
        load.await_answers()
        world.near.kill()
        load.await_answers()
        world.near.start()
        world.await_loads()
    load.assert_right()
    world.assert_quiet()


def test_a_node_stands_still_for_ten_seconds(world: World) -> None:
    with world.load() as load:
        load.await_answers()
        with world.near.stopped():
            ends = time.monotonic() + 10.0
            load.await_answers()
            time.sleep(max(0.0, ends - time.monotonic()))
        world.await_loads()
    load.assert_right()
    world.assert_quiet()


def test_blocks_are_corrupted(world: World) -> None:
    """One in a hundred, and three at least."""
    chosen = random.Random(6).sample(world.blocks, max(3, len(world.blocks) // 100))
    before = world.statistics(world.near)["counters"]["corrupt"]
    with world.load() as load, Client.open(world.near.url, verify="off") as client:
        load.await_answers()
        for _, prefix in chosen:
            with client.get(prefix) as blocks:
                assert blocks.complete, blocks.reason
                memory = blocks[-1].memory
                for at in range(3, len(memory), len(memory) // 16 // 4 * 4):
                    damage(memory, at)
        for number, _ in chosen:
            prompt, said = world.script[number]
            assert world.direct.complete(prompt).tokens == said
        load.await_answers()
    load.assert_right()
    assert world.statistics(world.near)["counters"]["corrupt"] > before  # somebody has read them
    world.assert_quiet()


def test_a_node_is_too_small(world: World) -> None:
    with world.load() as load:
        load.await_answers()
        world.near.restart(dram=SMALL_NODE_BYTES)
        load.await_answers(32)
        numbers = world.statistics(world.near)
        world.near.restart(dram=NODE_BYTES)
        world.await_loads()
    load.assert_right()
    assert numbers["counters"]["evictions"] > 0
    world.assert_quiet()


def test_the_directory_is_gone_and_comes_back_empty(world: World) -> None:
    with world.load() as load:
        load.await_answers()
        world.redis.kill()
        load.await_answers()
        world.redis.start()
        world.await_loads()
    load.assert_right()
    world.load_distant()
    world.assert_quiet()


def test_loads_are_slower_than_their_deadline(world: World) -> None:
    """A block takes six seconds, and a load has two; the prompts are asked beside the load."""
    failures = world.pooled.counter("load_failures")
    with world.load() as load:
        world.relay.rest_s = 0.1
        for _ in range(4):
            prompt, said, _ = world.distant.pop()
            began = time.monotonic()
            assert world.pooled.complete(prompt).tokens == said
            assert time.monotonic() - began < DEADLINE_S + 1
        world.relay.rest_s = 0.0
        world.await_loads()
    load.assert_right()
    assert world.pooled.counter("load_failures") > failures
    world.assert_quiet()


def test_clients_leave_in_the_middle_of_their_streams(world: World) -> None:
    with world.load() as load:
        load.await_answers()
        for prompt, _ in world.script[:8]:
            leave(world.direct, prompt)
            leave(world.pooled, prompt)
        load.await_answers()
    load.assert_right()
    world.assert_quiet()


def test_an_engine_is_killed_and_the_other_goes_on(world: World) -> None:
    sessions = len(world.statistics(world.near)["sessions"])
    with world.load() as load:
        load.await_answers()
        world.direct.kill_engine()
        load.await_answers(32, of=[world.pooled])
    load.assert_right(world.pooled)
    load.assert_in_time(world.direct)
    errors = [one.error for one in load.outcomes(world.direct) if one.error is not None]
    assert len(errors) == CLIENTS
    assert all(isinstance(error, openai.APIError) for error in errors)
    right = [one for one in load.outcomes(world.direct) if one.error is None]
    assert [one.said for one in right] == [one.expected for one in right]
    wait_until(lambda: not world.direct.healthy(), "the server knows that its engine is dead")
    wait_until(
        lambda: len(world.statistics(world.near)["sessions"]) < sessions, "its session ends", 60.0
    )
    wait_until(lambda: is_quiet(world.statistics(world.near)), "no lease is left", QUIET_S)
    assert world.pooled.healthy()
