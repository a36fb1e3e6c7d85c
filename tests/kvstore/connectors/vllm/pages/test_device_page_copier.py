"""Copies between pages in CUDA's layouts and blocks, against blocks put together row by row."""

from __future__ import annotations

import random
import threading
from contextlib import nullcontext
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

torch = pytest.importorskip("torch")

from gpusupport import (  # noqa: E402
    BLOCK_TOKENS,
    KV_HEADS,
    LAYERS,
    LAYOUTS,
    ROW_BYTES,
    SCHEMA,
    GpuRank,
    blocks,
    united,
)

from tiffin.kernels.errors import PageError  # noqa: E402
from tiffin.kvstore.connectors.vllm.pages import device_queue  # noqa: E402
from tiffin.kvstore.connectors.vllm.pages.copier import PageLoad  # noqa: E402
from tiffin.kvstore.connectors.vllm.pages.device_page_copier import STAGES  # noqa: E402
from tiffin.kvstore.connectors.vllm.pages.device_queue import CudaQueue, device_of  # noqa: E402
from tiffin.kvstore.connectors.vllm.pages.token_schema import token_schema  # noqa: E402
from tiffin.kvstore.errors import InvalidInput  # noqa: E402
from tiffin.messenger.errors import RangeError  # noqa: E402
from tiffin.messenger.gpu.pinning import Pinned  # noqa: E402

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

ALL = (*LAYOUTS, "planes", "padded")
every_layout = pytest.mark.parametrize("layout", ALL)


def gathered(ranks: Sequence[GpuRank], pages: Sequence[int]) -> list[NDArray[np.uint8]]:
    """The blocks of these pages, read-only as leased ones are."""
    each = ranks[0].copier.pages
    found = blocks(len(pages) // each)
    for rank in ranks:
        rank.copier.gather(found, pages)
    for block in found:
        block.flags.writeable = False
    return found


@every_layout
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_all_ranks_together_fill_a_block_as_it_is_defined(layout: str, ranks: int) -> None:
    mine = [GpuRank(layout, 4, rank, ranks) for rank in range(ranks)]
    pages = [17, 2, 9, 4, 0, 13, 5, 11]
    one, other = gathered(mine, pages)
    assert one.tobytes() == united(mine, pages[:4])
    assert other.tobytes() == united(mine, pages[4:])


@every_layout
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("piece_bytes", [1, 1 << 20])
def test_layer_after_layer_fills_the_same_blocks(layout: str, ranks: int, piece_bytes: int) -> None:
    mine = [GpuRank(layout, 4, rank, ranks, piece_bytes=piece_bytes) for rank in range(ranks)]
    pages = [17, 2, 9, 4, 0, 13, 5, 11]
    found = blocks(2)
    for layer in range(LAYERS):
        for rank in mine:
            rank.copier.gather_layer(layer, found, pages, rank.copier.mark())
        end = SCHEMA.block_bytes // LAYERS * (layer + 1)
        for block, whole in zip(found, gathered(mine, pages), strict=True):
            assert block[:end].tobytes() == whole[:end].tobytes()
            assert set(block[end:]) <= {0xEE}, "nothing of later layers"


@given(data=st.data())
@settings(max_examples=60)
def test_what_one_engine_writes_another_of_any_kind_reads(data: st.DataObject) -> None:
    """Other layout, other page size, other number of ranks, pieces of any size, by layer or not."""
    draw = data.draw
    page_tokens = st.sampled_from([1, 2, 4, 8, 16])
    piece_bytes = st.sampled_from([1, 700, 3000, 1 << 20])
    ranks = st.sampled_from([1, 2, 4])

    def engine() -> list[GpuRank]:
        layout, tokens, count = draw(st.sampled_from(ALL)), draw(page_tokens), draw(ranks)
        compact = layout in ("LBHNC", "LBNHC")  # vLLM splits pages only where they are dense
        split = draw(st.sampled_from([n for n in (1, 2, 4) if tokens % n == 0])) if compact else 1
        piece = draw(piece_bytes)
        return [
            GpuRank(layout, tokens, rank, count, split=split, piece_bytes=piece)
            for rank in range(count)
        ]

    def table(of: GpuRank) -> list[int]:
        count = 2 * of.copier.pages
        return draw(st.permutations(range(of.pages)))[:count]

    writers, readers = engine(), engine()
    written, read = table(writers[0]), table(readers[0])
    found = gathered(writers, written)
    skipped = draw(st.integers(0, readers[0].copier.pages - 1))
    left_out = draw(st.integers(0, readers[0].copier.pages - 1))  # the engine computes the rest
    kept = read[skipped : len(read) - left_out]
    untouched = [page for page in range(readers[0].pages) if page not in kept]
    right = b"".join(block.tobytes() for block in found)
    how = draw(st.sampled_from(["whole", "layers", "each layer alone"]))
    for reader in readers:
        before = reader.rows(untouched)
        if how == "layers":
            list(reader.copier.scatter_layers([PageLoad(found, kept, skipped)]))
        elif how == "each layer alone":
            for layer in range(LAYERS):
                reader.copier.scatter_layer(layer, reader.alone(layer, found), kept, skipped)
        else:
            reader.copier.scatter(found, kept, skipped)
        assert reader.rows(untouched) == before
    for index, page in enumerate(kept, skipped):
        tokens = readers[0].form.page_tokens
        block, at = divmod(index * tokens, BLOCK_TOKENS)
        payload = np.frombuffer(right, np.uint8).reshape(2, -1, BLOCK_TOKENS, ROW_BYTES)
        assert united(readers, [page]) == payload[block, :, at : at + tokens].tobytes()


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_a_rank_reads_a_block_of_its_own_bytes_only(ranks: int) -> None:
    """As a pool sends it from another host; eight ranks share four heads."""
    source = GpuRank("LBHNC")
    whole = gathered([source], [3, 9, 1, 0])[0]
    for number in range(ranks):
        rank = GpuRank("BLNHC", 8, number, ranks)
        heads = (rank.heads.start, rank.heads.stop)
        parts = [whole[span.offset : span.end] for span in SCHEMA.ranges(heads=heads)]
        packed = np.concatenate(parts)
        assert len(packed) == rank.copier.block_bytes
        rank.copier.scatter([packed], [6, 2])
        assert rank.share([6, 2]) == packed.tobytes()


def test_a_rank_alone_leaves_the_bytes_of_the_others() -> None:
    rank = GpuRank("LBNHC", 4, 1, 2)
    (block,) = gathered([rank], [5, 1, 0, 9])
    mine = np.concatenate(
        [np.arange(span.offset, span.end) for span in SCHEMA.ranges(heads=(2, 4))]
    )
    others = np.setdiff1d(np.arange(len(block)), mine)
    assert (block[others] == 0xEE).all()
    assert block[mine].tobytes() == rank.share([5, 1, 0, 9])


def test_fewer_blocks_than_pages_fill_the_first_pages() -> None:
    rank = GpuRank("LBNHC")
    found = gathered([rank], list(range(8)))
    rank.clear()
    rank.copier.scatter(found[:1], [10, 11, 12, 13, 14, 15])
    assert any(rank.rows([13])[0])
    assert not any(b"".join(rank.rows([14, 15])))
    rank.copier.scatter([], [20])
    assert not any(rank.rows([20])[0])


def test_pages_and_blocks_that_are_not_there_are_refused_and_the_copier_goes_on() -> None:
    rank = GpuRank("LBNHC")
    before = rank.rows(range(rank.pages))
    for _ in range(STAGES + 1):  # a stage that was not given back would be missed
        with pytest.raises(PageError):
            rank.copier.scatter(blocks(1), [0, 1, 2, rank.pages])
        with pytest.raises(RangeError):
            rank.copier.scatter(blocks(1, 100), [0, 1, 2, 3])
    assert rank.rows(range(rank.pages)) == before
    assert gathered([rank], [7, 3, 2, 1])[0].tobytes() == rank.share([7, 3, 2, 1])


@every_layout
def test_a_warm_up_changes_no_page(layout: str) -> None:
    rank = GpuRank(layout)
    before = rank.rows(range(rank.pages))
    rank.copier.warm_up()
    assert rank.rows(range(rank.pages)) == before


LAYER_BYTES = SCHEMA.block_bytes // LAYERS
# Groups of three blocks, of which a buffer has room for a part of a layer, a layer, and all.
GROUPS = pytest.mark.parametrize(
    ("piece_bytes", "ends"),
    [(1, [1, 2, 3]), (4 * LAYER_BYTES, [1, 2, 3]), (8 * LAYER_BYTES, [2, 3]), (1 << 20, [3])],
)


@GROUPS
def test_layers_of_several_loads_come_one_after_the_other(
    piece_bytes: int, ends: list[int]
) -> None:
    source = GpuRank("LBHNC")
    pages = [3, 9, 1, 0, 2, 8, 5, 7, 20, 21, 22, 23]
    found = gathered([source], pages)
    rank = GpuRank("BLNHC", piece_bytes=piece_bytes)
    rank.clear()
    loads = [PageLoad(found[:2], range(10, 17), 1), PageLoad(found[2:], [30, 31, 32, 33])]
    targets = [*range(10, 17), 30, 31, 32, 33]
    right = [row(source, page) for page in pages[1:]]
    seen = []
    for end, _ in rank.copier.scatter_layers(loads):
        seen.append(end)
        expected = [layers[:end] + [b""] * (LAYERS - end) for layers in right]
        assert [row(rank, page) for page in targets] == expected
    assert seen == ends


def row(rank: GpuRank, page: int) -> list[bytes]:
    """A page's bytes of each layer; empty where all are zero."""
    share = rank.share([page])
    each = len(share) // LAYERS
    layers = [share[at : at + each] for at in range(0, len(share), each)]
    return [layer if any(layer) else b"" for layer in layers]


@pytest.mark.slow
def test_threads_share_a_copier() -> None:
    """As many as a worker has, and one more, each with pages of its own."""
    rank = GpuRank("LBNHC", piece_bytes=700)
    wrong: list[object] = []

    def work(number: int) -> None:
        mine, others = range(number * 8, number * 8 + 4), range(number * 8 + 4, number * 8 + 8)
        for _ in range(20):
            right = rank.share(mine)
            (block,) = gathered([rank], mine)
            rank.copier.scatter([block], others)
            if block.tobytes() != right or rank.share(others) != right:
                wrong.append(number)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(STAGES + 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_layers_that_blocks_do_not_have_are_refused() -> None:
    from gpusupport import shape_of

    with pytest.raises(InvalidInput, match="layers to 3; the blocks have 2"):
        GpuRank(schema=token_schema(shape_of(layers=2), BLOCK_TOKENS, 4))


def test_pages_on_another_device_are_refused_by_name() -> None:
    assert device_of(torch.device("cpu")).copier is not None
    with pytest.raises(InvalidInput, match="pages on meta"):
        device_of(torch.device("meta"))


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is there")
def test_a_gpu_that_torch_does_not_see_is_refused_at_the_start() -> None:
    pytest.importorskip("triton")
    with pytest.raises(InvalidInput, match="no copies to or from cuda:0"):
        device_of(torch.device("cuda:0"))


def test_a_gpu_without_kernels_is_refused_at_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_queue, "available", lambda device_type: False)
    with pytest.raises(InvalidInput, match=r"no kernels on cuda:0: .* a C compiler"):
        device_of(torch.device("cuda:0"))


def test_a_queue_of_a_gpu_is_a_stream() -> None:
    """Kernels are launched on it, and events order it."""
    calls: list[object] = []
    stream = SimpleNamespace(
        wait_event=lambda event: calls.append(("wait", event)), record_event=lambda: "recorded"
    )
    queue = CudaQueue(stream)
    queue.run(lambda on: calls.append(("launch", on)))
    queue.wait("event")
    assert calls == [("launch", stream), ("wait", "event")]
    assert queue.record() == "recorded"


# -- the order of what a device does ---------------------------------------------------------------


class LateQueue:
    """A queue of a simulated device."""

    def __init__(self, lanes: Any) -> None:
        self._lanes, self.lane = lanes, lanes.lane()

    def run(self, launch: Any) -> None:
        self.lane.todo.append((None, lambda: launch(None)))

    def wait(self, event: Any) -> None:
        self._lanes.wait(self.lane, event)

    def record(self) -> Any:
        return self._lanes.record(self.lane)


class LateDevice:
    """A device that does everything late, in any order that events allow. `engine` is the queue of
    the engine's steps."""

    def __init__(self, seed: int) -> None:
        from lanesupport import SimulatedLanes

        from tiffin.messenger.gpu.copier import DeviceCopier

        self.lanes = SimulatedLanes(random.Random(seed).randrange)
        self.copier = DeviceCopier("cpu", lanes=self.lanes)
        self.engine = LateQueue(self.lanes)

    def queue(self) -> LateQueue:
        return LateQueue(self.lanes)

    def steps(self) -> Any:
        return self.engine.record()

    def await_in_steps(self, event: Any) -> None:
        self.engine.wait(event)

    def buffer(self, nbytes: int) -> Any:
        return torch.empty(nbytes, dtype=torch.uint8)

    def ended(self) -> bool:
        """Whether nothing is queued but for the engine."""
        return not [
            lane for lane in self.lanes._lanes if lane.todo and lane is not self.engine.lane
        ]


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("pinned", [False, True])
@pytest.mark.parametrize("skipped", [0, 1])
def test_a_load_is_written_after_the_steps_that_were_launched_before_it(
    seed: int, pinned: bool, skipped: int
) -> None:
    """A step that was launched for a request that is gone still writes to its pages."""
    source = GpuRank("LBHNC")
    (block,) = gathered([source], [3, 9, 1, 0])
    device = LateDevice(seed)
    rank = GpuRank("LBNHC", device=device, piece_bytes=1 << 20 if seed % 3 == 0 else 700)
    for _ in range(3):
        device.engine.run(lambda _: rank.clear())
    rank.copier.step_begins()
    targets = [5, 6, 7, 8][skipped:]
    with Pinned(block, "cpu") if pinned else nullcontext():
        rank.copier.scatter([block], targets, skipped)
    assert rank.share(targets) == source.share([3, 9, 1, 0][skipped:])
    assert device.ended()


@pytest.mark.parametrize("seed", range(24))
@pytest.mark.parametrize("pinned", [False, True])
def test_a_step_reads_a_layer_once_it_is_there(seed: int, pinned: bool) -> None:
    """The engine's queue waits for each layer's event, and this thread for none."""
    source = GpuRank("LBHNC")
    (block,) = gathered([source], [3, 9, 1, 0])
    device = LateDevice(seed)
    rank = GpuRank("LBNHC", device=device, piece_bytes=700)
    device.engine.run(lambda _: rank.clear())  # a step that still writes to these pages
    rank.copier.step_begins()
    read: dict[int, list[bytes]] = {}

    def attend(layer: int) -> None:
        read[layer] = [row(rank, page)[layer] for page in (5, 6, 7, 8)]

    with Pinned(block, "cpu") if pinned else nullcontext():
        for end, event in rank.copier.scatter_layers([PageLoad([block], [5, 6, 7, 8])]):
            rank.copier.await_layers(event)
            device.engine.run(lambda _, layer=end - 1: attend(layer))
    assert device.ended()
    device.engine.record().synchronize()
    right = [row(source, page) for page in (3, 9, 1, 0)]
    assert read == {layer: [page[layer] for page in right] for layer in range(LAYERS)}


@pytest.mark.parametrize("seed", range(12))
def test_a_warm_up_comes_after_what_clears_a_new_cache(seed: int) -> None:
    device = LateDevice(seed)
    rank = GpuRank("LBNHC", device=device, piece_bytes=700)
    device.engine.run(lambda _: rank.clear())
    rank.copier.step_begins()
    rank.copier.warm_up()
    assert not any(b"".join(rank.rows(range(rank.pages))))


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("pinned", [False, True])
def test_a_save_has_been_copied_when_it_returns(seed: int, pinned: bool) -> None:
    device = LateDevice(seed)
    rank = GpuRank("LBNHC", device=device, piece_bytes=700)
    right = rank.share([3, 9, 1, 0])
    (block,) = blocks(1)
    with Pinned(block, "cpu") if pinned else nullcontext():
        rank.copier.gather([block], [3, 9, 1, 0])
    assert device.ended()
    rank.clear()
    assert block.tobytes() == right


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("skipped", [0, 1])
def test_moves_on_the_device_are_ordered_as_those_over_the_bus(seed: int, skipped: int) -> None:
    device = LateDevice(seed)
    rank = GpuRank("LBNHC", device=device)
    right = rank.share([3, 9, 1, 0][skipped:])
    block = torch.empty(rank.copier.device_block_bytes, dtype=torch.uint8)
    rank.copier.gather_device([block], [3, 9, 1, 0])
    assert device.ended()
    for _ in range(3):
        device.engine.run(lambda _: rank.clear())
    rank.copier.step_begins()
    targets = [5, 6, 7, 8][skipped:]
    rank.copier.scatter_device([block], targets, skipped)
    assert rank.share(targets) == right
    assert device.ended()


@pytest.mark.parametrize("seed", range(6))
def test_a_warm_up_on_the_device_comes_after_what_clears_a_new_cache(seed: int) -> None:
    device = LateDevice(seed)
    rank = GpuRank("LBNHC", device=device)
    room = rank.copier.device_block_bytes
    device.engine.run(lambda _: rank.clear())
    rank.copier.step_begins()
    rank.copier.warm_up_device([torch.empty(room, dtype=torch.uint8) for _ in range(2)])
    assert not any(b"".join(rank.rows(range(rank.pages))))


def test_a_save_waits_for_no_step() -> None:
    """Its tokens are confirmed; the steps that were launched since may take long."""
    device = LateDevice(1)
    rank = GpuRank("LBNHC", device=device)
    never = device.lanes.record(device.lanes.lane())  # of a lane that is stopped:
    device.lanes._lanes[-1].todo.clear()
    device.engine.wait(never)
    rank.copier.step_begins()
    (block,) = gathered([rank], [3, 9, 1, 0])
    assert block.tobytes() == rank.share([3, 9, 1, 0])
    kept = torch.empty(rank.copier.device_block_bytes, dtype=torch.uint8)
    rank.copier.gather_device([kept], [3, 9, 1, 0])
    assert kept[: len(block)].numpy().tobytes() == block.tobytes()


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("layer", range(LAYERS))
def test_a_layer_is_read_after_the_device_has_computed_it(seed: int, layer: int) -> None:
    """Its hook is called when it is launched."""
    device = LateDevice(seed)
    rank = GpuRank("LBNHC", device=device)
    device.engine.run(lambda _: rank.layers[layer].fill_(1.0))
    (block,) = blocks(1)
    rank.copier.gather_layer(layer, [block], [3, 9, 1, 0], rank.copier.mark())
    assert device.ended()
    size = SCHEMA.block_bytes // LAYERS
    found = block[layer * size : (layer + 1) * size].tobytes()
    assert found == torch.ones(size // 2, dtype=torch.bfloat16).view(torch.uint8).numpy().tobytes()


@pytest.mark.parametrize("seed", range(6))
def test_a_load_that_fails_leaves_nothing_queued(seed: int) -> None:
    """Its pages are computed next, and blocks and buffers are used by others."""
    device = LateDevice(seed)
    rank = GpuRank("LBNHC", device=device, piece_bytes=700)
    (block,) = gathered([GpuRank("LBHNC")], [3, 9, 1, 0])
    queued = device.copier.submit

    def fail_later(*arguments: Any, **options: Any) -> Any:
        if device.lanes.log:
            raise RangeError("a copy is refused")
        return queued(*arguments, **options)

    device.copier.submit = fail_later  # type: ignore[method-assign]
    with pytest.raises(RangeError):
        rank.copier.scatter([block], [5, 6, 7, 8])
    assert device.ended()
    device.copier.submit = queued  # type: ignore[method-assign]
    rank.copier.scatter([block], [5, 6, 7, 8])
    assert rank.share([5, 6, 7, 8]) == block.tobytes()


def test_four_heads_are_four_groups() -> None:
    assert SCHEMA.shards == KV_HEADS
