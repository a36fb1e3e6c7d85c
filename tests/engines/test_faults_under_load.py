"""Servers under load, with a node and with a pool, while what they store to breaks.

Every answer is compared with that of an engine without a pool. The servers start once: the tests
harm what is around them, in turn, and the last one kills an engine. Two servers compute what they
can't load; a third ends such a request with an error (`kv_load_failure_policy`).
"""

from __future__ import annotations

import random
import time
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
from directory.ports import free_port
from directory.redisserver import RedisServer
from generationsupport import Engine, Tokens, converse_with_many, loadable, transfer
from kvsupport import Daemon, damage, is_quiet, wait_until
from loadsupport import Load, ask_once, leave
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
POLICIES = pytest.mark.parametrize("policy", ["recompute", "fail"])
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
    with the node `far`, behind a `relay`; so has `strict`, whose policy is `fail`. `script`:
    prompts and their answers; `blocks`: all of their blocks. `distant`: prompts that only `far`
    has, each to be asked once."""

    near: Daemon
    far: Daemon
    redis: RedisServer
    relay: SlowRelay
    pool_url: str
    direct: Server
    pooled: Server
    strict: Server
    script: list[tuple[Tokens, Tokens]]
    blocks: list[tuple[int, Prefix]]
    distant: list[tuple[Tokens, Tokens, Prefix]]
    seeds: Iterator[int] = field(default_factory=lambda: iter(range(100)))

    def servers(self, policy: str) -> list[Server]:
        return [self.strict] if policy == "fail" else [self.direct, self.pooled]

    def load(self, policy: str = "recompute") -> Load:
        may_fail = policy == "fail"
        return Load(self.servers(policy), self.script, next(self.seeds), may_fail)

    def await_loads(self, policy: str = "recompute") -> None:
        """Return when the servers load again."""
        for server in self.servers(policy):
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
        assert (answer.tokens, answer.cached) == (said, loadable(prompt))

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
        for server in (self.direct, self.pooled, self.strict):
            assert server.healthy()


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
        direct, pooled, strict = (
            stack.enter_context(Server(model, transfer(url, "", policy, **SETTINGS), folder / name))
            for url, policy, name in (
                (near.url, "recompute", "direct.log"),
                (home_url, "recompute", "pooled.log"),
                (home_url, "fail", "strict.log"),
            )
        )
        yield World(
            *(near, far, redis, relay, f"{pool_url}&home=none", direct, pooled, strict),
            *(script, blocks),
            [(*pair, prefix) for pair, prefix in zip(far_script, far_prefixes, strict=True)],
        )


def test_without_a_fault_all_is_loaded(world: World) -> None:
    """What the other tests compare with."""
    expected = [(said, loadable(prompt)) for prompt, said in world.script]

    def all_is_loaded(server: Server) -> bool:
        answers = server.generate([prompt for prompt, _ in world.script])
        assert [answer.tokens for answer in answers] == [said for said, _ in expected]
        # On a busy machine a lookup may take too long.
        return [answer.cached for answer in answers] == [cached for _, cached in expected]

    for server in (world.direct, world.pooled, world.strict):
        wait_until(partial(all_is_loaded, server), "all is loaded", 120.0)
    world.load_distant()
    world.assert_quiet()


@POLICIES
def test_a_node_is_killed_and_comes_back(world: World, policy: str) -> None:
    with world.load(policy) as load:
        load.await_answers()
        world.near.kill()
        load.await_answers()
        world.near.start()
        world.await_loads(policy)
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


@POLICIES
def test_blocks_are_corrupted(world: World, policy: str) -> None:
    """One in a hundred, and three at least."""
    (server, *_) = world.servers(policy)
    chosen = random.Random(6).sample(world.blocks, max(3, len(world.blocks) // 100))
    before = world.statistics(world.near)["counters"]["corrupt"]
    with world.load(policy) as load, Client.open(world.near.url, verify="off") as client:
        for number, _ in chosen:  # the node has begun anew before
            server.complete(world.script[number][0])
        stored = [prefix for _, prefix in chosen]
        wait_until(lambda: all(client.match(one).blocks == len(one) for one in stored), "stored")
        for _, prefix in chosen:
            with client.get(prefix) as blocks:
                assert blocks.complete, blocks.reason
                memory = blocks[-1].memory
                for at in range(3, len(memory), len(memory) // 16 // 4 * 4):
                    damage(memory, at)
        for number, _ in chosen:
            outcome = ask_once(server, *world.script[number])
            outcome.assert_right(may_fail=policy == "fail")
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


@POLICIES
def test_loads_are_slower_than_their_deadline(world: World, policy: str) -> None:
    """A block takes six seconds, and a load has two; the prompts are asked beside the load."""
    server = world.servers(policy)[-1]
    failures = server.counter("load_failures")
    with world.load(policy) as load:
        world.relay.rest_s = 0.1
        ends = [ask_once(server, *world.distant.pop()[:2], stream) for stream in (True, False) * 2]
        world.relay.rest_s = 0.0
        world.await_loads(policy)
    for outcome in ends:
        outcome.assert_right(may_fail=policy == "fail")
    assert any(outcome.failed for outcome in ends) == (policy == "fail")
    load.assert_right()
    assert server.counter("load_failures") > failures
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
        world.direct.engine().kill()
        load.await_answers(32, of=[world.pooled])
    load.assert_right(world.pooled)
    load.assert_ended(world.direct)
    wait_until(lambda: not world.direct.healthy(), "the server knows that its engine is dead")
    wait_until(
        lambda: len(world.statistics(world.near)["sessions"]) < sessions, "its session ends", 60.0
    )
    wait_until(lambda: is_quiet(world.statistics(world.near)), "no lease is left", QUIET_S)
    assert world.pooled.healthy()
