"""The scheduler's side: lookups in an embedded node, in the background."""

from __future__ import annotations

import threading
import time
from collections import Counter
from typing import TYPE_CHECKING, Any

import pytest
from fakepool import BLOCK, PAGE, SCHEMA
from kvsupport import damage, payloads_of, wait_until

from tiffin.kvstore.connectors.vllm import scheduler_side
from tiffin.kvstore.connectors.vllm.held_leases import HOLD_S
from tiffin.kvstore.connectors.vllm.model.request_identity import Identity
from tiffin.kvstore.connectors.vllm.orders import StepReport
from tiffin.kvstore.connectors.vllm.pool_link import PoolLink
from tiffin.kvstore.connectors.vllm.scheduler_side import SchedulerSide
from tiffin.kvstore.connectors.vllm.settings import Settings
from tiffin.kvstore.errors import InvalidInput, NodeUnavailable

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

    from tiffin.kvstore.client.blocks.block_places import RegionId
    from tiffin.kvstore.connectors.vllm.orders import LoadOrder, StepOrders

URL = "embedded:?dram=1MiB&prefault=false"
PROMPT = list(range(40))
TEXT = Identity("tenant", {})
PATIENT = Settings(url=URL, block_tokens=BLOCK, lookup_timeout_s=60.0, namespace="tenant")


class Engine:
    """What the tracker asks about a request: here always the same."""

    def pages_of(self, _: str) -> Sequence[int]:
        return range(10)

    def tokens_of(self, _: str) -> Sequence[int]:
        return PROMPT

    def holds(self, _: str) -> bool:
        return True


@pytest.fixture
def link() -> Iterator[PoolLink]:
    link = PoolLink.shared(URL, "always")
    link.call(lambda client: None, wait_s=30.0)
    yield link
    link.close()


@pytest.fixture
def make(link: PoolLink) -> Iterator[Callable[..., SchedulerSide]]:
    made: list[SchedulerSide] = []

    def make_one(settings: Settings = PATIENT, link: Any = None, **options: Any) -> SchedulerSide:
        # A side closes the link that it was given.
        link = link or PoolLink.shared(URL, "always")
        made.append(SchedulerSide(settings, SCHEMA, PAGE, 1, link, **options))
        return made[-1]

    yield make_one
    for side in made:
        side.close()


def store(link: PoolLink, blocks: int, namespace: str = "tenant", secret: bytes = b"") -> None:
    prefix = SCHEMA.prefix(PROMPT, namespace=namespace, secret=secret)[:blocks]
    link.call(lambda client: client.put(prefix, payloads_of(prefix)))


def answered(side: SchedulerSide, name: str = "r", local: int = 0) -> int:
    """Wait for a request's answer."""
    found: list[int] = []

    def is_there() -> bool:
        tokens, _ = side.matched(name, local, len(PROMPT))
        if tokens is not None:
            found.append(tokens)
        return bool(found)

    wait_until(is_there, "the lookup is answered")
    return found[-1]


def plan(side: SchedulerSide, tokens: int = 0, preempted: Sequence[str] = ()) -> StepOrders:
    return side.plan([("r", tokens)], Engine(), preempted)


def test_a_prompt_is_looked_up_in_the_background(
    make: Callable[..., SchedulerSide], link: PoolLink
) -> None:
    store(link, 3)
    side = make()
    side.add("r", PROMPT, TEXT)
    assert answered(side) == 24
    assert side.matched("r", 8, len(PROMPT)) == (16, True)


@pytest.mark.parametrize("namespace", ["", "other", "tenant\0adapter"])
def test_another_namespace_shares_nothing(
    make: Callable[..., SchedulerSide], link: PoolLink, namespace: str
) -> None:
    store(link, 3, namespace)
    side = make()
    side.add("r", PROMPT, TEXT)
    assert answered(side) == 0


def test_an_adapter_has_a_namespace_within_the_engines(
    make: Callable[..., SchedulerSide], link: PoolLink
) -> None:
    store(link, 3, "tenant\0adapter")
    side = make()
    side.add("r", PROMPT, Identity("tenant\0adapter", {}))
    assert answered(side) == 24


def test_the_secret_of_the_settings_is_in_the_keys(
    make: Callable[..., SchedulerSide], link: PoolLink, tmp_path: Path
) -> None:
    (tmp_path / "secret").write_bytes(b"0123456789abcdef")
    store(link, 2, secret=b"0123456789abcdef")
    store(link, 1)
    side = make(Settings(**{**_fields(PATIENT), "secret_file": str(tmp_path / "secret")}))
    side.add("r", PROMPT, TEXT)
    assert answered(side) == 16


def _fields(settings: Settings) -> dict[str, Any]:
    return {name: getattr(settings, name) for name in settings.__struct_fields__}


def test_a_secret_that_can_not_be_read_is_an_error_of_the_start(
    make: Callable[..., SchedulerSide], tmp_path: Path
) -> None:
    settings = Settings(**{**_fields(PATIENT), "secret_file": str(tmp_path / "none")})
    with pytest.raises(InvalidInput, match="secret_file"):
        make(settings, NoLink())


class NoLink:
    """A pool that is not there, or one that answers when the test says so."""

    def __init__(self) -> None:
        self.asked, self.opened = threading.Event(), threading.Event()

    def call(self, action: Any, wait_s: float = 0.0) -> Any:
        self.asked.set()
        self.opened.wait(30)
        raise NodeUnavailable("none")

    def close(self) -> None:
        self.opened.set()


def test_without_a_pool_a_request_is_computed(make: Callable[..., SchedulerSide]) -> None:
    link = NoLink()
    link.opened.set()
    side = make(link=link)
    side.add("r", PROMPT, TEXT)
    assert answered(side) == 0


def test_a_lookup_that_fails_unexpectedly_costs_the_pool_and_not_the_engine(
    make: Callable[..., SchedulerSide], monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: Any, **__: Any) -> Any:
        raise RuntimeError("a mistake of this release")

    link = NoLink()
    monkeypatch.setattr(link, "call", broken)
    side = make(link=link)
    side.add("r", PROMPT, TEXT)
    assert answered(side) == 0
    assert side.counters.take()["lookup_failures/RuntimeError"] == 1


def test_a_pool_that_does_not_answer_delays_a_request_until_the_deadline_only(
    make: Callable[..., SchedulerSide],
) -> None:
    link = NoLink()
    side = make(Settings(**{**_fields(PATIENT), "lookup_timeout_s": 0.0}), link)
    side.add("r", PROMPT, TEXT)
    assert side.matched("r", 0, len(PROMPT)) == (0, False)
    patient = make(link=link)
    patient.add("r", PROMPT, TEXT)
    assert patient.matched("r", 0, len(PROMPT)) == (None, False)


def test_a_prompt_shorter_than_a_block_is_not_looked_up(
    make: Callable[..., SchedulerSide],
) -> None:
    link = NoLink()
    side = make(link=link)
    side.add("r", PROMPT[: BLOCK - 1], TEXT)
    assert side.matched("r", 0, BLOCK - 1) == (0, False)
    assert not link.asked.is_set()


def test_an_engine_that_only_saves_asks_nothing(make: Callable[..., SchedulerSide]) -> None:
    link = NoLink()
    side = make(link=link, loads=False)
    side.add("r", PROMPT, TEXT)
    assert side.matched("r", 0, len(PROMPT)) == (0, False)
    assert not link.asked.is_set()
    side.allocated("r", range(10), 0, 0)
    plan(side)
    assert len(plan(side, 40).saves) == 1


def test_a_preempted_request_is_looked_up_again(
    make: Callable[..., SchedulerSide], link: PoolLink
) -> None:
    side = make()
    side.add("r", PROMPT, TEXT)
    assert answered(side) == 0
    side.allocated("r", range(10), 0, 0)
    store(link, 2)
    plan(side, 0, ["r", "unknown"])
    assert answered(side) == 16


def test_a_finished_request_is_forgotten(make: Callable[..., SchedulerSide]) -> None:
    link = NoLink()
    side = make(link=link)
    side.add("r", PROMPT, TEXT)
    assert not side.finished("r", 0, Engine())
    assert side.matched("r", 0, len(PROMPT)) == (0, False)
    assert "r" not in side.tracker


def test_last_blocks_of_a_finished_request_are_ordered(
    make: Callable[..., SchedulerSide],
) -> None:
    side = make()
    side.add("r", PROMPT, TEXT)
    assert answered(side) == 0
    side.allocated("r", range(10), 0, 0)
    plan(side)
    assert side.finished("r", 40, Engine())
    orders = plan(side)
    assert [len(order.prefix) for order in orders.saves] == [5]
    assert orders.finished == ["r"]


# -- leases ----------------------------------------------------------------------------------------


def readable(side: SchedulerSide, link: PoolLink) -> RegionId:
    """The worker reports that it can read the node's memory."""
    region = link.call(lambda client: client.region)
    side.reported(StepReport(mapped=Counter([region.identity])))
    return region.identity  # type: ignore[no-any-return]


def leases(link: PoolLink) -> int:
    """How many read leases the node has given."""
    sessions = link.call(lambda client: client.statistics())["sessions"]
    return sum(session["read_leases"] for session in sessions)


def no_lease_is_left(link: PoolLink) -> None:
    wait_until(lambda: leases(link) == 0, "the leases are given back")


def ordered(side: SchedulerSide, tokens: int) -> LoadOrder:
    """The request gets its pages; returns its load."""
    side.allocated("r", range(10), tokens, 0)
    (load,) = plan(side).loads
    return load


def test_what_is_about_to_be_loaded_is_leased_until_the_worker_has_read_it(
    make: Callable[..., SchedulerSide], link: PoolLink
) -> None:
    store(link, 3)
    side = make()
    region = readable(side, link)
    side.add("r", PROMPT, TEXT)
    assert answered(side) == 24
    assert side.matched("r", 0, len(PROMPT)) == (24, False)
    load = ordered(side, 24)
    assert load.held is not None
    assert load.synchronous
    assert (load.held.region, len(load.held)) == (region, 3)
    assert not side.finished("r", 0, Engine())  # aborted: the worker may still read
    plan(side)
    assert leases(link) == 1
    side.reported(StepReport(ended_loads=Counter([load.number])))
    no_lease_is_left(link)


def test_nothing_is_leased_before_the_worker_can_read_it(
    make: Callable[..., SchedulerSide], link: PoolLink
) -> None:
    store(link, 3)
    side = make()
    side.add("r", PROMPT, TEXT)
    assert answered(side) == 24
    assert leases(link) == 0
    assert ordered(side, 24).held is None


def test_a_corrupt_block_is_found_before_it_is_offered(
    make: Callable[..., SchedulerSide], link: PoolLink
) -> None:
    store(link, 3)
    side = make()
    readable(side, link)

    def flip(client: Any) -> None:
        with client.get(SCHEMA.prefix(PROMPT, namespace="tenant")[:3], verify="off") as blocks:
            damage(blocks[1].memory, 5)

    link.call(flip)
    side.add("r", PROMPT, TEXT)
    assert answered(side) == 8


@pytest.mark.parametrize("end", ["finished", "preempted", "computed", "closed"])
def test_a_lease_that_is_not_used_is_given_back(
    make: Callable[..., SchedulerSide], link: PoolLink, end: str
) -> None:
    store(link, 3)
    side = make(link=PoolLink.shared(URL, "always"))
    readable(side, link)
    side.add("r", PROMPT, TEXT)
    assert answered(side) == 24
    assert leases(link) == 1
    if end == "finished":
        side.finished("r", 0, Engine())
    elif end == "preempted":
        plan(side, preempted=["r"])
    elif end == "computed":
        side.allocated("r", range(10), 0, 0)
    else:
        side._leases.close()
    no_lease_is_left(link)


def test_a_lease_that_comes_too_late_is_given_back(
    make: Callable[..., SchedulerSide], link: PoolLink, monkeypatch: pytest.MonkeyPatch
) -> None:
    store(link, 3)
    side = make()
    readable(side, link)
    reached, opened = threading.Event(), threading.Event()
    lease = SchedulerSide._lease

    def slow(*arguments: Any) -> Any:
        reached.set()
        opened.wait(30)
        return lease(*arguments)

    monkeypatch.setattr(SchedulerSide, "_lease", slow)
    side.add("r", PROMPT, TEXT)
    wait_until(lambda: side.matched("r", 0, len(PROMPT)) and reached.is_set(), "it is asked for")
    assert side.matched("r", 0, len(PROMPT)) == (None, False)
    side.finished("r", 0, Engine())
    opened.set()
    side._threads.shutdown(wait=True)
    no_lease_is_left(link)


def test_a_request_that_waits_for_pages_loses_its_lease_and_loads_without(
    make: Callable[..., SchedulerSide], link: PoolLink, monkeypatch: pytest.MonkeyPatch
) -> None:
    store(link, 3)
    side = make()
    readable(side, link)
    side.add("r", PROMPT, TEXT)
    assert answered(side) == 24
    now = time.monotonic
    monkeypatch.setattr(scheduler_side.time, "monotonic", lambda: now() + HOLD_S)
    plan(side)
    no_lease_is_left(link)
    assert side.matched("r", 0, len(PROMPT)) == (24, True)
    assert ordered(side, 24).held is None


def test_at_most_a_share_of_the_nodes_memory_is_leased(
    make: Callable[..., SchedulerSide], link: PoolLink, monkeypatch: pytest.MonkeyPatch
) -> None:
    store(link, 3)
    side = make()
    readable(side, link)
    monkeypatch.setattr(scheduler_side, "_HELD_SHARE", 1 << 40)
    side.add("r", PROMPT, TEXT)
    assert answered(side) == 24
    assert leases(link) == 0
    assert side.matched("r", 0, len(PROMPT)) == (24, True)


def test_a_load_that_takes_long_anyway_is_not_leased(
    make: Callable[..., SchedulerSide], link: PoolLink, monkeypatch: pytest.MonkeyPatch
) -> None:
    store(link, 3)
    side = make()
    readable(side, link)
    monkeypatch.setattr(scheduler_side, "_HELD_BYTES", 3 * SCHEMA.block_bytes - 1)
    side.add("r", PROMPT, TEXT)
    assert answered(side) == 24
    assert side.matched("r", 0, len(PROMPT)) == (24, True)
    assert answered(side, local=BLOCK) == 16
    assert leases(link) == 1  # two blocks are not too much


def test_a_pool_that_stops_answering_is_no_reason_not_to_load(
    make: Callable[..., SchedulerSide], link: PoolLink, monkeypatch: pytest.MonkeyPatch
) -> None:
    store(link, 3)
    side = make()
    readable(side, link)

    def fail(*_: Any) -> Any:
        raise NodeUnavailable("none")

    monkeypatch.setattr(SchedulerSide, "_lease", fail)
    side.add("r", PROMPT, TEXT)
    assert answered(side) == 24
    assert side.matched("r", 0, len(PROMPT)) == (24, True)
    assert side.counters.take()["lookup_failures/NodeUnavailable"] == 1
