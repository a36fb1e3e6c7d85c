"""A worker's loads and saves, in an embedded node: prompts of three blocks of four pages."""

from __future__ import annotations

import contextlib
import threading
from collections import Counter
from typing import TYPE_CHECKING, Any

import pytest

pytest.importorskip("torch")

from kvsupport import Background, damage, fresh_prefix, wait_until
from pagesupport import BLOCK_PAGES, LAYERS, PAGE_TOKENS, Rank, schema_of

from tiffin.kvstore.client.blocks.block_places import RegionId
from tiffin.kvstore.connectors.vllm import worker_side
from tiffin.kvstore.connectors.vllm.orders import LoadOrder, SaveOrder, StepOrders, StepReport
from tiffin.kvstore.connectors.vllm.pool_link import PoolLink
from tiffin.kvstore.connectors.vllm.settings import Settings
from tiffin.kvstore.connectors.vllm.worker_side import WorkerSide
from tiffin.kvstore.errors import NodeUnavailable

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from tiffin.kvstore import Prefix
    from tiffin.kvstore.client.verbs.leased_blocks import LeasedBlocks
    from tiffin.kvstore.connectors.vllm.pages.copier import PageLoad

URL = "embedded:?dram=16MiB&prefault=false"
BLOCKS = 3
PAGES = (17, 2, 9, 4, 0, 13, 5, 11, 8, 3, 7, 1)
LAYER_NAMES = [f"layers.{index}" for index in range(LAYERS)]
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

    def region(self) -> Any:
        return self._link.region()

    def close(self) -> None:
        pass


class Worker:
    """A worker side of one rank, with pages of its own."""

    def __init__(self, link: GatedLink, rank: int = 0, ranks: int = 1) -> None:
        self.pages = Rank(schema_of(ranks), rank, ranks)
        settings = Settings(url=URL, layerwise="always")
        self.side = WorkerSide(settings, link, rank, ranks)  # type: ignore[arg-type]
        self.side.register(self.pages.copier, LAYER_NAMES)

    def save(self, prefix: Prefix, number: int = 1, pages: tuple[int, ...] = PAGES) -> None:
        self.side.begin(StepOrders(saves=[SaveOrder(number, "r", prefix, pages)]))

    def saved(self, number: int = 1) -> bool:
        """Wait for the end of a save. Returns whether all of its blocks are in the pool then."""

        def reported() -> StepReport | None:
            self.side.ended()
            report = self.side.take_report()
            return report if number in report.ended_saves else None

        return number not in wait_until(reported, "the save ends").failed_saves

    def load(
        self,
        prefix: Prefix,
        *,
        held: LeasedBlocks | None = None,
        by_layer: bool = False,
        **order: Any,
    ) -> None:
        """A load, until its end; pages are cleared before. `by_layer`: beside a forward pass."""
        self.pages.clear()
        places = held.places() if held is not None else None
        skipped = order.pop("skipped", 0)
        load = LoadOrder(7, "r", prefix, skipped, OTHERS[skipped:], places, **order)
        self.side.begin(StepOrders(loads=[load]), layers_wait=by_layer)
        if by_layer:
            self.forward()
            assert self.side.ended() == (set(), set())
        if not load.synchronous:
            wait_until(lambda: "r" in self.side.ended()[1], "the load ends")

    def forward(self) -> None:
        for layer in LAYER_NAMES:
            self.side.wait_for_layer(layer)

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


# Whether the blocks are held, and so, whether they are loaded synchronously.
WAYS = pytest.mark.parametrize("way", ["asynchronous", "held", "synchronous", "by layer"])


@contextlib.contextmanager
def held(link: GatedLink, prefix: Prefix, way: str) -> Iterator[dict[str, Any]]:
    """The arguments of `Worker.load` for a load in this way."""
    if way == "asynchronous":
        yield {}
        return
    with link.call(lambda client: client.get(prefix)) as leased:
        yield {"held": leased, "synchronous": way != "held", "by_layer": way == "by layer"}


def hit(link: GatedLink, prefix: Prefix) -> int:
    return int(link.call(lambda client: client.match(prefix)).blocks)


# -- what goes well --------------------------------------------------------------------------------


@WAYS
@pytest.mark.parametrize("skipped", [0, 1, 3])
def test_what_one_worker_saves_another_loads(
    worker: Worker, reader: Worker, link: GatedLink, prefix: Prefix, way: str, skipped: int
) -> None:
    right = worker.contents(PAGES)
    worker.save(prefix)
    worker.saved()
    with held(link, prefix, way) as order:
        reader.load(prefix, skipped=skipped, **order)
    assert reader.contents(OTHERS[skipped:]) == [pages[skipped:] for pages in right]
    assert reader.side.take_bad_pages() == set()
    report = reader.side.take_report()
    assert (report.failed, report.ended_loads) == ({}, Counter([7] if "held" in order else []))


@WAYS
def test_a_block_is_there_once_all_ranks_have_saved_it(link: GatedLink, way: str) -> None:
    prefix = fresh_prefix(BLOCKS, schema_of(2))
    workers = [Worker(link, rank, 2) for rank in range(2)]
    right = [worker.contents(PAGES) for worker in workers]
    workers[0].save(prefix)
    workers[0].saved()
    assert hit(link, prefix) == 0
    workers[1].save(prefix)
    workers[1].saved()
    assert hit(link, prefix) == BLOCKS
    with held(link, prefix, way) as order:
        for worker in workers:
            worker.load(prefix, **order)
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
    reader.load(prefix)
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


# -- held blocks -----------------------------------------------------------------------------------


def begin(worker: Worker, **orders: Any) -> Counter[RegionId]:
    """A step without loads; what can be read since then."""
    worker.side.begin(StepOrders(**orders))
    return worker.side.take_report().mapped


def test_a_worker_reports_once_which_memory_it_can_read(worker: Worker, link: GatedLink) -> None:
    region = link.call(lambda client: client.region)
    assert begin(worker) == Counter([region.identity])
    assert begin(worker) == Counter()


def test_memory_that_is_left_is_not_mapped_again(worker: Worker, link: GatedLink) -> None:
    region = link.call(lambda client: client.region)
    begin(worker)
    assert begin(worker, left_regions=[region.identity, RegionId(0, 0)]) == Counter()
    assert begin(worker) == Counter()


@pytest.mark.parametrize("synchronous", [False, True])
def test_held_blocks_are_loaded_without_the_node(
    worker: Worker, reader: Worker, link: GatedLink, prefix: Prefix, synchronous: bool
) -> None:
    right = worker.contents(PAGES)
    worker.save(prefix)
    worker.saved()
    begin(reader)
    with link.call(lambda client: client.get(prefix)) as leased:
        link.before = lambda: (_ for _ in ()).throw(NodeUnavailable("none"))
        reader.load(prefix, held=leased, synchronous=synchronous)
    assert reader.contents(OTHERS) == right
    assert not reader.side.take_bad_pages()


def test_an_error_of_a_synchronous_load_ends_the_engine(
    worker: Worker, link: GatedLink, prefix: Prefix, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The step would compute with pages that have anything."""
    worker.save(prefix)
    worker.saved()
    monkeypatch.setattr(worker.pages.copier, "scatter", torch_says_no)
    with held(link, prefix, "synchronous") as order, pytest.raises(RuntimeError, match="torch"):
        worker.load(prefix, **order)


@pytest.fixture
def by_layer(
    worker: Worker, link: GatedLink, prefix: Prefix, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Gate]:
    """A step has begun whose load, number 7, is copied beside it; the gate is before the last
    layer's copy."""
    gate, copier = Gate(), worker.pages.copier
    scatter_layers = copier.scatter_layers

    def gated(loads: Sequence[PageLoad]) -> Iterator[tuple[int, None]]:
        copies = scatter_layers(loads)
        for layer in range(LAYERS):
            if layer == LAYERS - 1:
                gate()
            yield next(copies)

    monkeypatch.setattr(copier, "scatter_layers", gated)
    worker.save(prefix)
    worker.saved()
    with held(link, prefix, "by layer") as order:
        load = LoadOrder(7, "r", prefix, 0, OTHERS, order["held"].places(), synchronous=True)
        worker.side.begin(StepOrders(loads=[load]), layers_wait=True)
        yield gate
        gate.opened.set()


@pytest.mark.parametrize("end", [WorkerSide.finish_loads, WorkerSide.ended])
def test_a_load_ends_once_all_layers_are_copied(
    worker: Worker, by_layer: Gate, end: Callable[[WorkerSide], object]
) -> None:
    by_layer.reached.wait(30)
    worker.side.wait_for_layer(LAYER_NAMES[0])
    step = Background(lambda: (worker.forward(), end(worker.side)))
    assert not worker.side.take_report().ended_loads
    by_layer.opened.set()
    step.result()
    assert worker.side.take_report().ended_loads == Counter([7])
    assert worker.side.counters.take()["loaded_tokens"] == BLOCKS * BLOCK_PAGES * PAGE_TOKENS


def test_a_step_begins_once_the_loads_of_the_last_one_have_ended(
    worker: Worker, by_layer: Gate
) -> None:
    by_layer.reached.wait(30)
    step = Background(lambda: (worker.forward(), worker.side.begin(StepOrders())))
    by_layer.opened.set()
    step.result()
    assert worker.side.take_report().ended_loads == Counter([7])


def test_an_error_in_a_copy_beside_a_step_ends_the_engine(
    worker: Worker, by_layer: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is raised in the engine's thread, and the load does not end."""
    by_layer.reached.wait(30)
    monkeypatch.setattr("torch._foreach_copy_", torch_says_no)
    by_layer.opened.set()
    for step in (worker.forward, worker.side.finish_loads, worker.side.ended):
        with pytest.raises(RuntimeError, match="torch"):
            step()
    with pytest.raises(RuntimeError, match="torch"):
        worker.side.begin(StepOrders())
    assert not worker.side.take_report().ended_loads


def torch_says_no(*_: object) -> None:
    raise RuntimeError("torch says no")


# -- loads that fail -------------------------------------------------------------------------------


def assert_failed_from(worker: Worker, block: int, *, skipped: int = 0) -> None:
    bad = set(OTHERS[max(skipped, block * BLOCK_PAGES) :])
    assert worker.side.take_bad_pages() == bad
    assert worker.side.take_report().failed == {"r": block}
    assert worker.side.take_bad_pages() == set()


@pytest.mark.parametrize("skipped", [0, 2])
def test_a_missing_block_ends_a_load_before_it(
    worker: Worker, reader: Worker, prefix: Prefix, skipped: int
) -> None:
    right = worker.contents(PAGES)
    worker.save(prefix[:2], pages=PAGES[: 2 * BLOCK_PAGES])
    worker.saved()
    reader.load(prefix, skipped=skipped)
    loaded = slice(skipped, 2 * BLOCK_PAGES)
    assert reader.contents(OTHERS[loaded]) == [pages[loaded] for pages in right]
    assert_failed_from(reader, 2, skipped=skipped)


def test_a_corrupt_block_ends_a_load_before_it(
    worker: Worker, reader: Worker, link: GatedLink, prefix: Prefix
) -> None:
    worker.save(prefix)
    worker.saved()

    def flip(client: Any) -> None:
        with client.get(prefix, verify="off") as blocks:
            damage(blocks[1].memory, 5)

    link.call(flip)
    reader.load(prefix)
    assert_failed_from(reader, 1)


def test_a_pool_that_is_not_there_fails_a_load_as_a_whole(
    worker: Worker, link: GatedLink, prefix: Prefix
) -> None:
    link.before = lambda: (_ for _ in ()).throw(NodeUnavailable("none"))
    worker.load(prefix, skipped=1)
    assert_failed_from(worker, 0, skipped=1)


def test_positions_of_failed_blocks_count_from_the_begin_of_the_prompt(
    worker: Worker, prefix: Prefix
) -> None:
    order = LoadOrder(1, "r", prefix[1:], 0, OTHERS[BLOCK_PAGES:])
    worker.side.begin(StepOrders(loads=[order]))
    wait_until(lambda: "r" in worker.side.ended()[1], "the load ends")
    assert_failed_from(worker, 1)


@pytest.mark.parametrize("way", ["asynchronous", "held"])
def test_an_error_in_a_copy_is_a_failed_load(
    worker: Worker, link: GatedLink, prefix: Prefix, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker.save(prefix)
    worker.saved()
    monkeypatch.setattr(worker.pages.copier, "scatter", torch_says_no)
    with held(link, prefix, way) as order:
        worker.load(prefix, **order)
    assert_failed_from(worker, 0)


# -- saves that fail or are given up ---------------------------------------------------------------


def test_a_save_to_a_pool_that_is_not_there_ends(
    worker: Worker, link: GatedLink, prefix: Prefix
) -> None:
    link.before = lambda: (_ for _ in ()).throw(NodeUnavailable("none"))
    worker.save(prefix)
    assert not worker.saved()
    link.before = lambda: None
    assert hit(link, prefix) == 0
    worker.save(prefix, number=2)
    assert worker.saved(number=2)
    worker.save(prefix, number=3)
    assert worker.saved(number=3), "what is there already is no failure"


def test_a_save_without_room_for_all_of_it_has_failed(
    worker: Worker, link: GatedLink, prefix: Prefix
) -> None:
    tier = link.call(lambda client: client.statistics())["tiers"]["dram"]
    blocks = tier["capacity_bytes"] // prefix.schema.extent_bytes - 1
    others = link.call(lambda client: client.reserve(fresh_prefix(blocks, prefix.schema)))
    worker.save(prefix)
    assert not worker.saved()
    assert hit(link, prefix) == 1
    others.abort()


def test_an_error_in_a_copy_stores_nothing(
    worker: Worker, link: GatedLink, prefix: Prefix, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker.pages.copier, "gather", torch_says_no)
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
    worker.load(prefix)
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


def hit_after_closing(link: GatedLink, first: Prefix) -> tuple[int, int]:
    """A worker that ends with one save in progress and one that has not begun: how many blocks of
    both there are then."""
    worker = Worker(link)
    later = fresh_prefix(BLOCKS, schema_of(1))
    link.before = gate = Gate()
    worker.save(first)
    worker.save(later, number=2)
    gate.reached.wait(30)
    closing = Background(worker.side.close)
    gate.opened.set()
    closing.result()
    return hit(link, first), hit(link, later)


def test_closing_ends_saves_that_have_not_begun(link: GatedLink, prefix: Prefix) -> None:
    assert hit_after_closing(link, prefix) == (BLOCKS, BLOCKS)


def test_closing_gives_up_saves_that_take_too_long(
    link: GatedLink, prefix: Prefix, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker_side, "CLOSE_S", 0.0)
    _, later = hit_after_closing(link, prefix)
    assert later == 0
