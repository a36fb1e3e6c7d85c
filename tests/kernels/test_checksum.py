"""Checksums by the kernel are those of `page_hash`, bit for bit: here in Triton's interpreter."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

torch = pytest.importorskip("torch")
triton = pytest.importorskip("triton")

from tiffin.kernels.checksum import launch_plan, page_hash, segment_checksum
from tiffin.kernels.checksum.segment_checksum import segment_checksums, segment_checksums_async
from tiffin.kernels.errors import DeviceError, LayoutError

PAGE = page_hash.PAGE_BYTES
TILE = launch_plan.TILE_BYTES
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
TWO_LEVELS = PAGE * PAGE // 8


def memory_of(nbytes: int, seed: int = 0) -> Any:
    data = np.random.default_rng(seed).integers(0, 256, nbytes, np.uint8)
    return torch.from_numpy(data).to(DEVICE)


MEMORY = memory_of(TILE + 6 * PAGE)
LARGE = np.random.default_rng(1).integers(0, 256, TWO_LEVELS + 5 * PAGE, np.uint8)


def both(memory: Any, spans: list[tuple[int, int]]) -> list[int]:
    """The kernel's checksums, which must equal the reference's."""
    found = segment_checksums(memory, spans, backend="triton")
    assert found.dtype == np.uint64
    assert found.tolist() == segment_checksums(memory, spans, backend="reference").tolist()
    return list(found.tolist())


def test_a_page_is_hashed_as_xxhash_does() -> None:
    for seed in range(3):
        memory = memory_of(PAGE, seed)
        page = memory.cpu().numpy().tobytes()
        root = xxhash.xxh3_64_intdigest(page).to_bytes(8, "little")
        expected = xxhash.xxh3_64_intdigest(root + PAGE.to_bytes(8, "little"))
        assert both(memory, [(0, PAGE)]) == [expected]


SPANS = st.tuples(
    st.one_of(st.integers(0, 40), st.sampled_from([PAGE, PAGE + 8, 2 * PAGE + 16])),
    st.one_of(
        st.integers(0, 3 * PAGE),
        st.builds(
            lambda pages, more: max(0, pages * PAGE + more), st.integers(0, 3), st.integers(-17, 17)
        ),
        st.sampled_from([TILE, TILE - 8, TILE + 1]),
    ),
)


@given(span=SPANS)
@settings(max_examples=5)
def test_the_kernel_and_the_reference_agree(span: tuple[int, int]) -> None:
    both(MEMORY, [span])


@pytest.mark.slow
@given(spans=st.lists(SPANS, min_size=1, max_size=3))
@settings(max_examples=6)
def test_the_kernel_and_the_reference_agree_at_length(spans: list[tuple[int, int]]) -> None:
    both(MEMORY, spans)


@pytest.mark.slow
def test_segments_of_every_kind_in_one_call() -> None:
    both(MEMORY, [(0, 0), (1, 0), (0, PAGE), (16, PAGE), (8, PAGE + 8), (3, PAGE + 1), (0, TILE)])


def carried_out(memory: Any, spans: list[tuple[int, int]]) -> tuple[list[int], int]:
    """The plan of these spans, with each launch computed by `page_hash`; how many launches."""
    offsets, lengths = (np.array(column, np.int64) for column in zip(*spans, strict=True))
    hashes = np.zeros(launch_plan.hash_count(lengths), np.uint64)
    made = np.zeros(len(hashes), np.int64)
    base = hashes.ctypes.data
    plan = launch_plan.plan(memory.ctypes.data + offsets, lengths, base)
    for tiles, align in plan.launches:
        for address, nbytes, first in tiles.T.tolist():
            assert not (address | nbytes) % align
            assert nbytes <= TILE
            inside = base <= address < base + hashes.nbytes
            source, begin = (
                (hashes.view(np.uint8), base) if inside else (memory, memory.ctypes.data)
            )
            found = page_hash.page_hashes(source[address - begin : address - begin + nbytes])
            hashes[first : first + len(found)] = found
            made[first : first + len(found)] += 1
    assert (made == 1).all(), "a page is hashed never or twice"
    whole = [
        xxhash.xxh3_64_intdigest(hashes[root].tobytes() + length.to_bytes(8, "little"))
        for root, length in plan.segments.T.tolist()
    ]
    return whole, len(plan.launches)


@given(
    spans=st.lists(
        st.tuples(
            st.integers(0, 4 * PAGE),
            st.one_of(
                st.integers(0, 3 * PAGE),
                st.sampled_from([TILE, TILE + 1, 2 * TILE + 9, TWO_LEVELS, TWO_LEVELS + 8]),
            ),
        ),
        min_size=1,
        max_size=6,
    )
)
@settings(max_examples=40)
def test_the_plan_hashes_every_page_once_level_by_level(spans: list[tuple[int, int]]) -> None:
    """Segments of one, two and three levels: more than 512 pages have a second page of hashes."""
    memory = LARGE
    found, launches = carried_out(memory, spans)
    assert found == page_hash.checksums(memory, spans).tolist()
    levels = 1 + sum(max(n for _, n in spans) > limit for limit in (PAGE, TWO_LEVELS))
    assert levels <= launches <= levels + 1


@pytest.mark.slow
def test_zeros_and_ones() -> None:
    for value in (0, 255):
        memory = torch.full((2 * PAGE + 24,), value, dtype=torch.uint8, device=DEVICE)
        assert len(set(both(memory, [(0, n) for n in (0, 8, PAGE, PAGE + 8)]))) == 4


@pytest.mark.slow
def test_views_of_a_larger_tensor_lie_anywhere() -> None:
    for begin in (1, 8):
        view = MEMORY[begin : begin + 2 * PAGE]
        whole = segment_checksums(MEMORY, [(begin, 2 * PAGE)], backend="reference")
        assert both(view, [(0, 2 * PAGE)]) == whole.tolist()


@pytest.mark.slow
def test_more_segments_than_one_program_finishes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(segment_checksum, "_FINISH_SEGMENTS", 2)
    spans = [(8 * i, 16 * i) for i in range(5)]
    assert len(set(both(MEMORY, spans))) == len(spans)


@pytest.mark.slow
def test_damage_changes_it() -> None:
    memory = MEMORY[: 3 * PAGE + 40]
    swapped = memory.clone()
    swapped[:PAGE], swapped[PAGE : 2 * PAGE] = memory[PAGE : 2 * PAGE], memory[:PAGE]
    damaged = [swapped]
    for place in (0, 1023, PAGE - 64, PAGE + 5, 3 * PAGE + 39):
        damaged.append(memory.clone())
        damaged[-1][place] ^= 1 << place % 8
    size = len(memory)
    found = both(torch.cat([memory, *damaged]), [(i * size, size) for i in range(7)])
    assert len(set(found)) == 7


@pytest.mark.slow
def test_bytes_beside_a_span_do_not_count() -> None:
    memory, spans = memory_of(3 * PAGE), [(24, PAGE + 8), (2 * PAGE + 3, 50)]
    right = both(memory, spans)
    memory[:24] = 0
    memory[24 + PAGE + 8 : 2 * PAGE + 3] = 0
    memory[2 * PAGE + 53 :] = 0
    assert both(memory, spans) == right


def test_nothing_to_do() -> None:
    for backend in ("triton", "reference"):
        found = segment_checksums(MEMORY, [], backend=backend)  # type: ignore[arg-type]
        assert (found.dtype, found.shape) == (np.uint64, (0,))


def test_a_cpu_tensor_is_hashed_where_it_is() -> None:
    memory = memory_of(5 * PAGE).cpu()
    expected = page_hash.checksums(memory.numpy(), [(0, 5 * PAGE), (1, 7)])
    assert segment_checksums(memory, [(0, 5 * PAGE), (1, 7)]).tolist() == expected.tolist()


def test_the_result_stays_on_the_device_until_it_is_asked_for() -> None:
    pending = segment_checksums_async(MEMORY, [(0, PAGE), (8, 100)], backend="triton")
    assert (pending.bits.device.type, pending.bits.dtype) == (DEVICE, torch.int64)
    assert (pending.event is None) == (DEVICE == "cpu")
    expected = segment_checksums(MEMORY, [(0, PAGE), (8, 100)], backend="reference")
    assert pending.result().tolist() == expected.tolist()


@pytest.mark.parametrize(
    "spans",
    [
        [(0, len(MEMORY) + 1)],
        [(0, 8), (len(MEMORY), 1)],
        [(-1, 1)],
        [(8, -1)],
        [(2**62, 2**62)],
        [(1, 2**63 - 1)],
        [(2**64, 1)],
        [(0.0, 1.5)],
        [(0, 1, 2)],
        [(0, 1), (0,)],
        ["no"],
    ],
)
@pytest.mark.parametrize("backend", ["triton", "reference"])
def test_spans_that_are_not_inside(spans: Any, backend: Any) -> None:
    with pytest.raises(LayoutError):
        segment_checksums(MEMORY, spans, backend=backend)


@pytest.mark.parametrize(
    "memory",
    [
        torch.zeros(64, dtype=torch.int8),
        torch.zeros(64, dtype=torch.float32),
        torch.zeros((8, 8), dtype=torch.uint8),
        torch.zeros(64, dtype=torch.uint8)[::2],
        np.zeros(64, np.uint8),
        bytes(64),
    ],
)
def test_other_memory_is_refused(memory: Any) -> None:
    with pytest.raises(LayoutError):
        segment_checksums(memory, [(0, 8)])


def test_other_devices_are_refused() -> None:
    with pytest.raises(DeviceError, match="meta"):
        segment_checksums(torch.zeros(64, dtype=torch.uint8, device="meta"), [(0, 8)])
    with pytest.raises(DeviceError, match="backend"):
        segment_checksums(MEMORY, [(0, 8)], backend="fast")  # type: ignore[arg-type]


def test_without_the_interpreter_the_kernel_takes_no_memory_of_the_host(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("tiffin.kernels.backend.interpreted", lambda: False)
    with pytest.raises(DeviceError, match="but for its interpreter"):
        segment_checksums(torch.zeros(8, dtype=torch.uint8), [(0, 8)], backend="triton")
