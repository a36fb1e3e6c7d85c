"""Copies to and from a device: the plan, real bytes on device `cpu`, and a simulated device, which
runs late and in any order that the events allow."""

from __future__ import annotations

import gc
import random
import threading
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from lanesupport import SimulatedLanes
from netsupport import StoppedClock

from tiffin.messenger.errors import RangeError, RegionError, TransferTimeout
from tiffin.messenger.gpu import copier as device_module
from tiffin.messenger.gpu.copier import (
    Copies,
    CudaError,
    DeviceCopier,
    DeviceUnavailable,
    StillCopying,
)
from tiffin.messenger.gpu.copy_plan import (
    FEW_RANGES,
    LARGE_BYTES,
    SMALL_BYTES,
    Able,
    CopyRows,
    Direction,
    Path,
    check_disjoint,
    choose,
    join,
    pieces,
)
from tiffin.messenger.gpu.pinning import Pinned

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

torch = pytest.importorskip("torch")

ALL = Able(batches=True, kernels=True)
UP, DOWN, WITHIN = Direction.TO_DEVICE, Direction.FROM_DEVICE, Direction.WITHIN


def rows_of(*ranges: tuple[int, int, int], owners: list[int] | None = None) -> CopyRows:
    """Copies of (target, source, length)."""
    columns = np.array(ranges, np.int64).reshape(-1, 3).T
    column = np.zeros(len(ranges), np.int64) if owners is None else np.array(owners, np.int64)
    return CopyRows(columns[0], columns[1], columns[2], column)


def scattered(count: int, nbytes: int, *, host_contiguous: bool = False) -> CopyRows:
    """Ranges to the device, with gaps there, and on the host too unless `host_contiguous`."""
    gap = nbytes if host_contiguous else 2 * nbytes
    return rows_of(*((1 << 40 | i * 3 * nbytes, 4096 + i * gap, nbytes) for i in range(count)))


def listed(rows: CopyRows) -> list[tuple[int, int, int]]:
    columns = (rows.targets.tolist(), rows.sources.tolist(), rows.lengths.tolist())
    return list(zip(*columns, strict=True))


class TestJoining:
    def test_neighbours_become_one(self) -> None:
        rows = rows_of((10, 110, 5), (15, 115, 5), (30, 120, 5), (20, 200, 0))
        assert listed(join(rows, UP)) == [(10, 110, 10), (30, 120, 5)]

    def test_the_order_of_asking_does_not_matter(self) -> None:
        rows = rows_of((15, 115, 5), (30, 120, 5), (10, 110, 5))
        assert listed(join(rows, UP)) == [(10, 110, 10), (30, 120, 5)]

    def test_allocations_that_touch_stay_apart(self) -> None:
        rows = rows_of((10, 110, 5), (15, 115, 5), owners=[0, 1])
        assert listed(join(rows, UP)) == [(10, 110, 5), (15, 115, 5)]

    def test_the_hosts_side_is_in_order(self) -> None:
        rows = rows_of((10, 900, 5), (50, 100, 5), (30, 500, 5))
        assert join(rows, UP).sources.tolist() == [100, 500, 900]
        assert join(rows, DOWN).targets.tolist() == [10, 30, 50]


class TestOverlaps:
    @pytest.mark.parametrize(
        "ranges",
        [
            [(10, 100, 5), (14, 200, 5)],
            [(10, 100, 5), (10, 100, 5)],
            [(10, 14, 5)],
            [(10, 100, 50), (200, 59, 5)],
            [(10, 100, 5), (100, 300, 1)],
        ],
    )
    def test_are_refused(self, ranges: list[tuple[int, int, int]]) -> None:
        with pytest.raises(RangeError, match="overlap"):
            check_disjoint(rows_of(*ranges))

    def test_neighbours_and_shared_sources_are_not_overlaps(self) -> None:
        check_disjoint(rows_of((10, 100, 5), (15, 100, 5), (20, 15 + 10, 3)))
        check_disjoint(rows_of())

    @given(
        st.lists(st.tuples(st.integers(1, 60), st.integers(1, 60), st.integers(1, 6)), max_size=6)
    )
    def test_as_a_model_says(self, ranges: list[tuple[int, int, int]]) -> None:
        written = [byte for target, _, n in ranges for byte in range(target, target + n)]
        read = {byte for _, source, n in ranges for byte in range(source, source + n)}
        fine = len(written) == len(set(written)) and not read & set(written)
        if fine:
            check_disjoint(rows_of(*ranges))
        else:
            with pytest.raises(RangeError):
                check_disjoint(rows_of(*ranges))


class TestChoosing:
    @pytest.mark.parametrize(
        ("count", "nbytes", "path"),
        [
            (1, 1 << 30, Path.SINGLE),
            (FEW_RANGES, 100, Path.SINGLE),
            (1000, LARGE_BYTES, Path.SINGLE),
            (1000, LARGE_BYTES - 1, Path.BATCH),
            (1000, SMALL_BYTES, Path.BATCH),
            (1000, SMALL_BYTES - 1, Path.KERNEL),
            (FEW_RANGES + 1, 100, Path.KERNEL),
        ],
    )
    def test_by_number_and_size(self, count: int, nbytes: int, path: Path) -> None:
        rows = scattered(count, nbytes)
        assert choose(rows, UP, ALL, pinned=True, reachable=True) is path

    def test_small_pieces_of_one_host_range_are_staged(self) -> None:
        rows = scattered(1000, 4096, host_contiguous=True)
        assert choose(rows, UP, ALL, pinned=True, reachable=False) is Path.STAGED

    def test_what_is_not_pinned_bounces(self) -> None:
        for rows in (scattered(1, 1 << 20), scattered(1000, 100)):
            assert choose(rows, UP, ALL, pinned=False, reachable=False) is Path.BOUNCED

    def test_without_what_a_path_needs(self) -> None:
        neither = Able(batches=False, kernels=False)
        small, middle = scattered(1000, 100), scattered(1000, SMALL_BYTES)
        assert choose(middle, UP, neither, pinned=True, reachable=True) is Path.SINGLE
        assert choose(small, UP, neither, pinned=True, reachable=True) is Path.SINGLE
        no_kernels = Able(batches=True, kernels=False)
        assert choose(small, UP, no_kernels, pinned=True, reachable=True) is Path.BATCH
        assert choose(small, UP, ALL, pinned=True, reachable=False) is Path.BATCH

    def test_within_the_device_a_kernel_does_all_but_few_and_large(self) -> None:
        def path(rows: CopyRows) -> Path:
            return choose(rows, WITHIN, ALL, pinned=True, reachable=True)

        assert path(scattered(100, LARGE_BYTES)) is Path.SINGLE
        assert path(scattered(100, LARGE_BYTES - 1)) is Path.KERNEL
        assert path(scattered(FEW_RANGES, 16)) is Path.SINGLE


@given(st.lists(st.integers(1, 50), max_size=20), st.integers(1, 70))
def test_pieces_fill_a_buffer_and_lose_nothing(lengths: list[int], piece_bytes: int) -> None:
    starts = [1000 * (i + 1) for i in range(len(lengths))]
    rows = rows_of(*((10**6 + s, s, n) for s, n in zip(starts, lengths, strict=True)))
    moved: list[int] = []
    parts = list(pieces(rows, piece_bytes))
    for part, at in parts:
        assert at.tolist() == [0, *np.cumsum(part.lengths)[:-1].tolist()]
        assert (part.targets - part.sources == 10**6).all()
        assert part.lengths.min() > 0
        for source, length in zip(part.sources.tolist(), part.lengths.tolist(), strict=True):
            moved += range(source, source + length)
    assert moved == [s + i for s, n in zip(starts, lengths, strict=True) for i in range(n)]
    assert all(part.nbytes == piece_bytes for part, _ in parts[:-1])


# --- real bytes ---------------------------------------------------------------------------------

DEVICE_BYTES = HOST_BYTES = 1 << 17


@st.composite
def plans(draw: st.DrawFn) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    """Target offsets that do not overlap, source offsets, lengths: in one of three styles."""
    size = draw(st.sampled_from([1, 16, 100, 512, 4096]))
    count = draw(st.integers(0, min(80, DEVICE_BYTES // size)))
    seed = draw(st.integers(0, 2**32 - 1))
    rng = np.random.default_rng(seed)
    targets = rng.permutation(DEVICE_BYTES // size)[:count] * size
    style = draw(st.sampled_from(["contiguous", "scattered", "shared"]))
    if style == "contiguous":
        sources = np.arange(count) * size
    elif style == "scattered":
        sources = rng.permutation(HOST_BYTES // size)[:count] * size
    else:
        sources = rng.integers(0, HOST_BYTES - size + 1, count)
    lengths = np.full(count, size) if draw(st.booleans()) else rng.integers(0, size + 1, count)
    return targets.astype(np.int64), sources.astype(np.int64), lengths.astype(np.int64)


def expected(
    before: NDArray[np.uint8],
    source: NDArray[np.uint8],
    plan: tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]],
) -> NDArray[np.uint8]:
    """The model: one NumPy slice after the other."""
    after = before.copy()
    for target, come, length in zip(*(column.tolist() for column in plan), strict=True):
        after[target : target + length] = source[come : come + length]
    return after


def random_bytes(seed: int, nbytes: int) -> NDArray[np.uint8]:
    return np.random.default_rng(seed).integers(0, 256, nbytes, dtype=np.uint8)


def check_copies(
    copier: DeviceCopier,
    way: Direction,
    plan: tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]],
    *,
    pinned: bool,
) -> None:
    """Submit `plan` in two groups and compare with the model."""
    source, target = random_bytes(1, HOST_BYTES), random_bytes(2, DEVICE_BYTES)
    want = expected(target, source, plan)
    ends: list[Any] = [target, source]
    if way is not DOWN:
        ends[0] = torch.from_numpy(target)
    if way is not UP:
        ends[1] = torch.from_numpy(source)
    half = len(plan[0]) // 2
    groups = [
        [Copies(ends[0], ends[1], *(column[part] for column in plan))]
        for part in (slice(None, half), slice(half, None))
    ]
    holders = [Pinned(array, "cpu") for array in (target, source) if pinned]
    try:
        transfer = copier.submit(groups)
        transfer.wait(10.0)
        assert len(transfer.events) == 2
    finally:
        for holder in holders:
            holder.close()
    assert np.array_equal(target, want)


@given(plans(), st.sampled_from(list(Direction)), st.booleans())
def test_device_cpu_moves_what_a_model_moves(
    plan: tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]],
    way: Direction,
    pinned: bool,
) -> None:
    with DeviceCopier("cpu", staging_bytes=4096) as copier:
        check_copies(copier, way, plan, pinned=pinned)
        assert copier.statistics()["in_flight_bytes"] == 0


@settings(max_examples=150)
@given(
    plans(),
    st.sampled_from(list(Direction)),
    st.booleans(),
    st.integers(1, 3),
    st.booleans(),
    st.randoms(use_true_random=True),  # seeded: the device goes on when an example is over
)
def test_a_late_device_moves_what_a_model_moves(
    plan: tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]],
    way: Direction,
    pinned: bool,
    staging_count: int,
    batches: bool,
    chance: random.Random,
) -> None:
    """Double buffering is right in every order that the events allow."""
    lanes = SimulatedLanes(chance.randrange, batches=batches)
    with DeviceCopier(
        "cpu", staging_bytes=4096, staging_count=staging_count, lanes=lanes
    ) as copier:
        for _ in range(2):  # the second finds slots that the first has used
            check_copies(copier, way, plan, pinned=pinned)


@pytest.mark.parametrize("staging_count", [1, 2, 3])
@pytest.mark.parametrize("host_contiguous", [True, False])
@pytest.mark.parametrize("pinned", [True, False])
@pytest.mark.parametrize("way", [UP, DOWN])
def test_many_pieces_through_few_buffers(
    way: Direction, pinned: bool, host_contiguous: bool, staging_count: int
) -> None:
    """Twenty-four pieces of small ranges, through each path that has buffers."""
    host = np.arange(100) * 1024 + np.arange(100) * (0 if host_contiguous else 16)
    for seed in range(4):
        device = np.random.default_rng(seed).permutation(HOST_BYTES // 1024)[:100] * 1024
        plan = (device, host) if way is UP else (host, device)
        lanes = SimulatedLanes(random.Random(seed).randrange)
        with DeviceCopier(
            "cpu", staging_bytes=4096, staging_count=staging_count, lanes=lanes
        ) as copier:
            check_copies(copier, way, (*plan, np.full(100, 1024)), pinned=pinned)
            path = "bounced" if not pinned else "staged" if host_contiguous else "kernel"
            assert copier.statistics()[f"{way.value}.{path}.bytes"] == 100 * 1024


# --- the copier -----------------------------------------------------------------------------------


@pytest.fixture
def lanes() -> SimulatedLanes:
    return SimulatedLanes(random.Random(3).randrange)


@pytest.fixture
def copier(lanes: SimulatedLanes) -> Iterator[DeviceCopier]:
    copier = DeviceCopier("cpu", staging_bytes=64 << 10, lanes=lanes)
    yield copier
    lanes.frozen = False
    copier.close()


@pytest.fixture
def host() -> Iterator[NDArray[np.uint8]]:
    """1 MiB, pinned."""
    array = random_bytes(5, 1 << 20)
    with Pinned(array, "cpu"):
        yield array


def on_device(nbytes: int) -> Any:
    return torch.zeros(nbytes, dtype=torch.uint8)


def pages(host: NDArray[np.uint8], device: Any, nbytes: int, count: int) -> Copies:
    """`count` pieces, contiguous on the host, every other page of the device."""
    at = np.arange(count) * nbytes
    return Copies(device, host, 2 * at, at, np.full(count, nbytes))


class TestQueueing:
    def test_neighbours_are_one_copy(
        self, copier: DeviceCopier, lanes: SimulatedLanes, host: NDArray[np.uint8]
    ) -> None:
        device = on_device(len(host))
        halves = [(device[: 1 << 19], host[: 1 << 19]), (device[1 << 19 :], host[1 << 19 :])]
        copier.submit([halves]).wait(5.0)
        assert lanes.log == [("single", 1)]
        assert np.array_equal(device.numpy(), host)
        assert copier.statistics()["to_device.single.ranges"] == 1

    def test_small_pieces_are_staged_in_few_calls(
        self, copier: DeviceCopier, lanes: SimulatedLanes, host: NDArray[np.uint8]
    ) -> None:
        device = on_device(1 << 20)
        copier.submit([[pages(host, device, 1024, 256)]]).wait(5.0)
        assert lanes.log == [("single", 1), ("kernel", 64)] * 4  # 256 KiB through 64 KiB
        assert np.array_equal(device.numpy().reshape(-1, 2, 1024)[:256, 0].ravel(), host[: 1 << 18])
        numbers = copier.statistics()
        assert numbers["to_device.staged.bytes"] == 1 << 18
        assert numbers["to_device.staged.ranges"] == 256

    def test_middle_ranges_are_one_batch(
        self, copier: DeviceCopier, lanes: SimulatedLanes, host: NDArray[np.uint8]
    ) -> None:
        device = on_device(2 << 20)
        copier.submit([[pages(host, device, SMALL_BYTES, 32)]]).wait(5.0)
        assert lanes.log == [("batch", 32)]

    def test_scattered_pieces_are_one_kernel(
        self, copier: DeviceCopier, lanes: SimulatedLanes, host: NDArray[np.uint8]
    ) -> None:
        at = np.arange(100) * 2048
        device = on_device(1 << 20)
        copier.submit([[Copies(host, device, at, at, np.full(100, 1024))]]).wait(5.0)
        assert lanes.log == [("kernel", 100)]
        assert copier.statistics()["from_device.kernel.bytes"] == 100 * 1024

    def test_a_group_is_there_before_the_next(
        self, copier: DeviceCopier, lanes: SimulatedLanes, host: NDArray[np.uint8]
    ) -> None:
        device = on_device(1 << 20)
        layers = [
            [(device[i << 18 : (i + 1) << 18], host[i << 18 : (i + 1) << 18])] for i in range(4)
        ]
        transfer = copier.submit(layers)
        for i, event in enumerate(transfer.events):
            event.synchronize()
            assert np.array_equal(device.numpy()[: (i + 1) << 18], host[: (i + 1) << 18])
            if i < 3:
                assert not device.numpy()[(i + 1) << 18 :].any()
        transfer.wait(5.0)

    def test_what_is_queued_after_a_group_runs_after_it(
        self, copier: DeviceCopier, lanes: SimulatedLanes, host: NDArray[np.uint8]
    ) -> None:
        device = on_device(1 << 20)
        transfer = copier.submit([[pages(host, device, 1024, 64)], [(device[-4:], host[-4:])]])
        engine = lanes.lane()
        transfer.stream_wait(engine, group=0)
        seen: list[bytes] = []
        engine.todo.append((None, lambda: seen.append(device.numpy()[:1024].tobytes())))
        end = lanes.record(engine)
        end.synchronize()
        assert seen == [host[:1024].tobytes()]

    @pytest.mark.parametrize("paged", [True, False])
    def test_copies_wait_for_what_they_are_told(
        self, copier: DeviceCopier, lanes: SimulatedLanes, host: NDArray[np.uint8], paged: bool
    ) -> None:
        device, engine = on_device(1 << 20), lanes.lane()
        gate = lanes.record(lanes.lane())
        gate.synchronize()
        gate.come = False  # the engine computes on
        lanes.wait(engine, gate)
        engine.todo.append((None, lambda: device.fill_(9)))
        filled = lanes.record(engine)
        groups: list[list[Any]] = [[(host, device)]]
        if paged:  # through the lane of kernels
            half = pages(host, device, 1024, 256)
            swapped = (half.source_offsets, half.target_offsets, half.lengths)
            groups = [[Copies(host, device, *swapped)]]
            copier.submit(groups).wait(5.0)  # makes the buffers, which orders the lanes once
        transfer = copier.submit(groups, after=filled)
        for _ in range(20):
            assert not transfer.done()
        gate.come = True
        transfer.wait(5.0)
        assert (host[: 1 << 18] == 9).all()

    def test_nothing_to_copy_is_a_transfer(self, copier: DeviceCopier) -> None:
        for groups in ([], [[]], [[(on_device(0), np.empty(0, np.uint8))], []]):
            transfer = copier.submit(groups)
            transfer.wait(5.0)
            assert len(transfer.events) == len(groups)
            assert transfer.nbytes == 0


class TestGivingUp:
    def test_a_wait_ends_and_the_memory_is_kept(
        self, copier: DeviceCopier, lanes: SimulatedLanes, host: NDArray[np.uint8]
    ) -> None:
        device = on_device(len(host))
        lanes.frozen = True
        transfer = copier.submit([[(device, host)]])
        with pytest.raises(StillCopying) as error:
            transfer.wait(0.01)
        assert error.value.transfer is transfer
        assert copier.statistics()["given_up_bytes"] == len(host)
        pointer = device.data_ptr()
        del device, transfer
        kept = error.value.transfer._keep
        assert kept[0][0][0].data_ptr() == pointer
        lanes.frozen = False
        error.value.transfer.wait(5.0)
        assert error.value.transfer._keep is None
        assert copier.statistics()["given_up_bytes"] == 0

    @pytest.mark.parametrize("way", [UP, DOWN])
    def test_a_submit_that_bounces_has_a_deadline(
        self, copier: DeviceCopier, lanes: SimulatedLanes, way: Direction
    ) -> None:
        array, device = random_bytes(6, 1 << 20), torch.from_numpy(random_bytes(7, 1 << 20))
        before = array.copy()
        pair = (device, array) if way is UP else (array, device)
        lanes.frozen = True
        with pytest.raises(StillCopying) as error:
            copier.submit([[pair]], timeout_s=0.01)
        assert not error.value.transfer.done()
        assert copier.statistics()["in_flight_bytes"] == 1 << 20
        assert np.array_equal(array, before)
        lanes.frozen = False
        error.value.transfer.wait(5.0)
        assert way is UP or np.array_equal(array, before)  # an abandoned transfer is not unpacked
        # Slots of the abandoned transfer serve the next, which has other memory.
        other = np.zeros(1 << 20, np.uint8)
        copier.submit([[(device, other) if way is UP else (other, device)]]).wait(5.0)
        assert np.array_equal(device.numpy(), other)
        assert way is UP or np.array_equal(array, before)

    def test_bytes_in_flight_are_bounded(
        self, lanes: SimulatedLanes, host: NDArray[np.uint8]
    ) -> None:
        device = on_device(len(host))
        copier = DeviceCopier("cpu", in_flight_bytes=3 << 18, lanes=lanes)
        lanes.frozen = True
        half = 1 << 19
        copier.submit([[(device[:half], host[:half])]])
        with pytest.raises(TransferTimeout, match="no room"):
            copier.submit([[(device[half:], host[half:])]], timeout_s=0.01)
        assert copier.statistics()["in_flight_bytes"] == half
        lanes.frozen = False
        copier.submit([[(device, host)]]).wait(5.0)  # larger than the bound: alone
        copier.close()

    def test_close_waits_and_then_refuses(
        self, copier: DeviceCopier, lanes: SimulatedLanes, host: NDArray[np.uint8]
    ) -> None:
        device = on_device(len(host))
        lanes.frozen = True
        copier.submit([[(device, host)]])
        with pytest.raises(StillCopying):
            copier.close(timeout_s=0.01)
        lanes.frozen = False
        copier.close()
        copier.close()
        assert np.array_equal(device.numpy(), host)
        with pytest.raises(RegionError, match="closed"):
            copier.submit([[(device, host)]])

    def test_a_copier_that_is_dropped_stays_until_its_copies_have_ended(
        self, host: NDArray[np.uint8]
    ) -> None:
        lanes = SimulatedLanes(lambda n: 0)
        lanes.frozen = True
        target = on_device(len(host))
        dropped = DeviceCopier("cpu", lanes=lanes, staging_bytes=4096)
        dropped.submit([[(target, host)]])
        del dropped
        gc.collect()

        def kept() -> list[DeviceCopier]:
            return [copier for copier in device_module._dropped if copier._lanes is lanes]

        with DeviceCopier("cpu") as other:
            other.submit([[(on_device(10), bytes(10))]]).wait(5.0)
            assert len(kept()) == 1, "its buffers may be somebody else's by now"
            lanes.frozen = False
            for _ in range(100):
                other.submit([[(on_device(10), bytes(10))]]).wait(5.0)
        assert kept() == []
        assert np.array_equal(target.numpy(), host)

    def test_a_device_that_refuses_keeps_what_it_had(
        self, copier: DeviceCopier, lanes: SimulatedLanes, host: NDArray[np.uint8]
    ) -> None:
        device = on_device(len(host))
        lanes.fault = CudaError("no")
        with pytest.raises(CudaError, match="no"):
            copier.submit([[(device, host)]])
        assert copier.statistics()["given_up_bytes"] in (0, len(host))
        copier.submit([[(device, host)]]).wait(5.0)
        assert np.array_equal(device.numpy(), host)
        lanes.step()
        assert copier.statistics()["in_flight_bytes"] == 0

    def test_a_device_that_fails_later_says_so(
        self, copier: DeviceCopier, host: NDArray[np.uint8], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        transfer = copier.submit([[(on_device(len(host)), host)]])

        def fail() -> bool:
            raise RuntimeError("an illegal memory access was encountered")

        monkeypatch.setattr(transfer.event, "query", fail)
        with pytest.raises(CudaError, match="illegal"):
            transfer.done()
        with pytest.raises(CudaError, match="illegal"):
            transfer.wait(1.0)
        assert copier.statistics()["in_flight_bytes"] == len(host)
        monkeypatch.undo()


class TestBadInput:
    def refused(self, *groups: Any, match: str) -> None:
        lanes = SimulatedLanes(lambda n: 0)
        copier = DeviceCopier("cpu", lanes=lanes)
        with pytest.raises(RangeError, match=match):
            copier.submit(list(groups))
        assert lanes.log == []
        assert copier.statistics() == {"in_flight_bytes": 0, "given_up_bytes": 0}

    def test_lengths_that_differ(self) -> None:
        self.refused([(on_device(5), np.zeros(6, np.uint8))], match="target of 5 bytes")

    @pytest.mark.parametrize(
        "ranges",
        [(0, 95, 6), (95, 0, 6), (-1, 0, 1), (0, 0, -1), (0, 0, 2**62)],
    )
    def test_ranges_outside(self, ranges: tuple[int, ...]) -> None:
        columns = [np.array([number]) for number in ranges]
        copies = Copies(on_device(100), np.zeros(100, np.uint8), *columns)
        self.refused([copies], match="not inside")

    def test_columns_that_do_not_match(self) -> None:
        two, one = np.zeros(2, np.int64), np.zeros(1, np.int64)
        self.refused(
            [Copies(on_device(9), np.zeros(9, np.uint8), two, one, one)], match="equally long"
        )
        self.refused(
            [Copies(on_device(9), np.zeros(9, np.uint8), one * 1.0, one, one)], match="whole"
        )

    def test_overlaps_also_between_groups(self) -> None:
        device, host = on_device(100), np.zeros(100, np.uint8)
        self.refused([(device[:60], host[:60])], [(device[59:], host[59:])], match="overlap")
        self.refused([(device[:60], device[40:])], match="overlap")

    def test_two_ways_at_once(self) -> None:
        device, host = on_device(100), np.zeros(100, np.uint8)
        self.refused([(device[:10], host[:10]), (host[20:], device[20:])], match="one way")

    def test_memory_that_has_no_byte_order(self) -> None:
        tensor = on_device(64).reshape(8, 8).T
        self.refused([(tensor, np.zeros(64, np.uint8))], match="contiguous")
        self.refused([(on_device(8), np.zeros(16, np.uint8)[::2])], match="contiguous")

    @pytest.mark.filterwarnings("ignore")  # torch's own: some of these are prototypes
    def test_tensors_whose_numbers_are_not_their_memory(self) -> None:
        host = np.zeros(64, np.uint8)
        for tensor in (
            torch._neg_view(torch.zeros(16)),
            torch.zeros(8, dtype=torch.complex64).conj(),
        ):
            self.refused([(tensor, host)], match="resolve")
            self.refused([(host, tensor)], match="resolve")
        for tensor in (torch.zeros(4, 4).to_sparse(), torch.zeros(4, 4).to_sparse_csr()):
            self.refused([(tensor, host)], match="without memory")
        self.refused([(on_device(64), np.ma.masked_array(host))], match="masked")

    def test_read_only_targets_but_not_sources(self) -> None:
        self.refused([(b"12345", on_device(5))], match="read-only")
        device = on_device(5)
        with DeviceCopier("cpu") as copier:
            copier.submit([[(device, b"12345")]])
        assert device.tolist() == list(b"12345")

    def test_sizes_and_devices(self) -> None:
        for options in ({"staging_bytes": 1}, {"staging_count": 0}, {"in_flight_bytes": 0}):
            with pytest.raises(RangeError):
                DeviceCopier("cpu", **options)
        for device in ("nonsense", "meta"):
            with pytest.raises(DeviceUnavailable):
                DeviceCopier(device)

    @pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
    def test_a_machine_without_gpu_says_so(self) -> None:
        with pytest.raises(DeviceUnavailable, match="no CUDA device"):
            DeviceCopier("cuda:0")


def test_threads_submit_at_the_same_time() -> None:
    """Small bound in flight, both directions, bouncing and pinned: every byte as it should be."""
    with DeviceCopier("cpu", staging_bytes=4096, in_flight_bytes=1 << 17) as copier:
        errors: list[BaseException] = []

        def work(seed: int) -> None:
            try:
                array = random_bytes(seed, 1 << 16)
                device, back = on_device(1 << 16), np.zeros(1 << 16, np.uint8)
                for _ in range(20):
                    copier.submit([[(device, array)]]).wait(5.0)
                    copier.submit([[(back, device)]]).wait(5.0)
                    assert np.array_equal(back, array)
                    array = np.roll(array, 1)
            except BaseException as error:  # noqa: BLE001 - shown below
                errors.append(error)

        threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not errors
        numbers = copier.statistics()
        assert numbers["to_device.bounced.bytes"] == 4 * 20 * (1 << 16)
        assert numbers["from_device.transfers"] == 80


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("pinned", [True, False])
@pytest.mark.parametrize("host_contiguous", [True, False])
@pytest.mark.parametrize("nbytes", [100, 4096, SMALL_BYTES, LARGE_BYTES])
def test_a_gpu_moves_what_it_should(nbytes: int, host_contiguous: bool, pinned: bool) -> None:
    count = max(2 * FEW_RANGES, min(1000, (16 << 20) // nbytes))
    rng = np.random.default_rng(nbytes)
    content = random_bytes(8, count * nbytes)
    array = torch.from_numpy(content).pin_memory() if pinned else torch.from_numpy(content)
    device = torch.zeros(2 * count * nbytes, dtype=torch.uint8, device="cuda:0")
    to = rng.permutation(2 * count)[:count] * nbytes
    come = np.arange(count) if host_contiguous else rng.permutation(count)
    lengths = np.full(count, nbytes)
    with DeviceCopier("cuda:0", staging_bytes=1 << 20) as copier:
        torch.cuda.current_stream().synchronize()  # the zeros
        copier.submit([[Copies(device, array, to, come * nbytes, lengths)]]).wait(10.0)
        there = device.cpu().numpy().reshape(-1, nbytes)
        assert np.array_equal(there[to // nbytes], content.reshape(-1, nbytes)[come])
        back = torch.zeros(len(content), dtype=torch.uint8, pin_memory=pinned)
        copier.submit([[Copies(back, device, come * nbytes, to, lengths)]]).wait(10.0)
        assert np.array_equal(back.numpy(), content)


def test_waiting_does_not_spin(monkeypatch: pytest.MonkeyPatch) -> None:
    """A wait of 50 ms queries its event some 60 times, not millions of times, even if a query takes
    no time at all."""
    clock = StoppedClock()
    monkeypatch.setattr("tiffin.messenger.gpu.copier.time", clock)
    monkeypatch.setattr("tiffin.messenger.gpu.pipeline.time", clock)
    lanes = SimulatedLanes(lambda n: 0)
    copier = DeviceCopier("cpu", lanes=lanes)
    lanes.frozen = True
    array = np.zeros(10, np.uint8)
    transfer = copier.submit([[(on_device(10), array)]])
    looks: list[float] = []
    assert transfer.event is not None
    query = transfer.event.query
    transfer.event.query = lambda: looks.append(clock.now) or query()  # type: ignore[method-assign]
    with pytest.raises(StillCopying):
        transfer.wait(0.05)
    assert 50 < len(looks) < 70
    lanes.frozen = False
    copier.close()
