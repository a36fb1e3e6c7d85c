"""Pinned memory: what is recorded, which CUDA calls are made, and how their refusals are reported.

The argument lists of the driver are checked against a library of our own, of Python functions.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import pytest

from tiffin.messenger.errors import RangeError
from tiffin.messenger.gpu import cuda_driver, pinning
from tiffin.messenger.gpu.copy_buffers import _tensor_place
from tiffin.messenger.gpu.cuda_driver import CudaError, DeviceUnavailable, Driver
from tiffin.messenger.gpu.pinning import Pinned, PinningError, partly_registered, registration
from tiffin.messenger.shm.region import Region

if TYPE_CHECKING:
    from collections.abc import Iterator


def test_on_cpu_only_the_book_is_kept() -> None:
    with Region.create(10_000) as region:
        start = region.array.ctypes.data
        with Pinned(region.array, "cpu") as pinned:
            assert (pinned.address, pinned.nbytes, pinned.closed) == (start, 10_000, False)
            entry = registration(start + 5, 9_995, "cpu")
            assert entry is not None
            assert entry == (start, start + 10_000, True)
            assert registration(start + 5, 9_996, "cpu") is None
            assert registration(start - 1, 2, "cpu") is None
            assert registration(start, 1, "cuda") is None
        assert pinned.closed
        assert registration(start, 1, "cpu") is None
        pinned.close()


def test_two_that_touch_are_not_one() -> None:
    array = np.zeros(8192, np.uint8)
    start = array.ctypes.data
    with Pinned(array[:4096], "cpu"), Pinned(array[4096:], "cpu"):
        assert registration(start, 4096, "cpu") is not None
        assert registration(start + 4096, 4096, "cpu") is not None
        assert registration(start + 4000, 200, "cpu") is None


def test_what_is_registered_in_part() -> None:
    array = np.zeros(8192, np.uint8)
    start = array.ctypes.data
    with Pinned(array[1000:2000], "cpu"), Pinned(array[3000:4000], "cpu"):
        for begin, nbytes, partly in [
            (0, 1000, False), (0, 1001, True), (1999, 1, True), (1999, 10, True),
            (2000, 1000, False), (2000, 1001, True), (0, 8192, True), (4000, 4192, False),
        ]:  # fmt: skip
            assert partly_registered(start + begin, nbytes, "cpu") is partly, begin
        assert not partly_registered(start, 8192, "cuda")
    assert not partly_registered(start, 8192, "cpu")


@pytest.mark.parametrize(("nbytes", "pinned"), [(100, True), (101, False)])
def test_a_tensor_is_pinned_only_as_a_whole(
    monkeypatch: pytest.MonkeyPatch, nbytes: int, pinned: bool
) -> None:
    """torch asks CUDA about the first byte only, and would call the whole tensor pinned."""
    torch = pytest.importorskip("torch")
    array = np.arange(200, dtype=np.uint8)
    host, device = torch.from_numpy(array)[:nbytes], SimpleNamespace(type="cuda")
    monkeypatch.setattr(torch.Tensor, "is_pinned", lambda _tensor: True)
    monkeypatch.setattr(pinning, "load", FakeDriver)
    assert _tensor_place(host, device).pinned
    with Pinned(array[:100], "cuda:0"):
        assert _tensor_place(host, device).pinned is pinned


def test_a_fork_has_nothing_registered(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = FakeDriver()
    monkeypatch.setattr(pinning, "load", lambda: driver)
    book = pinning._Book()
    monkeypatch.setattr(pinning, "_book", book)
    array = np.zeros(100, np.uint8)
    pinned = Pinned(array)
    calls = len(driver.calls)
    monkeypatch.setattr(os, "getpid", lambda: -1)
    book.forget()  # as the child does first
    assert registration(array.ctypes.data, 100) is None
    pinned.close()
    assert pinned.closed
    assert len(driver.calls) == calls


@pytest.mark.parametrize("part", [(0, 8192), (0, 1), (8191, 8192), (4095, 4097), (10, 20)])
def test_nothing_is_pinned_twice(part: tuple[int, int]) -> None:
    array = np.zeros(8192, np.uint8)
    with Pinned(array[:4096], "cpu"), Pinned(array[4096:], "cpu"):
        with pytest.raises(PinningError, match="registered already"):
            Pinned(array[slice(*part)], "cpu")
        with Pinned(np.zeros(10, np.uint8), "cpu"):
            pass


def test_one_that_is_dropped_is_given_back() -> None:
    array = np.zeros(10, np.uint8)
    pinned = Pinned(array, "cpu")
    del pinned
    assert registration(array.ctypes.data, 1, "cpu") is None


def test_bad_input() -> None:
    with pytest.raises(RangeError):
        Pinned(np.zeros(0, np.uint8), "cpu")
    with pytest.raises(RangeError):
        Pinned(np.zeros(10, np.uint8)[::2], "cpu")
    for device in ("tpu", "cuda:x"):
        with pytest.raises(DeviceUnavailable):
            Pinned(np.zeros(10, np.uint8), device)


class FakeDriver:
    """The driver calls of pinning, recorded."""

    def __init__(self, refusal: int = 0, shift: int = 0) -> None:
        self.calls: list[tuple[object, ...]] = []
        self.refusal, self.shift = refusal, shift

    @contextlib.contextmanager
    def on(self, index: int) -> Iterator[None]:
        self.calls.append(("on", index))
        yield

    def register(self, address: int, nbytes: int, *, writable: bool) -> None:
        if self.refusal:
            raise CudaError("cuMemHostRegister failed", self.refusal)
        self.calls.append(("register" if writable else "register read-only", nbytes))

    def unregister(self, address: int) -> None:
        self.calls.append(("unregister",))

    def device_address(self, address: int) -> int:
        if self.shift < 0:
            raise CudaError("no", 1)
        return address + self.shift


@pytest.mark.parametrize(("shift", "kernels"), [(0, True), (4096, False), (-1, False)])
def test_cuda_is_asked_once_each_way(
    monkeypatch: pytest.MonkeyPatch, shift: int, kernels: bool
) -> None:
    driver = FakeDriver(shift=shift)
    monkeypatch.setattr(pinning, "load", lambda: driver)
    array = np.zeros(100, np.uint8)
    pinned = Pinned(array, "cuda:3")
    entry = registration(array.ctypes.data, 100)
    assert entry is not None
    assert entry.kernels is kernels
    with pytest.raises(PinningError, match="already"):
        Pinned(array, "cuda:3")
    pinned.close()
    pinned.close()
    once = [("on", 3), ("register", 100)]
    back = [("on", 3), ("unregister",)]
    assert driver.calls == once + once + back + back
    assert registration(array.ctypes.data, 100) is None


def test_what_is_mapped_read_only_is_registered_so(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = FakeDriver()
    monkeypatch.setattr(pinning, "load", lambda: driver)
    with (
        Region.create(8192) as owner,
        Region.attach(os.dup(owner.fd), 8192) as reader,
        Pinned(owner.array),
        Pinned(reader.array),
    ):
        pass
    asked = [call for call in driver.calls if "register" in str(call[0])]
    assert asked[:2] == [("register", 8192), ("register read-only", 8192)]


@pytest.mark.parametrize(
    ("code", "advice"), [(2, "ulimit -l"), (712, "already"), (801, "platform"), (1, "mapping")]
)
def test_a_refusal_says_what_to_do(monkeypatch: pytest.MonkeyPatch, code: int, advice: str) -> None:
    monkeypatch.setattr(pinning, "load", lambda: FakeDriver(code))
    array = np.zeros(100, np.uint8)
    with pytest.raises(PinningError, match=advice):
        Pinned(array)
    assert registration(array.ctypes.data, 100) is None


# --- the driver's calls, as C sees them -----------------------------------------------------------


class Library:
    """libcuda, in Python: functions by name, called through ctypes with the types that the binding
    declares. `lacks` are not found; `refuses` returns its code."""

    # Stays referenced, as a real library stays loaded: a call by address does not keep it alive.
    _loaded: ClassVar[list[Any]] = []

    def __init__(self, *lacks: str, refuses: dict[str, int] | None = None) -> None:
        self.lacks, self.refuses = lacks, refuses or {}
        self.seen: list[tuple[Any, ...]] = []
        self.asked: dict[str, int] = {}

    def find(self, name: str, version: int) -> int | None:
        self.asked[name] = version
        if name in self.lacks:
            return None
        types = cuda_driver._CALLS[name][1] if name in cuda_driver._CALLS else None
        function = ctypes.CFUNCTYPE(ctypes.c_int, *(types or cuda_driver._BATCH_CALL))(
            lambda *arguments: self.call(name, arguments)
        )
        self._loaded.append(function)
        return ctypes.cast(function, ctypes.c_void_p).value

    def call(self, name: str, arguments: tuple[Any, ...]) -> int:
        if name == "cuMemcpyBatchAsync":
            columns = [
                (ctypes.c_uint64 * arguments[3]).from_address(address)[:]
                for address in arguments[:3]
            ]
            attributes = arguments[4][0]
            flags = (attributes.src_access_order, attributes.flags)
            self.seen.append((name, columns, flags, arguments[5][0], arguments[6], arguments[8]))
            arguments[7][0] = 1
        elif name == "cuGetErrorName":
            arguments[1][0] = b"CUDA_ERROR_OF_OURS"
        elif name in ("cuMemAlloc", "cuMemHostGetDevicePointer", "cuIpcOpenMemHandle"):
            arguments[0][0] = 1 << 45
            self.seen.append((name, *arguments[1:]))
        elif name == "cuIpcGetMemHandle":
            ctypes.memset(arguments[0], 7, 64)
        elif name == "cuDeviceGetUuid":
            ctypes.memset(arguments[0], 65 + arguments[1], 16)
        elif name in ("cuDeviceGetCount", "cuDeviceCanAccessPeer"):
            arguments[0][0] = 2
        elif name == "cuDeviceGet":
            arguments[0][0] = arguments[1]
        else:
            self.seen.append((name, *arguments))
        return self.refuses.get(name, 0)


def columns_of(*columns: list[int]) -> list[np.ndarray[Any, np.dtype[np.int64]]]:
    return [np.array(column, np.int64) for column in columns]


def test_a_batch_is_one_call_with_the_arguments_of_cuda_12_8() -> None:
    library = Library()
    driver = Driver(library.find)
    driver.copy_batch(*columns_of([1 << 40, 2], [3, 4], [5, 6]), stream=77)
    assert library.seen[-1] == (
        "cuMemcpyBatchAsync", [[1 << 40, 2], [3, 4], [5, 6]], (1, 1), 0, 1, 77
    )  # fmt: skip
    assert library.asked["cuMemcpyBatchAsync"] == 12080
    assert ctypes.sizeof(cuda_driver._Attributes) == 24


def test_single_copies_are_one_call_each() -> None:
    library = Library()
    Driver(library.find).copy_each(*columns_of([1 << 63 - 1, 2], [3, 4], [5, 6]), stream=77)
    assert library.seen[-2:] == [
        ("cuMemcpyAsync", 1 << 62, 3, 5, 77), ("cuMemcpyAsync", 2, 4, 6, 77)
    ]  # fmt: skip


def test_memory_is_registered_for_all_devices_and_as_it_is_mapped() -> None:
    """CU_MEMHOSTREGISTER_PORTABLE, _DEVICEMAP and _READ_ONLY of cuda.h are 1, 2 and 8."""
    library = Library()
    driver = Driver(library.find)
    for writable in (True, False):
        driver.register(4096, 77, writable=writable)
    assert library.seen[-2:] == [
        ("cuMemHostRegister", 4096, 77, 3), ("cuMemHostRegister", 4096, 77, 11)
    ]  # fmt: skip


def test_handles_names_and_addresses() -> None:
    driver = Driver(Library().find)
    assert driver.ipc_handle(5) == b"\x07" * 64
    assert driver.device_uuids() == [b"A" * 16, b"B" * 16]
    assert driver.can_access_peer(1, 0)
    assert driver.allocate(10) == driver.device_address(3) == driver.ipc_open(b"h" * 64) == 1 << 45


def test_a_context_is_pushed_and_popped_also_after_an_error() -> None:
    library = Library()
    driver = Driver(library.find)
    with pytest.raises(ZeroDivisionError), driver.on(1):
        raise ZeroDivisionError
    names = [call[0] for call in library.seen]
    assert names == ["cuInit", "cuDevicePrimaryCtxRetain", "cuCtxPushCurrent", "cuCtxPopCurrent"]


def test_a_fork_is_told_that_it_has_no_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    library = Library()
    driver = Driver(library.find)
    library.seen.clear()
    monkeypatch.setattr(os, "getpid", lambda: -1)
    with pytest.raises(CudaError, match="fork"), driver.on(0):
        pytest.fail("nothing may be asked of the driver here")
    assert library.seen == []


def test_refusals_are_typed() -> None:
    driver = Driver(Library(refuses={"cuMemAlloc": 2, "cuMemcpyBatchAsync": 1}).find)
    with pytest.raises(cuda_driver.DeviceMemoryError, match="CUDA_ERROR_OF_OURS"):
        driver.allocate(10)
    with pytest.raises(CudaError, match=r"at entry 1.*CUDA_ERROR_OF_OURS \(1\)") as error:
        driver.copy_batch(*columns_of([1], [2], [3]), stream=1)
    assert error.value.code == 1


def test_an_older_driver_has_no_batches_and_one_too_old_is_refused() -> None:
    driver = Driver(Library("cuMemcpyBatchAsync").find)
    assert not driver.batches
    with pytest.raises(DeviceUnavailable, match=r"12\.8"):
        driver.copy_batch(*columns_of([1], [2], [3]), stream=1)
    with pytest.raises(DeviceUnavailable, match="cuMemAlloc"):
        Driver(Library("cuMemAlloc").find)
