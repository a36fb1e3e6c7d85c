"""A worker's loads and saves, in an embedded node: prompts of three blocks of four pages."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

import pytest

pytest.importorskip("torch")

from kvsupport import Background, damage, fresh_prefix, wait_until
from pagesupport import BLOCK_PAGES, LAYERS, Rank, schema_of

from tiffin.kvstore.connectors.vllm.orders import LoadOrder, SaveOrder, StepOrders
from tiffin.kvstore.connectors.vllm.pool_link import PoolLink
from tiffin.kvstore.connectors.vllm.settings import Settings
from tiffin.kvstore.connectors.vllm.worker_side import WorkerSide
from tiffin.kvstore.errors import NodeUnavailable

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tiffin.kvstore import Prefix

URL = "embedded:?dram=16MiB&prefault=false"
BLOCKS = 3
PAGES = (17, 2, 9, 4, 0, 13, 5, 11, 8, 3, 7, 1)
OTHERS = (1, 2, 3, 10, 11, 12, 19, 18, 0, 5, 6, 7)


class Gate:
    """A place in a thread: it is reached, and left when the gate is opened."""

    def __init__(self) -> None:
        self.reached, self.opened = threading.Event(), threading.Event()

    def __call__(self, *_: object) -> None:
        self.reached.set()
        assert self.opened.wait(30), "the gate was not opened"


class GatedLink:
    """The node of a test. `before` is called at the begin of each call."""

    def __init__(self, link: PoolLink) -> None:
        self._link = link
        self.before: Callable[[], object] = lambda: None

    def call(self, action: Callable[[Any], Any], wait_s: float = 30.0) -> Any:
        self.before()
        return self._link.call(action, wait_s)

    def close(self) -> None:
        pass


class Worker:
    """A worker side of one rank, with pages of its own."""

    def __init__(self, link: GatedLink, rank: int = 0, ranks: int = 1) -> None:
        self.pages = Rank(schema_of(ranks), rank, ranks)
        self.side = WorkerSide(Settings(url=URL), link, rank, ranks)  # type: ignore[arg-type]
        self.side.register(self.pages.copier)

    def save(self, prefix: Prefix, number: int = 1, pages: tuple[int, ...] = PAGES) -> None:
        self.side.begin(StepOrders(saves=[SaveOrder(number, "r", prefix, pages)]))

    def saved(self, number: int = 1) -> None:
        """Wait for the end of a save."""

        def is_reported() -> bool:
            self.side.ended()
            return number in self.side.take_report().ended_saves

        wait_until(is_reported, "the save ends")

    def load(self, prefix: Prefix, *, synchronous: bool, skipped: int = 0) -> None:
        """A load, until its end; pages are cleared before."""
        self.pages.clear()
        order = LoadOrder("r", prefix, skipped, OTHERS[skipped:], synchronous)
        self.side.begin(StepOrders(loads=[order]))
        if not synchronous:
            wait_until(lambda: "r" in self.side.ended()[1], "the load ends")

    def contents(self, pages: tuple[int, ...]) -> list[list[bytes]]:
        return [[self.pages.page(layer, page) for page in pages] for layer in range(LAYERS)]


@pytest.fixture
def link() -> Iterator[GatedLink]:
    link = PoolLink.shared(URL, "always")
    yield GatedLink(link)
    link.close()


@pytest.fixture
def worker(link: GatedLink) -> Iterator[Worker]:
    one = Worker(link)
    yield one
    one.side.close()


@pytest.fixture
def reader(link: GatedLink) -> Iterator[Worker]:
    """The worker of another engine."""
    other = Worker(link)
    yield other
    other.side.close()


@pytest.fixture
def prefix() -> Prefix:
    return fresh_prefix(BLOCKS, schema_of(1))


both_ways = pytest.mark.parametrize("synchronous", [False, True])


def hit(link: GatedLink, prefix: Prefix) -> int:
    return int(link.call(lambda client: client.match(prefix)).blocks)


# -- what goes well --------------------------------------------------------------------------------


@both_ways
@pytest.mark.parametrize("skipped", [0, 1, 3])
def test_what_one_worker_saves_another_loads(
    worker: Worker, reader: Worker, prefix: Prefix, synchronous: bool, skipped: int
) -> None:
    right = worker.contents(PAGES)
    worker.save(prefix)
    worker.saved()
    reader.load(prefix, synchronous=synchronous, skipped=skipped)
    assert reader.contents(OTHERS[skipped:]) == [pages[skipped:] for pages in right]
    assert reader.side.take_bad_pages() == set()
    assert not reader.side.take_report()


@both_ways
def test_a_block_is_there_once_all_ranks_have_saved_it(link: GatedLink, synchronous: bool) -> None:
    prefix = fresh_prefix(BLOCKS, schema_of(2))
    workers = [Worker(link, rank, 2) for rank in range(2)]
    right = [worker.contents(PAGES) for worker in workers]
    workers[0].save(prefix)
    workers[0].saved()
    assert hit(link, prefix) == 0
    workers[1].save(prefix)
    workers[1].saved()
    assert hit(link, prefix) == BLOCKS
    for worker in workers:
        worker.load(prefix, synchronous=synchronous)
    assert [worker.contents(OTHERS) for worker in workers] == right
    for worker in workers:
        worker.side.close()


def test_blocks_that_are_there_are_not_written_again(
    worker: Worker, reader: Worker, prefix: Prefix
) -> None:
    right = worker.contents(PAGES)
    worker.save(prefix[:1], pages=PAGES[:BLOCK_PAGES])
    worker.saved()
    worker.save(prefix, number=2)
    worker.saved(number=2)
    reader.load(prefix, synchronous=True)
    assert reader.contents(OTHERS) == right


def test_a_part_of_a_prompt_is_saved_and_loaded_at_its_place(
    worker: Worker, link: GatedLink, prefix: Prefix
) -> None:
    worker.save(prefix[1:], pages=PAGES[BLOCK_PAGES:])
    worker.saved()
    assert link.call(lambda client: client.exists(prefix)) == [False, True, True]


def test_pages_of_a_finished_request_are_freed_once_its_saves_have_ended(
    worker: Worker, link: GatedLink, prefix: Prefix
) -> None:
    link.before = gate = Gate()
    order = SaveOrder(1, "r", prefix, PAGES)
    worker.side.begin(StepOrders(saves=[order], finished=["r"]))
    gate.reached.wait(30)
    assert worker.side.ended() == (set(), set())
    gate.opened.set()
    wait_until(lambda: worker.side.ended()[0] == {"r"}, "the pages are freed")
    assert worker.side.ended() == (set(), set())
    assert worker.side.take_report().ended_saves == {1: 1}


def test_a_finished_request_without_saves_is_freed_at_once(worker: Worker) -> None:
    worker.side.begin(StepOrders(finished=["r"]))
    assert worker.side.ended() == ({"r"}, set())


# -- loads that fail -------------------------------------------------------------------------------


def assert_failed_from(worker: Worker, block: int, *, skipped: int = 0, tainted: bool) -> None:
    bad = set(OTHERS[max(skipped, block * BLOCK_PAGES) :])
    assert worker.side.take_bad_pages() == bad
    report = worker.side.take_report()
    assert report.failed == {"r": block}
    assert report.tainted_pages == (bad if tainted else set())
    assert worker.side.take_bad_pages() == set()


@both_ways
@pytest.mark.parametrize("skipped", [0, 2])
def test_a_missing_block_ends_a_load_before_it(
    worker: Worker, reader: Worker, prefix: Prefix, synchronous: bool, skipped: int
) -> None:
    right = worker.contents(PAGES)
    worker.save(prefix[:2], pages=PAGES[: 2 * BLOCK_PAGES])
    worker.saved()
    reader.load(prefix, synchronous=synchronous, skipped=skipped)
    loaded = slice(skipped, 2 * BLOCK_PAGES)
    assert reader.contents(OTHERS[loaded]) == [pages[loaded] for pages in right]
    assert_failed_from(reader, 2, skipped=skipped, tainted=synchronous)


@both_ways
def test_a_corrupt_block_ends_a_load_before_it(
    worker: Worker, reader: Worker, link: GatedLink, prefix: Prefix, synchronous: bool
) -> None:
    worker.save(prefix)
    worker.saved()

    def flip(client: Any) -> None:
        with client.get(prefix, verify="off") as blocks:
            damage(blocks[1].memory, 5)

    link.call(flip)
    reader.load(prefix, synchronous=synchronous)
    assert_failed_from(reader, 1, tainted=synchronous)


@both_ways
def test_a_pool_that_is_not_there_fails_a_load_as_a_whole(
    worker: Worker, link: GatedLink, prefix: Prefix, synchronous: bool
) -> None:
    link.before = lambda: (_ for _ in ()).throw(NodeUnavailable("none"))
    worker.load(prefix, synchronous=synchronous, skipped=1)
    assert_failed_from(worker, 0, skipped=1, tainted=synchronous)


def test_positions_of_failed_blocks_count_from_the_begin_of_the_prompt(
    worker: Worker, prefix: Prefix
) -> None:
    order = LoadOrder("r", prefix[1:], 0, OTHERS[BLOCK_PAGES:], synchronous=True)
    worker.side.begin(StepOrders(loads=[order]))
    assert_failed_from(worker, 1, tainted=True)


@both_ways
def test_an_error_in_a_copy_is_a_failed_load(
    worker: Worker, prefix: Prefix, synchronous: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker.save(prefix)
    worker.saved()

    def fail(*_: object) -> None:
        raise RuntimeError("torch says no")

    monkeypatch.setattr(worker.pages.copier, "scatter", fail)
    worker.load(prefix, synchronous=synchronous)
    assert_failed_from(worker, 0, tainted=synchronous)


# -- saves that fail or are given up ---------------------------------------------------------------


def test_a_save_to_a_pool_that_is_not_there_ends(
    worker: Worker, link: GatedLink, prefix: Prefix
) -> None:
    link.before = lambda: (_ for _ in ()).throw(NodeUnavailable("none"))
    worker.save(prefix)
    worker.saved()
    link.before = lambda: None
    assert hit(link, prefix) == 0


def test_an_error_in_a_copy_stores_nothing(
    worker: Worker, link: GatedLink, prefix: Prefix, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("torch says no")

    monkeypatch.setattr(worker.pages.copier, "gather", fail)
    worker.save(prefix)
    worker.saved()
    assert hit(link, prefix) == 0
    monkeypatch.undo()
    worker.save(prefix, number=2)
    worker.saved(number=2)
    assert hit(link, prefix) == BLOCKS


def test_a_drained_save_that_has_not_begun_reads_no_page(
    worker: Worker, link: GatedLink, prefix: Prefix, monkeypatch: pytest.MonkeyPatch
) -> None:
    reads: list[object] = []
    monkeypatch.setattr(worker.pages.copier, "gather", lambda *pages: reads.append(pages))
    link.before = gate = Gate()
    worker.save(prefix)
    gate.reached.wait(30)
    worker.side.drain(["r", "unknown"])
    gate.opened.set()
    worker.saved()
    assert not reads
    assert hit(link, prefix) == 0


def test_a_drain_waits_for_a_copy_that_has_begun(
    worker: Worker, link: GatedLink, prefix: Prefix, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate, gather = Gate(), worker.pages.copier.gather
    monkeypatch.setattr(
        worker.pages.copier, "gather", lambda *arguments: (gate(), gather(*arguments))
    )
    right = worker.contents(PAGES)
    worker.save(prefix)
    gate.reached.wait(30)
    overwritten = threading.Event()

    def drain_and_overwrite() -> None:
        worker.side.drain(["r"])
        worker.pages.clear()
        overwritten.set()

    draining = Background(drain_and_overwrite)
    assert not overwritten.is_set()
    gate.opened.set()
    draining.result()
    worker.saved()
    worker.load(prefix, synchronous=True)
    assert worker.contents(OTHERS) == right


def test_a_drain_of_one_request_leaves_the_others(
    worker: Worker, link: GatedLink, prefix: Prefix
) -> None:
    link.before = gate = Gate()
    worker.save(prefix)
    gate.reached.wait(30)
    worker.side.drain(["other"])
    gate.opened.set()
    worker.saved()
    assert hit(link, prefix) == BLOCKS


def test_closing_gives_up_saves_that_have_not_begun(link: GatedLink, prefix: Prefix) -> None:
    worker = Worker(link)
    later = fresh_prefix(BLOCKS, schema_of(1))
    link.before = gate = Gate()
    worker.save(prefix)
    worker.save(later, number=2)
    gate.reached.wait(30)
    closing = Background(worker.side.close)
    gate.opened.set()
    closing.result()
    assert hit(link, later) == 0
