"""The scheduler's side: lookups in an embedded node, in the background."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

import pytest
from fakepool import BLOCK, PAGE, SCHEMA
from kvsupport import payloads_of, wait_until

from tiffin.kvstore.connectors.vllm.pool_link import PoolLink
from tiffin.kvstore.connectors.vllm.scheduler_side import SchedulerSide
from tiffin.kvstore.connectors.vllm.settings import Settings
from tiffin.kvstore.errors import InvalidInput, NodeUnavailable

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

    from tiffin.kvstore.connectors.vllm.orders import StepOrders

URL = "embedded:?dram=1MiB&prefault=false"
PROMPT = list(range(40))
PATIENT = Settings(url=URL, block_tokens=BLOCK, lookup_timeout_s=60.0, namespace="tenant")


class Engine:
    """What the tracker asks about a request: here always the same."""

    def pages_of(self, _: str) -> Sequence[int]:
        return range(10)

    def tokens_of(self, _: str) -> Sequence[int]:
        return PROMPT


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
    return side.plan([("r", tokens)], Engine(), preempted, ())


def test_a_prompt_is_looked_up_in_the_background(
    make: Callable[..., SchedulerSide], link: PoolLink
) -> None:
    store(link, 3)
    side = make()
    side.add("r", PROMPT, "")
    assert answered(side) == 24
    assert side.matched("r", 8, len(PROMPT)) == (16, False)  # in the DRAM of this host


@pytest.mark.parametrize("namespace", ["", "other", "tenant\0adapter"])
def test_another_namespace_shares_nothing(
    make: Callable[..., SchedulerSide], link: PoolLink, namespace: str
) -> None:
    store(link, 3, namespace)
    side = make()
    side.add("r", PROMPT, "")
    assert answered(side) == 0


def test_an_adapter_has_a_namespace_within_the_engines(
    make: Callable[..., SchedulerSide], link: PoolLink
) -> None:
    store(link, 3, "tenant\0adapter")
    side = make()
    side.add("r", PROMPT, "adapter")
    assert answered(side) == 24


def test_the_secret_of_the_settings_is_in_the_keys(
    make: Callable[..., SchedulerSide], link: PoolLink, tmp_path: Path
) -> None:
    (tmp_path / "secret").write_bytes(b"0123456789abcdef")
    store(link, 2, secret=b"0123456789abcdef")
    store(link, 1)
    side = make(Settings(**{**_fields(PATIENT), "secret_file": str(tmp_path / "secret")}))
    side.add("r", PROMPT, "")
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
    side.add("r", PROMPT, "")
    assert answered(side) == 0


def test_a_lookup_that_fails_unexpectedly_costs_the_pool_and_not_the_engine(
    make: Callable[..., SchedulerSide], monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: Any, **__: Any) -> Any:
        raise RuntimeError("a mistake of this release")

    link = NoLink()
    monkeypatch.setattr(link, "call", broken)
    side = make(link=link)
    side.add("r", PROMPT, "")
    assert answered(side) == 0
    assert side.counters.take()["lookup_failures/RuntimeError"] == 1


def test_a_pool_that_does_not_answer_delays_a_request_until_the_deadline_only(
    make: Callable[..., SchedulerSide],
) -> None:
    link = NoLink()
    side = make(Settings(**{**_fields(PATIENT), "lookup_timeout_s": 0.0}), link)
    side.add("r", PROMPT, "")
    assert side.matched("r", 0, len(PROMPT)) == (0, False)
    patient = make(link=link)
    patient.add("r", PROMPT, "")
    assert patient.matched("r", 0, len(PROMPT)) == (None, False)


def test_a_prompt_shorter_than_a_block_is_not_looked_up(
    make: Callable[..., SchedulerSide],
) -> None:
    link = NoLink()
    side = make(link=link)
    side.add("r", PROMPT[: BLOCK - 1], "")
    assert side.matched("r", 0, BLOCK - 1) == (0, False)
    assert not link.asked.is_set()


def test_an_engine_that_only_saves_asks_nothing(make: Callable[..., SchedulerSide]) -> None:
    link = NoLink()
    side = make(link=link, loads=False)
    side.add("r", PROMPT, "")
    assert side.matched("r", 0, len(PROMPT)) == (0, False)
    assert not link.asked.is_set()
    side.allocated("r", range(10), 0, 0)
    assert len(plan(side, 40).saves) == 1


def test_a_preempted_request_is_looked_up_again(
    make: Callable[..., SchedulerSide], link: PoolLink
) -> None:
    side = make()
    side.add("r", PROMPT, "")
    assert answered(side) == 0
    side.allocated("r", range(10), 0, 0)
    store(link, 2)
    plan(side, 0, ["r", "unknown"])
    assert answered(side) == 16


def test_a_finished_request_is_forgotten(make: Callable[..., SchedulerSide]) -> None:
    link = NoLink()
    side = make(link=link)
    side.add("r", PROMPT, "")
    assert not side.finished("r", 0, Engine())
    assert side.matched("r", 0, len(PROMPT)) == (0, False)
    assert "r" not in side.tracker


def test_last_blocks_of_a_finished_request_are_ordered(
    make: Callable[..., SchedulerSide],
) -> None:
    side = make()
    side.add("r", PROMPT, "")
    assert answered(side) == 0
    side.allocated("r", range(10), 0, 0)
    assert side.finished("r", 40, Engine())
    orders = plan(side)
    assert [len(order.prefix) for order in orders.saves] == [5]
    assert orders.finished == ["r"]
