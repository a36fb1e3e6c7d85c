"""Ranges copied from a table of addresses: the kernel against the reference, and both against NumPy
slices."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tiffin.kernels import backend
from tiffin.kernels.errors import DeviceError, LayoutError
from tiffin.kernels.layout.access_width import alignment
from tiffin.kernels.ranges import copy_ranges

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

GPU = torch.cuda.is_available()
DEVICE = "cuda:0" if GPU else "cpu"


def columns(*rows: tuple[int, int, int]) -> tuple[NDArray[np.int64], ...]:
    return tuple(np.array(rows, np.int64).reshape(-1, 3).T)


def by_host(plan: tuple[NDArray[np.int64], ...], target: Any, source: Any, programs: int) -> None:
    copy_ranges.copy_ranges_host(*plan)


def by_kernel(plan: tuple[NDArray[np.int64], ...], target: Any, source: Any, programs: int) -> None:
    copy_ranges.copy_ranges(*plan, device=DEVICE, programs=programs)


@st.composite
def cuts(draw: st.DrawFn) -> tuple[list[tuple[int, int, int]], int, int]:
    """Ranges whose numbers a power of two divides, and the first offset of both buffers."""
    align = draw(st.sampled_from([1, 2, 4, 8, 16, 64]))
    lengths = draw(st.lists(st.integers(0, 40), max_size=8))
    shuffled = draw(st.permutations(range(len(lengths))))
    gaps = draw(st.lists(st.integers(0, 3), min_size=len(lengths), max_size=len(lengths)))
    starts = np.cumsum([0] + [n + g for n, g in zip(lengths, gaps, strict=True)])
    order = np.cumsum([0] + [lengths[i] for i in shuffled])
    rows = [
        (int(starts[i]) * align, int(order[j]) * align, lengths[i] * align)
        for j, i in enumerate(shuffled)
    ]
    return rows, draw(st.integers(0, 2)) * align, draw(st.integers(0, 2)) * align


@pytest.mark.parametrize("copy", [by_host, by_kernel])
@settings(max_examples=40)
@given(cuts(), st.integers(1, 5))
def test_as_numpy_slices(
    copy: Callable[..., None],
    cut: tuple[list[tuple[int, int, int]], int, int],
    programs: int,
) -> None:
    rows, target_at, source_at = cut
    rng = np.random.default_rng(len(rows))
    content = torch.from_numpy(rng.integers(0, 256, 40_000, dtype=np.uint8))
    before = torch.from_numpy(rng.integers(0, 256, 40_000, dtype=np.uint8))
    want = before.clone()
    where = "cpu" if copy is by_host else DEVICE
    target, source = before.to(where, copy=True), content.to(where, copy=True)
    to, come = target.data_ptr() + target_at, source.data_ptr() + source_at
    copy(columns(*((to + t, come + s, n) for t, s, n in rows)), target, source, programs)
    for t, s, n in rows:
        want[target_at + t : target_at + t + n] = content[source_at + s : source_at + s + n]
    assert torch.equal(target.cpu(), want)


@pytest.mark.parametrize("copy", [by_host, by_kernel])
def test_ranges_longer_than_a_chunk(copy: Callable[..., None]) -> None:
    nbytes = 2 * copy_ranges.CHUNK_BYTES + 48
    where = "cpu" if copy is by_host else DEVICE
    source = torch.arange(3 * nbytes, device=where).to(torch.uint8)
    target = torch.zeros(3 * nbytes, dtype=torch.uint8, device=where)
    plan = columns(
        (target.data_ptr(), source.data_ptr() + 2 * nbytes, nbytes),
        (target.data_ptr() + 2 * nbytes, source.data_ptr(), 16),
    )
    copy(plan, target, source, 2)
    assert torch.equal(target[:nbytes], source[2 * nbytes :])
    assert torch.equal(target[2 * nbytes :][:16], source[:16])
    assert not target[nbytes : 2 * nbytes].any()
    assert not target[2 * nbytes + 16 :].any()


def test_large_and_small_on_the_host() -> None:
    """Both methods of the reference: by records, and by memmove."""
    source = np.random.default_rng(0).integers(0, 256, 1 << 20, dtype=np.uint8)
    for length, step in ((4096, 4096), (100_001, 100_001), (24, 40)):
        count = len(source) // step
        target = np.zeros_like(source)
        at = np.arange(count) * step
        to = at[::-1].copy()
        copy_ranges.copy_ranges_host(
            target.ctypes.data + to, source.ctypes.data + at, np.full(count, length)
        )
        got = target[: count * step].reshape(count, step)[::-1]
        assert np.array_equal(
            got[:, :length], source[: count * step].reshape(count, step)[:, :length]
        )
        assert not got[:, length:].any()


def test_what_divides_everything() -> None:
    assert alignment(*columns((32, 64, 16))) == 16
    assert alignment(*columns((32, 64, 16), (4, 64, 16))) == 4
    assert alignment(*columns((32, 65, 16))) == 1
    assert alignment(*columns()) == 16
    assert alignment(*columns((32, 64, 16)), 8, 0) == 8


def test_a_table_is_cut_in_chunks() -> None:
    table = copy_ranges.chunk_table(*columns((1000, 5000, 25), (2000, 6000, 10)), chunk_bytes=10)
    assert table.T.tolist() == [
        [1000, 5000, 10], [1010, 5010, 10], [1020, 5020, 5], [2000, 6000, 10]
    ]  # fmt: skip


def test_few_programs_for_a_link() -> None:
    assert copy_ranges.link_programs(copy_ranges.CHUNK_BYTES) == 16
    assert copy_ranges.link_programs(4096) == 64
    assert copy_ranges.link_programs(1) == 64


@pytest.mark.parametrize("copy", [by_host, by_kernel])
@pytest.mark.parametrize(
    "plan",
    [
        columns((1, 1, -1)),
        columns((0, 1, 1)),
        columns((1, 0, 1)),
        (np.zeros(1, np.int64), np.zeros(2, np.int64), np.zeros(1, np.int64)),
        (np.ones(1), np.ones(1), np.ones(1)),
        (np.ones((1, 1), np.int64),) * 3,
    ],
)
def test_bad_tables_are_refused(copy: Callable[..., None], plan: tuple[Any, ...]) -> None:
    with pytest.raises(LayoutError):
        copy(plan, None, None, 1)


def test_nothing_to_copy_and_no_programs() -> None:
    copy_ranges.copy_ranges_host(*columns())
    copy_ranges.copy_ranges(*columns((0, 0, 0)), device=DEVICE)
    with pytest.raises(LayoutError, match="programs"):
        copy_ranges.copy_ranges(*columns((8, 8, 8)), device=DEVICE, programs=0)


def test_a_cpu_has_no_kernels_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backend, "interpreted", lambda: False)
    assert not copy_ranges.available("cpu")
    for launches in (True, False):  # False: no C compiler for Triton's launcher, say
        monkeypatch.setattr(backend, "can_launch", lambda launches=launches: launches)
        assert copy_ranges.available("cuda") is launches
    with pytest.raises(DeviceError, match="copy_ranges_host"):
        copy_ranges.copy_ranges(*columns((8, 8, 8)), device="cpu")
