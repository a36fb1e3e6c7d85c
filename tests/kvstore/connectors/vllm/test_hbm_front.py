"""The HBM tier of a GPU's worker, whose GPU is host memory here."""

from __future__ import annotations

import random
import threading
from typing import TYPE_CHECKING, Any
from unittest.mock import Mock

import numpy as np
import pytest

pytest.importorskip("torch")

from gpusupport import BLOCK_TOKENS, KV_HEADS, SCHEMA, GpuRank, blocks, united
from kvsupport import fresh_prefix, wait_until

from tiffin.kvstore.connectors.vllm import hbm_front
from tiffin.kvstore.connectors.vllm.hbm_front import HbmFront, open_front
from tiffin.kvstore.connectors.vllm.orders import LoadOrder, SaveOrder, StepOrders
from tiffin.kvstore.connectors.vllm.pages.device_page_copier import STAGES
from tiffin.kvstore.connectors.vllm.pool_link import PoolLink
from tiffin.kvstore.connectors.vllm.settings import Settings
from tiffin.kvstore.connectors.vllm.worker_side import WorkerSide
from tiffin.kvstore.errors import ClientClosed, InvalidInput, TierUnavailable

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from tiffin.kvstore import Prefix

SLOT = 8192  # what a block of all heads takes: 6 KiB, and what a layout without its first page adds
PAGES = BLOCK_TOKENS // 4


def front_of(rank: GpuRank, room: int = 4) -> HbmFront:
    front = open_front(rank.copier, room * SLOT)
    assert front is not None
    return front


def check(front: HbmFront) -> dict[str, Any]:
    """Nothing is held; returns the statistics."""
    front._core.core.check()
    numbers = front.statistics()
    assert numbers["uses"] == numbers["reserved_bytes"] == numbers["quarantined_bytes"] == 0
    assert numbers["dirty_blocks"] == 0
    return numbers


# -- blocks in, blocks out -------------------------------------------------------------------------


@pytest.mark.parametrize("layout", ["LBNHC", "BHLNC", "planes", "padded"])
@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
@pytest.mark.parametrize("skipped", [0, 1])
def test_what_was_kept_is_loaded_into_other_pages(layout: str, ranks: int, skipped: int) -> None:
    """Each rank has a tier for its own heads."""
    prefix, written = fresh_prefix(3, SCHEMA), tuple(range(12))
    for number in range(ranks):
        rank = GpuRank(layout, 4, number, ranks)
        front = front_of(rank)
        front.keep(prefix, written)
        right = rank.rows(written)
        rank.clear()
        read = tuple(range(20, 32))[skipped:]
        assert front.load(prefix, read, skipped) == 3
        assert rank.rows(read) == right[skipped:]
        assert not any(b"".join(rank.rows(written)))
        assert check(front)["blocks"] == 3
        front.close()


def test_the_leading_blocks_are_loaded_and_no_page_behind_them() -> None:
    rank, prefix = GpuRank(), fresh_prefix(3, SCHEMA)
    front = front_of(rank)
    assert front.load(prefix, range(12)) == 0
    front.keep(prefix[:1], range(4))
    front.keep(prefix[2:], range(4, 8))  # a block behind a gap is of no use yet
    before = rank.rows(range(24, 32))
    right = rank.rows(range(4))
    assert front.load(prefix, range(20, 32)) == 1
    assert rank.rows(range(20, 24)) == right
    assert rank.rows(range(24, 32)) == before
    front.keep(prefix, range(12))  # the rest is added
    assert front.load(prefix, range(20, 32)) == 3
    assert rank.rows(range(24, 28)) == rank.rows(range(4, 8))
    check(front)


def test_a_load_may_end_within_a_block_and_begin_within_one() -> None:
    """The engine has the first pages and computes the last."""
    rank, prefix = GpuRank(), fresh_prefix(3, SCHEMA)
    front = front_of(rank)
    front.keep(prefix, range(12))
    before = rank.rows(range(32, 40))
    assert front.load(prefix, range(22, 32), 1) == 3
    assert rank.rows(range(22, 32)) == rank.rows(range(1, 11))
    assert rank.rows(range(32, 40)) == before


def test_only_whole_blocks_are_kept() -> None:
    rank, prefix = GpuRank(), fresh_prefix(3, SCHEMA)
    front = front_of(rank)
    front.keep(prefix, range(10), 1)  # without a page of the first and a page of the last block
    assert front.load(prefix, range(20, 32)) == 0
    assert front.load(prefix[1:], range(20, 28)) == 1
    assert rank.rows(range(20, 24)) == rank.rows(range(3, 7))
    front.keep(prefix[:1], range(3))
    front.keep(prefix[:0], ())
    assert check(front)["blocks"] == 1


def test_prompts_with_other_tokens_find_nothing() -> None:
    rank = GpuRank()
    front = front_of(rank)
    front.keep(fresh_prefix(2, SCHEMA), range(8))
    assert front.load(fresh_prefix(2, SCHEMA), range(8)) == 0


# -- room ------------------------------------------------------------------------------------------


def test_the_block_that_was_used_longest_ago_leaves_chains_from_their_tail() -> None:
    rank = GpuRank()
    front = front_of(rank)
    old, new = fresh_prefix(3, SCHEMA), fresh_prefix(2, SCHEMA)
    front.keep(old, range(12))
    front.keep(new, range(8))
    assert [front.load(old, range(12)), front.load(new, range(8))] == [2, 2]
    third = fresh_prefix(2, SCHEMA)
    front.keep(third, range(8))
    assert [front.load(old, range(12)), front.load(new, range(8))] == [0, 2]
    assert front.load(third, range(8)) == 2
    assert check(front)["evictions"] == 3


def test_of_a_prompt_that_is_larger_than_the_tier_the_first_blocks_stay() -> None:
    rank, prefix = GpuRank(), fresh_prefix(6, SCHEMA)
    front = front_of(rank)
    front.keep(prefix, range(24))
    front.keep(prefix[4:], range(16, 24), 0)  # evicts no ancestor
    assert front.load(prefix, range(24)) == 4
    check(front)


def test_a_block_that_is_being_loaded_does_not_leave(monkeypatch: pytest.MonkeyPatch) -> None:
    rank, prefix = GpuRank(), fresh_prefix(4, SCHEMA)
    front = front_of(rank)
    front.keep(prefix, range(16))
    right, scatter = rank.rows(range(16)), rank.copier.scatter_device

    def meanwhile(*arguments: Any) -> None:
        front.keep(fresh_prefix(1, SCHEMA), range(36, 40))
        scatter(*arguments)

    monkeypatch.setattr(rank.copier, "scatter_device", meanwhile)
    assert front.load(prefix, range(20, 36)) == 4
    assert rank.rows(range(20, 36)) == right
    check(front)


@pytest.mark.slow
def test_threads_load_and_keep_in_little_memory() -> None:
    """A prompt's bytes are made of its number, so that wrong ones are seen."""
    rank = GpuRank(page_tokens=4)
    front = front_of(rank, room=5)
    prompts = [fresh_prefix(3, SCHEMA) for _ in range(4)]
    wrong: list[object] = []

    def fill(pages: Sequence[int], number: int) -> None:
        for layer in rank.layers:
            for at, page in enumerate(pages):
                layer[page] = number * 16 + at

    def work(thread: int) -> None:
        dice, pages = random.Random(thread), range(thread * 12, thread * 12 + 12)
        try:
            for _ in range(60):
                number = dice.randrange(4)
                fill(pages, number)
                right = rank.share(pages)
                fill(pages, 9)
                got = front.load(prompts[number], pages)
                if rank.rows(pages[: got * PAGES]) != _rows(rank, right, got):
                    wrong.append(number)
                fill(pages, number)
                front.keep(prompts[number], pages)
        except BaseException as error:
            wrong.append(error)
            raise

    def _rows(rank: GpuRank, right: bytes, got: int) -> list[bytes]:
        rows = np.frombuffer(right, np.uint8).reshape(-1, 12, 4 * 16)
        return [rows[:, page].tobytes() for page in range(got * PAGES)]

    threads = [threading.Thread(target=work, args=(number,)) for number in range(STAGES)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert check(front)["blocks"] <= 5


# -- what goes wrong -------------------------------------------------------------------------------


def test_no_tier_without_the_setting() -> None:
    assert open_front(GpuRank().copier, 0) is None


def test_a_size_that_holds_no_block_is_refused_by_name() -> None:
    with pytest.raises(InvalidInput, match=f"hbm_bytes=8000 hold no block; one takes {SLOT}"):
        open_front(GpuRank().copier, 8000)
    front = open_front(GpuRank().copier, SLOT)
    assert front is not None
    front.close()


def test_a_gpu_without_that_much_memory_is_an_error_that_names_the_settings(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    full = Mock(side_effect=TierUnavailable("no HBM tier on cuda:0: out of memory"))
    monkeypatch.setattr(hbm_front, "HbmTier", full)
    with pytest.raises(TierUnavailable, match=r"hbm_bytes: 1 GiB .* out of memory.* Lower --gpu"):
        open_front(GpuRank().copier, 1 << 30)


def test_a_tier_changes_no_page_at_its_start() -> None:
    rank = GpuRank()
    before = rank.rows(range(rank.pages))
    assert check(front_of(rank))["blocks"] == 0
    assert rank.rows(range(rank.pages)) == before


def test_what_fails_on_the_device_is_not_offered_and_its_memory_not_used(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rank, prefix = GpuRank(), fresh_prefix(2, SCHEMA)
    front = front_of(rank)
    front.keep(prefix[:1], range(4))
    with monkeypatch.context() as patch:
        patch.setattr(rank.copier, "_move_device", Mock(side_effect=RuntimeError("ECC")))
        with pytest.raises(RuntimeError, match="ECC"):
            front.load(prefix, range(8))
        with pytest.raises(RuntimeError, match="ECC"):
            front.keep(prefix, range(8))
    assert front.load(prefix, range(8)) == 1
    front.keep(fresh_prefix(4, SCHEMA), range(16))  # neither the one nor the other is given away
    assert front.statistics()["blocks"] == 3
    assert front.statistics()["quarantined_bytes"] == SLOT


def test_a_forked_child_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU it would write to its parent's memory."""
    front = front_of(GpuRank())
    monkeypatch.setattr(front, "_pid", 0)
    with pytest.raises(ClientClosed):
        front.load(fresh_prefix(1, SCHEMA), range(4))
    with pytest.raises(ClientClosed):
        front.keep(fresh_prefix(1, SCHEMA), range(4))


# -- in a worker -----------------------------------------------------------------------------------

URL = "embedded:?dram=16MiB&prefault=false"


class WaitingLink:
    """The node of a test, which calls wait for."""

    def __init__(self, link: PoolLink) -> None:
        self._link = link
        self.calls = 0

    def call(self, action: Any, wait_s: float = 30.0) -> Any:
        self.calls += 1
        return self._link.call(action, wait_s)

    def region(self) -> Any:
        return self._link.region()

    def close(self) -> None:
        pass


class Worker:
    """Ranks of one engine, with a tier each."""

    def __init__(self, link: WaitingLink, ranks: int = 1) -> None:
        self.link = link
        self.ranks = [GpuRank("LBNHC", 4, rank, ranks) for rank in range(ranks)]
        self.sides = []
        for number, rank in enumerate(self.ranks):
            side = WorkerSide(Settings(url=URL), link, number, ranks, KV_HEADS)  # type: ignore[arg-type]
            side.register(rank.copier, hbm=open_front(rank.copier, 4 * SLOT))
            self.sides.append(side)

    def save(self, prefix: Prefix, pages: tuple[int, ...]) -> None:
        for side in self.sides:
            side.begin(StepOrders(saves=[SaveOrder(1, "r", prefix, pages)]))
        for side in self.sides:
            wait_until(lambda side=side: side.ended() and not side._saving, "the save ends")

    def load(self, prefix: Prefix, pages: Sequence[int], way: str, skipped: int = 0) -> list[Any]:
        """A load on all ranks; returns what each has counted since."""
        leased = None
        if way in ("held", "synchronous"):
            leased = self.link.call(lambda client: client.get(prefix))
        places = leased.places() if leased is not None else None
        synchronous = way == "synchronous"
        order = LoadOrder(
            1, "r", prefix, skipped, tuple(pages), places, synchronous, remote=way == "remote"
        )
        found = []
        for rank, side in zip(self.ranks, self.sides, strict=True):
            rank.clear()
            side.counters.take()
            side.begin(StepOrders(loads=[order]))
            if not synchronous:
                wait_until(lambda side=side: "r" in side.ended()[1], "the load ends")
            assert not side.take_bad_pages()
            found.append(side.counters.take())
        if leased is not None:
            leased.release()
        return found

    def close(self) -> None:
        for side in self.sides:
            side.close()


@pytest.fixture
def link() -> Iterator[WaitingLink]:
    link = PoolLink.shared(URL, "always")
    yield WaitingLink(link)
    link.close()


@pytest.fixture(params=[1, 2])
def worker(link: WaitingLink, request: pytest.FixtureRequest) -> Iterator[Worker]:
    one = Worker(link, request.param)
    yield one
    one.close()


@pytest.fixture
def stored(link: WaitingLink) -> Prefix:
    """Three blocks that another engine has stored."""
    prefix, writer = fresh_prefix(3, SCHEMA), GpuRank()
    payloads = blocks(3)
    writer.copier.gather(payloads, range(12))
    link.call(lambda client: client.put(prefix, payloads))
    return prefix


WAYS = pytest.mark.parametrize("way", ["home", "remote", "held", "synchronous"])


@WAYS
@pytest.mark.parametrize("skipped", [0, 1])
def test_a_second_load_asks_for_no_byte_of_the_pool(
    worker: Worker, stored: Prefix, way: str, skipped: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    for found in worker.load(stored, range(12), way):
        assert (found["loaded_tokens"], found.get("hit_tokens/hbm")) == (3 * BLOCK_TOKENS, None)
    right = united(worker.ranks, range(skipped, 12))
    for rank in worker.ranks:
        monkeypatch.setattr(rank.copier, "scatter", Mock(side_effect=AssertionError("the bus")))
    for found in worker.load(stored, range(20 + skipped, 32), way, skipped):
        assert found["hit_tokens/hbm"] == found["loaded_tokens"] == 3 * BLOCK_TOKENS
    assert united(worker.ranks, range(20 + skipped, 32)) == right


@WAYS
def test_a_load_of_which_the_tier_has_a_part_gets_the_rest_from_the_pool(
    worker: Worker, stored: Prefix, way: str
) -> None:
    worker.load(stored[:1], range(4), way)
    for found in worker.load(stored, range(20, 31), way):  # the last page is computed
        assert found["hit_tokens/hbm"] == BLOCK_TOKENS
        assert found["loaded_tokens"] == 3 * BLOCK_TOKENS
    right = united(worker.ranks, range(20, 31))
    for side in worker.sides:
        assert side._hbm is not None
        assert side._hbm.statistics()["blocks"] == 2
    worker.load(fresh := stored[1:], range(5, 12), way, 1)  # and one that begins within a block
    assert len(fresh) == 2
    worker.load(stored, range(11), "home")
    assert united(worker.ranks, range(11)) == right


def test_what_was_saved_is_kept(worker: Worker) -> None:
    prefix = fresh_prefix(3, SCHEMA)
    right = united(worker.ranks, range(12))
    worker.save(prefix, tuple(range(12)))
    for found in worker.load(prefix, range(20, 32), "synchronous"):
        assert found["hit_tokens/hbm"] == 3 * BLOCK_TOKENS
    assert united(worker.ranks, range(20, 32)) == right


def test_without_the_pool_an_asynchronous_load_is_served_as_far_as_the_tier_goes(
    worker: Worker, link: WaitingLink
) -> None:
    """The pool may have lost a block since it was asked."""
    prefix = fresh_prefix(2, SCHEMA)
    worker.save(prefix[:1], tuple(range(4)))
    right = united(worker.ranks, range(4))
    order = LoadOrder(1, "r", prefix, 0, tuple(range(20, 28)))
    for side in worker.sides:
        side.begin(StepOrders(loads=[order]))
        wait_until(lambda side=side: "r" in side.ended()[1], "the load ends")
        assert side.take_bad_pages() == {24, 25, 26, 27}
    assert united(worker.ranks, range(20, 24)) == right
