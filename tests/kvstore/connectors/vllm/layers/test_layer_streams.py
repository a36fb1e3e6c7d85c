"""A worker's loads of blocks that another engine's worker saves by layer, in an embedded node."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

pytest.importorskip("torch")

from kvsupport import fresh_prefix, is_quiet, wait_until
from layersupport import LayeredWorker
from pagesupport import BLOCK_PAGES, LAYERS, PAGE_TOKENS, schema_of
from test_worker_side import BLOCKS, OTHERS, PAGES, GatedLink

from tiffin.kvstore.connectors.vllm.orders import LoadOrder, StepOrders

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tiffin.kvstore import Client, Prefix

BLOCK_TOKENS = BLOCK_PAGES * PAGE_TOKENS


class StreamingWorker(LayeredWorker):
    """A worker of the engine that decodes."""

    def stream(self, prefix: Prefix, skipped: int = 0) -> None:
        """Begin a load; pages are cleared before."""
        self.pages.clear()
        pages = OTHERS[skipped : BLOCK_PAGES * len(prefix)]
        load = LoadOrder(7, "r", prefix, skipped, pages, streamed=True)
        self.side.begin(StepOrders(loads=[load]))

    def wait(self) -> None:
        wait_until(lambda: "r" in self.side.ended()[1], "the load ends")

    def layer(self, layer: int, pages: tuple[int, ...]) -> list[bytes]:
        return [self.pages.page(layer, page) for page in pages]


@pytest.fixture
def writer(link: GatedLink) -> Iterator[LayeredWorker]:
    one = LayeredWorker(link)
    yield one
    one.side.close()


@pytest.fixture
def reader(link: GatedLink, client: Client) -> Iterator[StreamingWorker]:
    one = StreamingWorker(link)
    yield one
    one.side.close()
    wait_until(lambda: is_quiet(client.statistics()), "no lease is left")


@pytest.mark.parametrize("skipped", range(BLOCK_PAGES))
def test_each_layer_is_in_the_pages_before_the_next_is_computed(
    writer: LayeredWorker, reader: StreamingWorker, prefix: Prefix, skipped: int
) -> None:
    reader.stream(prefix, skipped)
    writer.begin_step(prefix)
    targets = OTHERS[skipped:]
    for layer in range(LAYERS):
        writer.compute(layer)
        right = [writer.pages.page(layer, page) for page in PAGES[skipped:]]
        wait_until(lambda layer=layer, right=right: reader.layer(layer, targets) == right, "loaded")
        assert not any(map(any, reader.layer(LAYERS - 1, targets))) or layer == LAYERS - 1
        assert reader.side.ended() == (set(), set()), "nothing counts before it is stored"
    writer.end_step()
    writer.confirm(1)
    reader.wait()
    assert reader.side.take_bad_pages() == set()
    counts = reader.side.counters.take()
    assert counts["loaded_tokens"] == counts["streamed_tokens"] == BLOCKS * BLOCK_TOKENS


def test_blocks_of_later_steps_follow(
    writer: LayeredWorker, reader: StreamingWorker, prefix: Prefix
) -> None:
    """Chunked prefill: each step reserves its own blocks."""
    reader.stream(prefix)
    for number, begin in enumerate(range(BLOCKS), start=1):
        writer.begin_step(prefix[begin : begin + 1], number)
        writer.compute(*range(LAYERS))
        writer.end_step()
        writer.confirm(number)
        writer.saved(number)
    reader.wait()
    assert reader.side.take_bad_pages() == set()
    # Each step wrote its block from the same pages.
    right = writer.contents(PAGES[:BLOCK_PAGES])
    assert reader.contents(OTHERS) == [layer * BLOCKS for layer in right]


def test_what_the_writer_gives_up_is_not_loaded(
    writer: LayeredWorker, reader: StreamingWorker, prefix: Prefix
) -> None:
    writer.begin_step(prefix[:1])
    writer.compute(*range(LAYERS))
    writer.end_step()
    writer.confirm(1)
    writer.saved()
    reader.stream(prefix)
    writer.begin_step(prefix[1:], number=2)
    writer.compute(0)
    wait_until(lambda: any(map(any, reader.layer(0, OTHERS[BLOCK_PAGES:]))), "it is being loaded")
    writer.give_up(2)
    reader.wait()
    assert reader.side.take_bad_pages() == set(OTHERS[BLOCK_PAGES:])
    assert reader.side.take_report().failed == {"r": prefix.start + 1}
    counts = reader.side.counters.take()
    assert counts["load_failures/writer"] == 1
    assert counts["streamed_tokens"] == BLOCK_TOKENS


@pytest.mark.parametrize("begun", [False, True])
def test_a_writer_that_says_nothing_more_is_waited_for_so_long(
    writer: LayeredWorker, reader: StreamingWorker, prefix: Prefix, begun: bool
) -> None:
    assert reader.side._layer_streams is not None
    reader.side._layer_streams._timeout_s = 0.2
    if begun:
        writer.begin_step(prefix)
        writer.compute(0)
        writer.settle()
    reader.stream(prefix)
    reader.wait()
    assert reader.side.take_bad_pages() == set(OTHERS)
    if begun:
        writer.give_up(1)


def test_a_stream_is_no_reason_to_wait_for_other_loads(
    writer: LayeredWorker, reader: StreamingWorker, prefix: Prefix
) -> None:
    stored = fresh_prefix(BLOCKS, schema_of(1))
    writer.save(stored, number=9)
    writer.saved(9)
    for number in range(4):
        load = LoadOrder(number, f"s{number}", prefix, 0, OTHERS, streamed=True)
        reader.side.begin(StepOrders(loads=[load]))
    reader.load(stored)
    assert reader.contents(OTHERS) == writer.contents(PAGES)
    writer.begin_step(prefix)
    writer.compute(*range(LAYERS))
    writer.end_step()
    writer.confirm(1)
    ended: set[str] = set()

    def all_ended() -> bool:
        ended.update(reader.side.ended()[1])
        return len(ended) == 4

    wait_until(all_ended, "the streams end")


@pytest.mark.parametrize("ranks", [2])
def test_each_rank_streams_its_heads(link: GatedLink, ranks: int) -> None:
    prefix = fresh_prefix(BLOCKS, schema_of(ranks))
    writers = [LayeredWorker(link, rank, ranks) for rank in range(ranks)]
    readers = [StreamingWorker(link, rank, ranks) for rank in range(ranks)]
    for writer in writers:
        writer.begin_step(prefix)
    for reader in readers:
        reader.stream(prefix)
    for writer in writers:
        writer.compute(*range(LAYERS))
        writer.end_step()
        writer.confirm(1)
    for reader, writer in zip(readers, writers, strict=True):
        reader.wait()
        assert reader.side.take_bad_pages() == set()
        assert reader.contents(OTHERS) == writer.contents(PAGES)
    sides: list[Any] = [*writers, *readers]
    for one in sides:
        one.side.close()
