"""Workers of GPU engines that differ in all but their model, on one embedded node."""

from __future__ import annotations

from itertools import product
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

pytest.importorskip("torch")

from gpusupport import (
    BLOCK_TOKENS,
    KV_HEADS,
    LAYERS,
    ROW_BYTES,
    SCHEMA,
    GpuRank,
    shape_of,
    united,
)
from kvsupport import fresh_prefix, wait_until

from tiffin.kvstore.connectors.vllm.orders import LoadOrder, SaveOrder, StepOrders
from tiffin.kvstore.connectors.vllm.pages.rank_share import rank_share
from tiffin.kvstore.connectors.vllm.pages.token_schema import token_schema
from tiffin.kvstore.connectors.vllm.pool_link import PoolLink
from tiffin.kvstore.connectors.vllm.settings import Settings
from tiffin.kvstore.connectors.vllm.worker_side import WorkerSide

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from tiffin.kvstore import Prefix

URL = "embedded:?dram=16MiB&prefault=false"
BLOCKS = 3
TOKENS = BLOCKS * BLOCK_TOKENS
LAYER_NAMES = [f"layers.{index}" for index in range(LAYERS)]


class WaitingLink:
    """The node of a test, which calls wait for."""

    def __init__(self, link: PoolLink) -> None:
        self._link = link

    def call(self, action: Any, wait_s: float = 30.0) -> Any:
        return self._link.call(action, wait_s)

    def region(self) -> Any:
        return self._link.region()

    def close(self) -> None:
        pass


class Engine:
    """The workers of one engine."""

    def __init__(
        self,
        link: WaitingLink,
        ranks: int,
        layout: str,
        page_tokens: int,
        stages: tuple[int, ...] = (),
    ) -> None:
        self._link = link
        self.ranks: list[GpuRank] = []
        self.stages = max(1, len(stages))
        self.block_pages = BLOCK_TOKENS // page_tokens
        self.sides = []
        for stage, rank in product(range(self.stages), range(ranks)):
            layers = rank_share(KV_HEADS, rank, ranks, stage, stages).layers or (0, LAYERS)
            pages = GpuRank(layout, page_tokens, rank, ranks, layers=layers)
            place = (rank, ranks, KV_HEADS, stage, stages)
            settings = Settings(url=URL, layerwise="always")
            side = WorkerSide(settings, link, *place)  # type: ignore[arg-type]
            side.register(pages.copier, LAYER_NAMES[slice(*layers)])
            self.ranks.append(pages)
            self.sides.append(side)

    def table(self, seed: int) -> tuple[int, ...]:
        """The pages of a prompt, anywhere."""
        pages = np.random.default_rng(seed).permutation(self.ranks[0].pages)
        return tuple(pages[: BLOCKS * self.block_pages].tolist())

    def save(self, prefix: Prefix, pages: tuple[int, ...]) -> None:
        """A save on all ranks, each of which reports its end."""
        for side in self.sides:
            side.begin(StepOrders(saves=[SaveOrder(1, "r", prefix, pages)]))
            ended: dict[int, int] = {}

            def is_reported(side: WorkerSide = side, ended: dict[int, int] = ended) -> bool:
                side.ended()
                ended.update(side.take_report().ended_saves)
                return ended == {1: 1}

            wait_until(is_reported, "the save ends")

    def load(
        self, prefix: Prefix, pages: tuple[int, ...], *, skipped: int = 0, way: str = "home"
    ) -> set[int]:
        """A load on all ranks; returns the pages that were not loaded."""
        leased, places = None, None
        if way in ("held", "by layer"):
            leased = self._link.call(lambda client: client.get(prefix))
            places = leased.places()
        by_layer = way == "by layer"
        order = LoadOrder(1, "r", prefix, skipped, pages, places, by_layer, way == "remote")
        bad: set[int] = set()
        for side in self.sides:
            side.begin(StepOrders(loads=[order]), layers_wait=by_layer)
            if by_layer:
                for layer in LAYER_NAMES:
                    side.wait_for_layer(layer)
                side.finish_loads()
            else:
                wait_until(lambda side=side: "r" in side.ended()[1], "the load ends")
            bad |= side.take_bad_pages()
        if leased is not None:
            leased.release()
        return bad

    def rows(self, pages: Sequence[int]) -> Any:
        """What stands in the pages, uint8 [layers, K and V, heads, tokens, row bytes]."""
        ranks = len(self.ranks) // self.stages
        copies = ranks // min(ranks, KV_HEADS)  # ranks with the same heads
        content = b"".join(
            united(self.ranks[first : first + ranks : copies], pages)
            for first in range(0, len(self.ranks), ranks)
        )
        return np.frombuffer(content, np.uint8).reshape(LAYERS, 2, KV_HEADS, -1, ROW_BYTES)

    def close(self) -> None:
        for side in self.sides:
            side.close()


@pytest.fixture
def link() -> Iterator[WaitingLink]:
    link = PoolLink.shared(URL, "always")
    yield WaitingLink(link)
    link.close()


@pytest.fixture
def engine(link: WaitingLink) -> Iterator[Any]:
    made: list[Engine] = []

    def make(ranks: int, layout: str, page_tokens: int, stages: tuple[int, ...] = ()) -> Engine:
        made.append(Engine(link, ranks, layout, page_tokens, stages))
        return made[-1]

    yield make
    for one in made:
        one.close()


@pytest.mark.parametrize("way", ["home", "held", "by layer", "remote"])
@pytest.mark.parametrize("readers", [1, 2, 4, 8])
@pytest.mark.parametrize("writers", [1, 2, 4, 8])
def test_what_so_many_ranks_write_any_number_reads(
    engine: Any, writers: int, readers: int, way: str
) -> None:
    """Eight ranks share four heads. Pages of 4 and 8 tokens, and another layout."""
    prefix = fresh_prefix(BLOCKS, SCHEMA)
    writer, reader = engine(writers, "LBNHC", 4), engine(readers, "BLHNC", 8)
    written, read = writer.table(writers), reader.table(readers)
    writer.save(prefix, written)
    assert reader.load(prefix, read[1:], skipped=1, way=way) == set()
    assert (reader.rows(read[1:]) == writer.rows(written)[:, :, :, 8:]).all()


@pytest.mark.parametrize("way", ["home", "held", "remote"])
@pytest.mark.parametrize("readers", [(1, ()), (4, ()), (1, (1, 2)), (8, (1, 1, 1))])
@pytest.mark.parametrize("writers", [(1, ()), (2, ()), (1, (2, 1)), (2, (1, 2)), (8, (2, 1))])
def test_what_stages_of_ranks_write_any_others_read(
    engine: Any, writers: tuple[int, Any], readers: tuple[int, Any], way: str
) -> None:
    """So many ranks, and the layers of each stage."""
    prefix = fresh_prefix(BLOCKS, SCHEMA)
    writer = engine(writers[0], "LBNHC", 4, writers[1])
    reader = engine(readers[0], "BLHNC", 8, readers[1])
    written, read = writer.table(1), reader.table(2)
    writer.save(prefix, written)
    assert reader.load(prefix, read[1:], skipped=1, way=way) == set()
    assert (reader.rows(read[1:]) == writer.rows(written)[:, :, :, 8:]).all()


def test_all_ranks_with_the_same_heads_load_them(engine: Any) -> None:
    prefix = fresh_prefix(BLOCKS, SCHEMA)
    writer, reader = engine(2, "LBNHC", 4), engine(8, "LBHNC", 16)
    written, read = writer.table(1), reader.table(2)
    writer.save(prefix, written)
    assert reader.load(prefix, read) == set()
    for one, other in zip(reader.ranks[::2], reader.ranks[1::2], strict=True):
        assert one.heads == other.heads
        assert one.share(read) == other.share(read)


def test_a_block_is_there_once_all_heads_are_saved(engine: Any, link: WaitingLink) -> None:
    prefix = fresh_prefix(BLOCKS, SCHEMA)
    writer = engine(2, "LBNHC", 4)
    pages = writer.table(1)
    writer.sides, both = writer.sides[:1], writer.sides
    writer.save(prefix, pages)
    assert link.call(lambda client: client.match(prefix)).blocks == 0
    writer.sides = both[1:]
    writer.save(prefix, pages)
    assert link.call(lambda client: client.match(prefix)).blocks == BLOCKS
    writer.sides = both


def test_a_block_is_there_once_all_stages_are_saved(engine: Any, link: WaitingLink) -> None:
    prefix = fresh_prefix(BLOCKS, SCHEMA)
    writer = engine(2, "LBNHC", 4, (1, 2))
    pages, sides = writer.table(1), writer.sides
    for stage_rank in (3, 0, 2, 1):
        assert link.call(lambda client: client.match(prefix)).blocks == 0
        writer.sides = [sides[stage_rank]]
        writer.save(prefix, pages)
    assert link.call(lambda client: client.match(prefix)).blocks == BLOCKS
    writer.sides = sides


def test_another_models_blocks_are_not_loaded(engine: Any) -> None:
    prefix = fresh_prefix(BLOCKS, SCHEMA)
    other = token_schema(shape_of(weights="other"), BLOCK_TOKENS, 4).prefix(prefix.tokens)
    writer = engine(1, "LBNHC", 4)
    pages = writer.table(1)
    writer.save(prefix, pages)
    before = writer.rows(range(40)).copy()
    assert writer.load(other, pages) == set(pages)
    assert (writer.rows(range(40)) == before).all()
