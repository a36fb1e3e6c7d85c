"""Bytes between a slab and a device: the bounce on device `cpu` against a real slab, and GPUDirect
Storage against a double of kvikio's file that reads and writes the slab by ordinary calls."""

from __future__ import annotations

import contextlib
import errno
import os
import sys
import threading
from types import ModuleType, SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tiffin.kvstore.errors import InvalidInput, TierUnavailable
from tiffin.kvstore.memory.arena import Extent
from tiffin.kvstore.tiers import gds as gds_module
from tiffin.kvstore.tiers.gds import DeviceSlab, _open_gds, _why_not
from tiffin.kvstore.tiers.nvme import NvmeTier
from tiffin.messenger.gpu.copier import CudaError, DeviceCopier, StillCopying

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from numpy.typing import NDArray

torch = pytest.importorskip("torch")

PIECE_BYTES = 8192
CAPACITY_BYTES = 1 << 20


@pytest.fixture(scope="module")
def tier(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NvmeTier]:
    with NvmeTier(tmp_path_factory.mktemp("slab"), CAPACITY_BYTES) as tier:
        yield tier


@pytest.fixture(scope="module")
def copier() -> Iterator[DeviceCopier]:
    with DeviceCopier("cpu") as copier:
        yield copier


@pytest.fixture(scope="module")
def slab(tier: NvmeTier, copier: DeviceCopier) -> Iterator[DeviceSlab]:
    with DeviceSlab(tier, copier, piece_bytes=PIECE_BYTES) as slab:
        yield slab


def content(nbytes: int, seed: int = 0) -> NDArray[np.uint8]:
    return np.random.default_rng(seed).integers(0, 256, nbytes, dtype=np.uint8)


def check_round_trip(slab: DeviceSlab, tier: NvmeTier, at: int, nbytes: int) -> None:
    """Write and read through the slab; each is also compared with the tier's own read and write."""
    extent = tier.reserve(at + nbytes + 1)
    try:
        tier.write(extent, 0, content(extent.length, 1))
        data = content(nbytes, 2)
        slab.write(extent, at, torch.from_numpy(data.copy()))
        whole = np.empty(extent.length, np.uint8)
        tier.read(extent, 0, whole)
        want = content(extent.length, 1)
        want[at : at + nbytes] = data
        assert np.array_equal(whole, want)
        got = torch.zeros(nbytes, dtype=torch.uint8)
        slab.read(extent, at, got)
        assert np.array_equal(got.numpy(), data)
    finally:
        tier.release(extent)


@given(st.integers(0, 3), st.integers(0, 5 * PIECE_BYTES + 100))
def test_bouncing(slab: DeviceSlab, tier: NvmeTier, page: int, nbytes: int) -> None:
    assert (slab.path, slab.reason) == ("bounce", "cpu is no GPU")
    check_round_trip(slab, tier, page * 4096, nbytes)


def test_tensors_of_other_types_are_bytes(slab: DeviceSlab, tier: NvmeTier) -> None:
    extent = tier.reserve(8192)
    slab.write(extent, 0, torch.arange(1000, dtype=torch.int32).reshape(10, 100))
    got = torch.zeros(1000, dtype=torch.int32)
    slab.read(extent, 0, got)
    assert got.tolist() == list(range(1000))
    tier.release(extent)


def test_the_disk_reads_on_while_a_piece_is_copied(tier: NvmeTier) -> None:
    """While piece i waits to be copied, the tier is already asked for piece i+1 (and not i+2)."""
    asked: list[int] = []
    seen_at_copy: list[set[int]] = []
    second = threading.Event()

    class Noted:
        """The tier; records its reads."""

        layout, capacity_bytes, path = tier.layout, tier.capacity_bytes, tier.path

        def read(self, extent: Extent, at: int, buffer: NDArray[np.uint8]) -> None:
            asked.append(at // PIECE_BYTES)
            if len(asked) > 1:
                second.set()
            tier.read(extent, at, buffer)

    class Slow(DeviceCopier):
        def submit(self, groups: Any, **options: Any) -> Any:
            assert second.wait(10.0)
            seen_at_copy.append(set(asked))
            return super().submit(groups, **options)

    extent = tier.reserve(4 * PIECE_BYTES)
    data = content(4 * PIECE_BYTES)
    tier.write(extent, 0, data)
    got = torch.zeros(4 * PIECE_BYTES, dtype=torch.uint8)
    with (
        Slow("cpu") as copier,
        DeviceSlab(
            Noted(),
            copier,
            piece_bytes=PIECE_BYTES,
            gds=False,  # type: ignore[arg-type]
        ) as slab,
    ):
        slab.read(extent, 0, got)
    assert np.array_equal(got.numpy(), data)
    assert seen_at_copy[0] == {0, 1}
    assert all(max(seen) <= i + 1 for i, seen in enumerate(seen_at_copy))
    tier.release(extent)


def test_several_threads(slab: DeviceSlab, tier: NvmeTier) -> None:
    extents = [tier.reserve(3 * PIECE_BYTES) for _ in range(4)]
    failures: list[BaseException] = []

    def work(i: int) -> None:
        try:
            for turn in range(5):
                data = content(3 * PIECE_BYTES, 10 * i + turn)
                got = torch.zeros(3 * PIECE_BYTES, dtype=torch.uint8)
                slab.write(extents[i], 0, torch.from_numpy(data))
                slab.read(extents[i], 0, got)
                assert np.array_equal(got.numpy(), data)
        except BaseException as error:  # noqa: BLE001 - shown below
            failures.append(error)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    for extent in extents:
        tier.release(extent)


@pytest.mark.parametrize(
    ("extent", "at", "nbytes"),
    [
        (Extent(0, 8192), 1, 10),
        (Extent(0, 8192), -4096, 10),
        (Extent(0, 8192), 4096, 4097),
        (Extent(100, 8192), 0, 10),
        (Extent(0, 8000), 0, 10),
        (Extent(-4096, 8192), 0, 10),
        (Extent(CAPACITY_BYTES, 4096), 0, 10),
    ],
)
def test_ranges_outside_are_refused(slab: DeviceSlab, extent: Extent, at: int, nbytes: int) -> None:
    tensor = torch.zeros(nbytes, dtype=torch.uint8)
    before = slab.statistics()
    for verb in (slab.read, slab.write):
        with pytest.raises(InvalidInput):
            verb(extent, at, tensor)
    assert slab.statistics() == before


def test_tensors_that_do_not_fit_are_refused(
    slab: DeviceSlab, tier: NvmeTier, copier: DeviceCopier
) -> None:
    flipped = torch._neg_view(torch.zeros(8))
    with pytest.raises(InvalidInput, match="resolve_neg"):
        slab.write(Extent(0, 4096), 0, flipped)
    for tensor in (torch.zeros(8, 8).T, torch.zeros(8, device="meta")):
        with pytest.raises(InvalidInput, match="contiguous"):
            slab.read(Extent(0, 4096), 0, tensor)
    with pytest.raises(InvalidInput, match="piece_bytes"):
        DeviceSlab(tier, copier, piece_bytes=5000)


class Unfinished:
    """An event that is not done."""

    def query(self) -> bool:
        return False


class TestFailures:
    def test_a_disk_that_refuses(self, tmp_path: Path, copier: DeviceCopier,
                                 monkeypatch: pytest.MonkeyPatch) -> None:  # fmt: skip
        with NvmeTier(tmp_path, CAPACITY_BYTES) as tier, DeviceSlab(
            tier, copier, piece_bytes=PIECE_BYTES
        ) as slab:  # fmt: skip
            tensor = torch.zeros(3 * PIECE_BYTES, dtype=torch.uint8)

            def refuse(*_: object) -> int:
                raise OSError(errno.EIO, "no")

            monkeypatch.setattr(os, "preadv", refuse)
            monkeypatch.setattr(os, "pwritev", refuse)
            for verb in (slab.read, slab.write):
                with pytest.raises(TierUnavailable, match="failed"):
                    verb(Extent(0, 3 * PIECE_BYTES), 0, tensor)
            assert not tier.healthy
            monkeypatch.undo()
            slab.write(Extent(0, 3 * PIECE_BYTES), 0, tensor)

    def test_a_device_that_fails(self, tier: NvmeTier) -> None:
        class Broken(DeviceCopier):
            def submit(self, groups: Any, **options: Any) -> Any:
                raise CudaError("no")

        tensor = torch.zeros(3 * PIECE_BYTES, dtype=torch.uint8)
        with Broken("cpu") as copier, DeviceSlab(tier, copier, piece_bytes=PIECE_BYTES) as slab:
            for verb in (slab.read, slab.write):
                with pytest.raises(TierUnavailable, match="copy on cpu failed"):
                    verb(Extent(0, 3 * PIECE_BYTES), 0, tensor)

    def test_a_device_that_hangs_keeps_the_buffers(self, tier: NvmeTier) -> None:
        state = SimpleNamespace(ended=False)

        class Hanging(DeviceCopier):
            def submit(self, groups: Any, **options: Any) -> Any:
                transfer = super().submit(groups, **options)
                transfer.done = lambda: state.ended
                raise StillCopying("hangs", transfer)

        tensor = torch.zeros(PIECE_BYTES, dtype=torch.uint8)
        with Hanging("cpu") as copier:
            slab = DeviceSlab(tier, copier, piece_bytes=PIECE_BYTES)
            with pytest.raises(TierUnavailable, match="does not answer"):
                slab.read(Extent(0, PIECE_BYTES), 0, tensor)
            for verb in (slab.read, slab.write):
                with pytest.raises(TierUnavailable, match="given up"):
                    verb(Extent(0, PIECE_BYTES), 0, tensor)
            with pytest.raises(TierUnavailable, match="given up"):
                slab.close()
            state.ended = True
            slab.close()

    def test_what_must_come_first_has_a_deadline(
        self, slab: DeviceSlab, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(gds_module, "_TIMEOUT_S", 0.01)
        tensor = torch.zeros(10, dtype=torch.uint8)
        with pytest.raises(TierUnavailable, match="come first"):
            slab.write(Extent(0, 4096), 0, tensor, after=Unfinished())

    def test_closed(self, tier: NvmeTier, copier: DeviceCopier) -> None:
        slab = DeviceSlab(tier, copier)
        slab.close()
        slab.close()
        with pytest.raises(TierUnavailable, match="closed"):
            slab.read(Extent(0, 4096), 0, torch.zeros(1, dtype=torch.uint8))


class FakeCuFile:
    """kvikio's file, for host tensors. `fails` replaces the result of the next calls."""

    def __init__(self, path: str, flags: str = "r+") -> None:
        assert flags == "r+"
        self.file = open(path, "r+b", buffering=0)  # noqa: SIM115 - closed by close()
        self.calls: list[tuple[str, int, int]] = []
        self.waited = 0
        self.fails: Exception | int | None = None
        self.fails_late = False  # in the future's result, not when the task is made

    def raw_read(self, buffer: Any, size: int, file_offset: int) -> int:
        self.calls.append(("raw_read", size, file_offset))
        return int(self.move(lambda: os.preadv(self.fd, [buffer.numpy()], file_offset)))

    def pread(self, buffer: Any, size: int, file_offset: int, task_size: int) -> Any:
        assert task_size == size
        self.calls.append(("pread", size, file_offset))
        return self.future(lambda: os.preadv(self.fd, [buffer.numpy()], file_offset))

    def pwrite(self, buffer: Any, size: int, file_offset: int, task_size: int) -> Any:
        assert task_size == size
        self.calls.append(("pwrite", size, file_offset))
        return self.future(lambda: os.pwrite(self.fd, buffer.numpy(), file_offset))

    @property
    def fd(self) -> int:
        return self.file.fileno()

    def move(self, move: Any) -> Any:
        if isinstance(self.fails, Exception):
            raise self.fails
        return move() if self.fails is None else self.fails

    def future(self, move: Any) -> Any:
        moved = None if self.fails_late else self.move(move)

        def get() -> Any:
            self.waited += 1
            return self.move(move) if moved is None else moved

        return SimpleNamespace(get=get)

    def close(self) -> None:
        self.file.close()


class TestGds:
    @pytest.fixture
    def file(self, tier: NvmeTier) -> Iterator[FakeCuFile]:
        file = FakeCuFile(str(tier.path))
        yield file
        file.close()

    @pytest.fixture
    def direct(
        self,
        tier: NvmeTier,
        copier: DeviceCopier,
        file: FakeCuFile,
        monkeypatch: pytest.MonkeyPatch,
    ) -> Iterator[DeviceSlab]:
        monkeypatch.setattr(gds_module, "_open_gds", lambda *_: (file, ""))
        with DeviceSlab(tier, copier, piece_bytes=PIECE_BYTES) as slab:
            yield slab

    def test_goes_past_the_buffers(
        self, direct: DeviceSlab, tier: NvmeTier, file: FakeCuFile
    ) -> None:
        assert direct.path == "gds"
        check_round_trip(direct, tier, 4096, 20_000)
        first = file.calls[0][2]
        assert first % 4096 == 0
        pieces = [
            (min(20_000, start + PIECE_BYTES) - start, first + start)
            for start in range(0, 20_000, PIECE_BYTES)
        ]
        assert file.calls == [(verb, *piece) for verb in ("pwrite", "pread") for piece in pieces]
        numbers = direct.statistics()
        assert numbers["gds.read.bytes"] == numbers["gds.write.bytes"] == 20_000
        assert "bounce.read.calls" not in numbers

    @pytest.mark.parametrize("failure", [OSError(5, "no"), RuntimeError("no"), 4096])
    def test_what_fails_bounces(
        self, direct: DeviceSlab, tier: NvmeTier, file: FakeCuFile, failure: Exception | int
    ) -> None:
        file.fails = failure
        check_round_trip(direct, tier, 0, 20_000)
        numbers = direct.statistics()
        assert numbers["gds.failures"] == 2
        assert numbers["bounce.read.bytes"] == numbers["bounce.write.bytes"] == 20_000

    def test_all_tasks_have_ended_when_one_fails(
        self, direct: DeviceSlab, tier: NvmeTier, file: FakeCuFile
    ) -> None:
        file.fails, file.fails_late = RuntimeError("an I/O error"), True
        check_round_trip(direct, tier, 0, 20_000)
        assert file.waited == len(file.calls) == 2 * -(-20_000 // PIECE_BYTES)

    def test_is_believed_only_after_a_right_read(self, tier: NvmeTier, file: FakeCuFile) -> None:
        device = torch.device("cpu")
        found: dict[str, bool] = {"is_gds_available": True}
        driver = SimpleNamespace(get=found.__getitem__)
        assert _why_not(file, driver, tier, device) == ""
        assert file.calls == [("raw_read", 4096, 0)]
        file.fails = 4096  # reports 4,096 bytes, and moves none
        assert "wrongly" in _why_not(file, driver, tier, device)
        file.fails = 0
        assert "wrongly" in _why_not(file, driver, tier, device)
        file.fails = RuntimeError("nvidia-fs is not loaded")
        assert "nvidia-fs" in _why_not(file, driver, tier, device)
        found["is_gds_available"] = False
        assert "compatibility" in _why_not(file, driver, tier, device)
        found.clear()
        assert "is_gds_available" in _why_not(file, driver, tier, device)

    def test_kvikio_is_asked_as_it_wants_to_be(
        self, tier: NvmeTier, file: FakeCuFile, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The names of kvikio 25.04 (python/kvikio/kvikio: defaults.py, cufile_driver.py)."""
        modes: list[str] = []

        @contextlib.contextmanager
        def changed(name: str, value: str) -> Iterator[None]:
            modes.append(f"{name}={value}")
            yield
            modes.append("as before")

        def opened(path: str, flags: str) -> FakeCuFile:
            modes.append("opened")
            assert (path, flags) == (str(tier.path), "r+")
            return file

        kvikio, defaults, driver = (
            ModuleType(f"kvikio{name}") for name in ("", ".defaults", ".cufile_driver")
        )
        vars(defaults)["set"] = changed
        vars(driver)["get"] = {"is_gds_available": True}.__getitem__
        vars(kvikio).update(
            CuFile=opened, CompatMode=SimpleNamespace(OFF="off"), defaults=defaults,
            cufile_driver=driver,
        )  # fmt: skip
        for module in (kvikio, defaults, driver):
            monkeypatch.setitem(sys.modules, module.__name__, module)
        monkeypatch.setattr(gds_module, "_why_not", lambda *_: "")
        if tier.statistics().direct_io:
            assert _open_gds(tier, SimpleNamespace(type="cuda")) == (file, "")
            assert modes == ["compat_mode=off", "opened", "as before"]

    def test_without_kvikio_the_reason_is_said(
        self, tier: NvmeTier, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setitem(sys.modules, "kvikio", None)
        gpu = SimpleNamespace(type="cuda")
        if tier.statistics().direct_io:
            assert "kvikio cannot be imported" in _open_gds(tier, gpu)[1]
        assert _open_gds(tier, torch.device("cpu")) == (None, "cpu is no GPU")
