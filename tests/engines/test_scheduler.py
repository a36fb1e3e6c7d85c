"""The connector under vLLM's own scheduler and cache manager, with a model that is arithmetic."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

import pytest
from arithmetic import LAYERS, WORD_BYTES
from kvsupport import is_quiet, wait_until
from schedulersupport import BLOCK_TOKENS, Engine

from tiffin.kvstore import Client
from tiffin.kvstore.connectors.vllm import TiffinConnector
from tiffin.kvstore.errors import StaleLease

if TYPE_CHECKING:
    from collections.abc import Callable


@pytest.fixture
def start_second(start: Callable[..., Engine]) -> Callable[..., Engine]:
    """A function that starts an engine, after another one has stored `STORED`."""

    def start_second(**changes: Any) -> Engine:
        start().answer(STORED)
        return start(**changes)

    return start_second


def prompt(count: int, seed: int = 0) -> list[int]:
    return [(index * 7919 + seed * 104729 + 13) % 997 for index in range(count)]


STORED = prompt(100)
AHEAD = pytest.mark.parametrize("ahead", [False, True], ids=["one-by-one", "ahead"])
# Blocks are leased before they are loaded, or not.
HELD = [
    pytest.param({"loading": "synchronous"}, id="synchronous"),
    pytest.param({"loading": "synchronous", "ahead": True}, id="synchronous-ahead"),
    pytest.param({"loading": "asynchronous"}, id="asynchronous"),
]
UNHELD = [
    pytest.param({"holds": False}, id="unheld"),
    pytest.param({"holds": False, "ahead": True}, id="unheld-ahead"),
]
WAYS = pytest.mark.parametrize("way", [*HELD, *UNHELD])
POLICIES = pytest.mark.parametrize("policy", ["recompute", "fail"])
Way = dict[str, Any]
BLOCK_BYTES = LAYERS * BLOCK_TOKENS * WORD_BYTES


@WAYS
def test_an_engine_loads_what_another_computed(start: Callable[..., Engine], way: Way) -> None:
    tokens = prompt(100)
    assert start(**way).answer(tokens).cached == 0
    assert start(**way).answer(tokens).cached == 96


# -- hits ------------------------------------------------------------------------------------------


@POLICIES
def test_a_local_hit_that_ends_inside_a_block_is_filled_up(
    start_second: Callable[..., Engine], policy: str
) -> None:
    engine = start_second(policy=policy)
    engine.answer([*STORED[:40], *prompt(10, seed=1)])
    assert engine.answer(STORED).cached == 96
    load = engine.ordered[-1]
    assert (load.prefix.start, load.skipped_pages, len(load.pages)) == (2, 2, 14)


@WAYS
def test_a_prompt_that_is_whole_blocks_leaves_a_token_to_compute(
    start: Callable[..., Engine], way: Way
) -> None:
    tokens = prompt(96)
    start().answer(tokens)
    assert start(**way).answer(tokens).cached == 95


@WAYS
def test_chunked_prefills_store_and_load(start: Callable[..., Engine], way: Way) -> None:
    tokens = prompt(200)
    chunked = start(batch_tokens=24, **way)
    chunked.answer(tokens)
    assert len(chunked.saved) == 12
    assert start(batch_tokens=24, **way).answer(tokens).cached == 192


@AHEAD
def test_what_was_said_is_stored_for_the_next_turn(
    start: Callable[..., Engine], ahead: bool
) -> None:
    engine = start(ahead=ahead)
    tokens = prompt(20)
    said = engine.answer(tokens, 30)
    turn = [*tokens, *said.tokens]
    # The last token that is said has no entry yet.
    assert start(ahead=ahead).answer([*turn, 5, 6, 7], 4).cached == 48


def test_without_an_own_cache_the_pool_serves_alone(start: Callable[..., Engine]) -> None:
    engine = start(caching=False)
    engine.answer(prompt(100))
    assert engine.answer(prompt(100)).cached == 96


def test_a_request_waits_for_its_lookup_while_others_run(
    start_second: Callable[..., Engine],
) -> None:
    engine = start_second()
    engine.lookups.held = True
    waiting = engine.add(STORED)
    engine.step()
    assert engine.status(waiting) == "WAITING"
    engine.lookups.held = False
    engine.answer(prompt(50, seed=1))
    assert engine.told[waiting].cached == 96


# -- failures --------------------------------------------------------------------------------------


@pytest.mark.parametrize("way", HELD)
def test_blocks_are_held_and_loaded_as_it_is_set(
    start_second: Callable[..., Engine], way: Way
) -> None:
    engine = start_second(**way)
    engine.answer(STORED)
    (load,) = engine.ordered
    assert load.held is not None
    assert load.synchronous is (way["loading"] == "synchronous")


@pytest.mark.parametrize("way", HELD)
@POLICIES
@pytest.mark.parametrize("blocks", [1, 3, 5])
def test_what_could_not_be_leased_is_computed(
    start_second: Callable[..., Engine], way: Way, policy: str, blocks: int
) -> None:
    """Also under the policy `fail`: the engine was not promised these blocks."""
    engine = start_second(policy=policy, **way)
    engine.faults.next_gets.append(blocks)
    told = engine.answer(STORED, 8)
    assert (told.reason, told.cached) == ("length", 16 * blocks)


@pytest.mark.parametrize("way", HELD)
def test_without_a_lease_blocks_are_loaded_asynchronously(
    start_second: Callable[..., Engine], way: Way
) -> None:
    engine = start_second(**way)
    engine.faults.next_gets.append(0)
    assert engine.answer(STORED, 8).cached == 96
    (load,) = engine.ordered
    assert (load.held, load.synchronous) == (None, False)


@pytest.mark.parametrize("way", HELD)
@POLICIES
def test_what_is_held_is_loaded_although_the_pool_forgets_it(
    start_second: Callable[..., Engine], way: Way, policy: str
) -> None:
    engine = start_second(policy=policy, batch_tokens=24, **way)
    engine.loads.held = True
    request = engine.add(STORED, 8)
    if way["loading"] == "asynchronous":
        engine.step()
        assert engine.ordered[0].held is not None
        with Client.open(engine.options.url) as client:
            client.remove(engine.prefix(STORED))
            client.put(engine.prefix(prompt(5000, seed=9)), [bytes(BLOCK_BYTES)] * 312)
    engine.finish()
    assert engine.told[request].cached == 96
    assert engine.told[request].reason == "length"


@pytest.mark.parametrize("way", UNHELD)
@POLICIES
@pytest.mark.parametrize("blocks", [0, 1, 3, 5])
def test_what_could_not_be_loaded_is_computed(
    start_second: Callable[..., Engine], way: Way, policy: str, blocks: int
) -> None:
    engine = start_second(policy=policy, **way)
    engine.faults.next_gets.append(blocks)
    reason = engine.answer(STORED, 8).reason
    assert reason == ("error" if policy == "fail" else "length")


@pytest.mark.parametrize("way", UNHELD)
def test_a_block_that_can_never_be_loaded_is_asked_for_once(
    start_second: Callable[..., Engine], way: Way
) -> None:
    engine = start_second(**way)
    engine.faults.next_gets += [0] * 20_000
    engine.answer(STORED, 8)
    assert len(engine.ordered) == 1


@pytest.mark.parametrize("way", UNHELD)
def test_under_the_policy_fail_only_the_request_ends(
    start_second: Callable[..., Engine], way: Way
) -> None:
    engine = start_second(policy="fail", **way)
    engine.faults.next_gets.append(2)
    assert engine.answer(STORED, 8).reason == "error"
    assert engine.answer(STORED, 8).reason == "length"


@WAYS
def test_requests_that_share_a_failed_load_are_right(
    start_second: Callable[..., Engine], way: Way
) -> None:
    engine = start_second(**way)
    engine.faults.next_gets += [3, 3]
    for tail in range(3):
        engine.add([*STORED, *prompt(40, seed=tail)], 20)
    engine.finish()


@AHEAD
@POLICIES
def test_vllms_cache_never_offers_pages_whose_load_failed(
    start_second: Callable[..., Engine], ahead: bool, policy: str
) -> None:
    engine = start_second(ahead=ahead, policy=policy, holds=False)
    engine.faults.next_gets.append(2)
    request = engine.add(STORED)
    engine.step()
    engine.abort(request)  # nobody computes what its load has left out
    assert engine.answer(STORED, 8).reason == "length"


# -- requests that leave ---------------------------------------------------------------------------


@AHEAD
def test_a_request_that_is_aborted_while_it_loads_gives_its_pages_back(
    start_second: Callable[..., Engine], ahead: bool
) -> None:
    engine = start_second(loading="asynchronous", ahead=ahead)
    engine.loads.held = True
    request = engine.add(STORED)
    engine.step()
    assert engine.status(request) == "WAITING_FOR_REMOTE_KVS"
    engine.abort(request)
    engine.step()
    assert engine.free_pages() < engine.options.pages - 1  # the load may still write them
    engine.finish()


def test_the_pages_of_a_save_are_kept_until_it_ends(start: Callable[..., Engine]) -> None:
    engine = start()
    engine.saves.held = True
    request = engine.add(prompt(100))
    for _ in range(5):
        engine.step()
    assert engine.status(request) == "FINISHED_LENGTH_CAPPED"
    assert engine.free_pages() < engine.options.pages - 1
    engine.finish()
    assert start().answer(prompt(100)).cached == 96


@WAYS
def test_preempted_requests_load_again_and_end_right(
    start: Callable[..., Engine], way: Way
) -> None:
    engine = start(pages=60, **way)
    for seed in range(4):
        engine.add(prompt(50, seed), 60)
    engine.finish()
    assert engine.preempted
    assert engine.ordered


def test_a_save_of_a_preempted_request_is_given_up(start: Callable[..., Engine]) -> None:
    engine = start(pages=60)
    engine.saves.held = True
    for seed in range(4):
        engine.add(prompt(50, seed), 60)
    while not engine.preempted:
        engine.step()
    engine.finish()


# -- all of it at once -----------------------------------------------------------------------------


class Crowd:
    """Requests with shared beginnings that come, go and fail at random, in two engines."""

    def __init__(self, engines: list[Engine], seed: int) -> None:
        self._engines = engines
        self._dice = random.Random(seed)
        self._roots = [prompt(self._dice.randrange(20, 120), index) for index in range(4)]
        for engine in engines:
            engine.hold()
            engine.faults.chance = 0.15

    def run(self, requests: int) -> None:
        """Let so many requests come, and all end."""
        for _ in range(requests):
            engine = self._dice.choice(self._engines)
            request = engine.add(self._prompt(), self._dice.randrange(1, 40))
            for _ in range(self._dice.randrange(8)):
                self._move(self._dice.choice(self._engines))
            if self._dice.random() < 0.1 and not engine.told[request].reason:
                engine.abort(request)
        for engine in self._engines:
            engine.finish()

    def _move(self, engine: Engine) -> None:
        for tasks in engine.tasks:
            tasks.run(self._dice.randrange(3))
        engine.step()

    def _prompt(self) -> list[int]:
        root = self._dice.choice(self._roots)
        shared = root[: self._dice.randrange(len(root))]
        return [*shared, *prompt(self._dice.randrange(1, 60), self._dice.randrange(6))]


@WAYS
@POLICIES
@pytest.mark.parametrize("seed", range(5))
def test_no_wrong_block_is_ever_stored_whatever_fails(
    start: Callable[..., Engine], way: Way, policy: str, seed: int
) -> None:
    way = {"policy": policy, "pages": 60, "batch_tokens": 64, "seed": seed, **way}
    engines = [start(**way), start(**{**way, "loading": "auto"})]
    Crowd(engines, seed).run(60)
    assert all(engine.preempted and engine.ordered and engine.saved for engine in engines)
    if way.get("loading") == "synchronous":
        assert any(load.synchronous for load in engines[0].ordered)


BY_LAYER = {"settings": {"layerwise": "always"}}


@AHEAD
def test_saves_by_layer_store_what_others_do(start: Callable[..., Engine], ahead: bool) -> None:
    tokens = prompt(200)
    engine = start(batch_tokens=24, ahead=ahead, **BY_LAYER)
    said = engine.answer(tokens, 30)
    keys = [key for order in engine.by_layer.values() for key in order.prefix.keys]
    assert keys == list(engine.prefix(tokens).keys), "each block of the prompt, once"
    turn = [*tokens, *said.tokens]
    assert start().answer([*turn, 5, 6, 7], 4).cached == (len(turn) - 1) // 16 * 16


def test_a_request_that_is_aborted_in_its_step_stores_nothing(
    start: Callable[..., Engine],
) -> None:
    """All its layers are published: readers had them, and nobody has confirmed them."""
    engine = start(ahead=True, **BY_LAYER)
    request = engine.add(prompt(100))
    engine.step()
    assert engine.told[request].tokens == [], "the step is in flight"
    (order,) = engine.by_layer.values()
    with Client.open(engine.options.url) as client:
        assert client.match(order.prefix, writing=True).blocks == 6
        with client.stream(order.prefix) as stream:
            for _ in range(LAYERS):
                stream.step()
            engine.abort(request)
            engine.finish()
            with pytest.raises(StaleLease, match="given up"):
                stream.step()
        assert client.exists(order.prefix) == [False] * 6


@WAYS
@POLICIES
@pytest.mark.parametrize("seed", range(3))
def test_saves_by_layer_store_nothing_unconfirmed_whatever_fails(
    start: Callable[..., Engine], way: Way, policy: str, seed: int
) -> None:
    way = {"policy": policy, "pages": 60, "batch_tokens": 64, "seed": seed, **BY_LAYER, **way}
    engines = [start(**way), start(**way)]
    Crowd(engines, seed).run(60)
    confirmed = {key for engine in engines for key in engine.saved}
    with Client.open(engines[0].options.url) as client:
        for engine in engines:
            assert engine.preempted
            assert engine.by_layer
            for order in engine.by_layer.values():
                stored = zip(order.prefix.keys, client.exists(order.prefix), strict=True)
                assert {key for key, there in stored if there} <= confirmed
        wait_until(lambda: is_quiet(client.statistics()), "no reservation is left")


def test_a_load_that_fails_unreported_would_be_seen(
    start_second: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A control of these tests themselves."""
    engine = start_second(holds=False)
    engine.faults.next_gets.append(2)
    monkeypatch.setattr(TiffinConnector, "get_block_ids_with_load_errors", lambda self: set())
    with pytest.raises(AssertionError):
        engine.answer(STORED, 8)
