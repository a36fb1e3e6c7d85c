"""The copier with the Triton kernels: in their interpreter, and on a GPU where there is one."""

from __future__ import annotations

import threading
from contextlib import nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from gpusupport import LAYERS, SCHEMA, GpuRank, blocks, united  # noqa: E402

from tiffin.kernels.backend import interpreted  # noqa: E402
from tiffin.kernels.paged import gather_scatter  # noqa: E402
from tiffin.kvstore.connectors.vllm.layers.layer_loads import LayerLoads  # noqa: E402
from tiffin.kvstore.connectors.vllm.pages import device_page_copier  # noqa: E402
from tiffin.kvstore.connectors.vllm.pages.copier import PageLoad  # noqa: E402
from tiffin.messenger.gpu.pinning import Pinned  # noqa: E402

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
# The engine's stream is kept busy for about so long, at 1 to 2 GHz.
_BUSY_CYCLES = 400_000_000


@pytest.fixture(params=["interpreter", pytest.param("gpu", marks=needs_gpu)])
def where(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The device of the engine's tensors, whose kernels are Triton's."""
    if request.param == "gpu":
        return "cuda:0"
    if not interpreted():
        pytest.skip("the kernels are compiled: there is a GPU")
    for name in ("gather", "scatter"):
        move = partial(getattr(gather_scatter, name), backend="triton")
        monkeypatch.setattr(device_page_copier, name, move)
    return "cpu"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layout", "split", "by_layer"),
    [
        ("LBHNC", 1, False),
        ("LBHNC", 1, True),
        ("LBNHC", 2, False),
        ("LBNHC", 2, True),
        ("BLHNC", 1, False),
        ("BLNHC", 1, True),
        ("planes", 1, False),
        ("padded", 1, True),
    ],
)
def test_ranks_write_and_another_engine_reads(
    where: str, layout: str, split: int, by_layer: bool
) -> None:
    writers = [GpuRank(layout, 4, rank, 2, split=split, where=where) for rank in range(2)]
    (block,) = blocks(1)
    for writer in writers:
        writer.copier.warm_up()
        writer.copier.gather([block], [7, 0, 12, 3])
    assert block.tobytes() == united(writers, [7, 0, 12, 3])
    reader = GpuRank("LHBNC", 8, where=where, piece_bytes=3000)
    untouched = reader.share([0, 1, 2])
    if by_layer:
        list(reader.copier.scatter_layers([PageLoad([block], [9], 1)]))
    else:
        reader.copier.scatter([block], [9], 1)
    assert reader.share([9]) == b"".join(
        block[span.offset : span.end].reshape(-1, 16, 16)[:, 8:].tobytes()
        for span in SCHEMA.segments
    )
    assert reader.share([0, 1, 2]) == untouched


@pytest.fixture
def busy_stream() -> Iterator[Any]:
    """A stream, the current one, as an engine's."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        yield stream
    torch.cuda.synchronize()


def in_a_thread(action: Callable[[], None]) -> None:
    thread = threading.Thread(target=action)
    thread.start()
    thread.join()


@needs_gpu
@pytest.mark.parametrize("pinned", [False, True])
@pytest.mark.parametrize("skipped", [0, 1])
def test_a_load_is_written_after_steps_on_the_engines_stream(
    busy_stream: Any, pinned: bool, skipped: int
) -> None:
    source, target = GpuRank("LBNHC", where="cuda:0"), GpuRank("LBNHC", where="cuda:0")
    torch.cuda.synchronize()
    (block,) = blocks(1)
    source.copier.gather([block], [7, 0, 12, 3])
    torch.cuda._sleep(_BUSY_CYCLES)
    target.clear()  # late
    target.copier.step_begins()
    pages = [1, 5, 8, 30][skipped:]
    with Pinned(block, "cuda:0") if pinned else nullcontext():
        in_a_thread(lambda: target.copier.scatter([block], pages, skipped))
    assert busy_stream.query()  # a load waited for it
    assert target.share(pages) == source.share([7, 0, 12, 3][skipped:])


@needs_gpu
@pytest.mark.parametrize("pinned", [False, True])
def test_layers_are_read_on_the_engines_stream_once_they_are_there(
    busy_stream: Any, pinned: bool
) -> None:
    source = GpuRank("LBNHC", where="cuda:0")
    target = GpuRank("LBNHC", where="cuda:0", piece_bytes=700)
    torch.cuda.synchronize()
    (block,) = blocks(1)
    source.copier.gather([block], [7, 0, 12, 3])
    names = [f"layers.{index}" for index in range(LAYERS)]
    loads = LayerLoads(target.copier, names)
    torch.cuda._sleep(_BUSY_CYCLES)
    target.clear()  # late
    target.copier.step_begins()
    with Pinned(block, "cuda:0") if pinned else nullcontext():
        loads.begin([], [PageLoad([block], [1, 5, 8, 30])])
        read = []
        for name, layer in zip(names, target.layers, strict=True):
            loads.wait(name)
            read.append(layer.clone())
        loads.finish()
    torch.cuda.synchronize()
    target.layers = read
    assert target.share([1, 5, 8, 30]) == source.share([7, 0, 12, 3])
    loads.close()


@needs_gpu
@pytest.mark.parametrize("pinned", [False, True])
def test_a_save_ends_beside_a_busy_engine(busy_stream: Any, pinned: bool) -> None:
    rank = GpuRank("BLHNC", where="cuda:0")
    right = rank.share([7, 0, 12, 3])
    rank.copier.warm_up()
    torch.cuda._sleep(_BUSY_CYCLES)
    rank.copier.step_begins()
    (block,) = blocks(1)
    with Pinned(block, "cuda:0") if pinned else nullcontext():
        in_a_thread(lambda: rank.copier.gather([block], [7, 0, 12, 3]))
    assert not busy_stream.query()  # the save waited for no step
    rank.clear()
    torch.cuda.synchronize()
    assert block.tobytes() == right
