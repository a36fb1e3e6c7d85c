"""Bindings of the calls of NVIDIA's driver that torch does not offer: raw copies, batches of
copies, device memory outside torch's allocator, and IPC handles.

The driver (libcuda.so.1) rather than the runtime: `cuGetProcAddress` returns a function by name
*and* version, so that `cuMemcpyBatchAsync` has the arguments of CUDA 12.8 on every later driver.
In the runtime library they changed from 12 to 13, and torch decides which of the two is loaded.
ctypes rather than cuda-python: a batch is three NumPy arrays whose addresses are passed, where
those bindings take lists and build an object for each entry.

Importing this needs no GPU. `load()` raises DeviceUnavailable where there is no driver. Written
from NVIDIA's reference (cuda.h of 12.8); on a machine without a GPU tests can check only the
argument lists, and they do.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
from ctypes import POINTER, c_char, c_char_p, c_int, c_size_t, c_uint, c_uint64, c_void_p
from typing import TYPE_CHECKING, Any

import numpy as np

from ..errors import MessengerError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from numpy.typing import NDArray

IPC_HANDLE_BYTES = 64

# From cuda.h.
_SUCCESS = 0
_OUT_OF_MEMORY = 2
_SRC_ACCESS_ORDER_STREAM = 1
_FLAG_PREFER_OVERLAP_WITH_COMPUTE = 1
_IPC_LAZY_ENABLE_PEER_ACCESS = 1
_REGISTER_PORTABLE, _REGISTER_DEVICEMAP, _REGISTER_READ_ONLY = 1, 2, 8
# The version of an interface, in the format of cuGetProcAddress: major × 1000 + minor × 10.
_BASE_VERSION, _BATCH_VERSION = 12000, 12080


class DeviceUnavailable(MessengerError):
    """No such device, or no driver, torch or Triton for it. The message names what is missing."""


class CudaError(MessengerError):
    """The device refused or failed a call. After an asynchronous fault (an illegal address, ECC)
    this process's CUDA context is unusable: end the process. `code` is a CUresult."""

    def __init__(self, message: str, code: int = 0) -> None:
        super().__init__(message)
        self.code = code


class DeviceMemoryError(CudaError):
    """The device has too little free memory."""


class _Location(ctypes.Structure):
    _fields_ = (("type", c_int), ("id", c_int))


class _Attributes(ctypes.Structure):
    """CUmemcpyAttributes: how the copies of a batch may be done."""

    _fields_ = (
        ("src_access_order", c_int),
        ("src_hint", _Location),
        ("dst_hint", _Location),
        ("flags", c_uint),
    )


class _IpcHandle(ctypes.Structure):
    _fields_ = (("reserved", c_char * IPC_HANDLE_BYTES),)


class _Uuid(ctypes.Structure):
    _fields_ = (("bytes", c_char * 16),)


# name: (version of the interface, argument types). All return a CUresult.
_CALLS: dict[str, tuple[int, tuple[Any, ...]]] = {
    "cuInit": (_BASE_VERSION, (c_uint,)),
    "cuGetErrorName": (_BASE_VERSION, (c_int, POINTER(c_char_p))),
    "cuGetErrorString": (_BASE_VERSION, (c_int, POINTER(c_char_p))),
    "cuDeviceGetCount": (_BASE_VERSION, (POINTER(c_int),)),
    "cuDeviceGet": (_BASE_VERSION, (POINTER(c_int), c_int)),
    "cuDeviceGetUuid": (_BASE_VERSION, (POINTER(_Uuid), c_int)),
    "cuDeviceCanAccessPeer": (_BASE_VERSION, (POINTER(c_int), c_int, c_int)),
    "cuDevicePrimaryCtxRetain": (_BASE_VERSION, (POINTER(c_void_p), c_int)),
    "cuCtxPushCurrent": (_BASE_VERSION, (c_void_p,)),
    "cuCtxPopCurrent": (_BASE_VERSION, (POINTER(c_void_p),)),
    "cuMemAlloc": (_BASE_VERSION, (POINTER(c_uint64), c_size_t)),
    "cuMemFree": (_BASE_VERSION, (c_uint64,)),
    "cuMemHostRegister": (_BASE_VERSION, (c_void_p, c_size_t, c_uint)),
    "cuMemHostUnregister": (_BASE_VERSION, (c_void_p,)),
    "cuMemHostGetDevicePointer": (_BASE_VERSION, (POINTER(c_uint64), c_void_p, c_uint)),
    "cuMemcpyAsync": (_BASE_VERSION, (c_uint64, c_uint64, c_size_t, c_void_p)),
    "cuIpcGetMemHandle": (_BASE_VERSION, (POINTER(_IpcHandle), c_uint64)),
    "cuIpcOpenMemHandle": (_BASE_VERSION, (POINTER(c_uint64), _IpcHandle, c_uint)),
    "cuIpcCloseMemHandle": (_BASE_VERSION, (c_uint64,)),
}
_BATCH_CALL = (
    c_void_p,  # targets: uint64 [count]
    c_void_p,  # sources
    c_void_p,  # sizes
    c_size_t,  # count
    POINTER(_Attributes),
    POINTER(c_size_t),  # where in the batch each attribute begins to apply
    c_size_t,  # how many attributes
    POINTER(c_size_t),  # out: the entry that was refused
    c_void_p,  # stream
)


class Driver:
    """NVIDIA's driver. Thread-safe, as the driver is. Private: use `load`.

    `find(name, version)` returns a function's address or None. Every call but those about devices
    must be inside `on(index)`, which sets the thread's CUDA context.
    """

    def __init__(self, find: Callable[[str, int], int | None]) -> None:
        self._functions: dict[str, Any] = {}
        for name, (version, arguments) in _CALLS.items():
            address = find(name, version)
            if not address:
                raise DeviceUnavailable(f"this driver has no {name}; CUDA 12 or later is needed")
            self._functions[name] = ctypes.CFUNCTYPE(c_int, *arguments)(address)
        batch = find("cuMemcpyBatchAsync", _BATCH_VERSION)
        self._batch = ctypes.CFUNCTYPE(c_int, *_BATCH_CALL)(batch) if batch else None
        self._contexts: dict[int, Any] = {}
        self._process = os.getpid()
        self._call("cuInit", 0)

    @property
    def batches(self) -> bool:
        """Whether `copy_batch` works: drivers of CUDA 12.8 (570) and later."""
        return self._batch is not None

    @contextlib.contextmanager
    def on(self, index: int) -> Iterator[None]:
        """Make the primary context of a device, which torch uses too, current in this thread during
        the block. Raises CudaError, also in a forked child: CUDA does not survive a fork."""
        if os.getpid() != self._process:
            raise CudaError("a fork cannot use its parent's CUDA: start processes by spawn")
        context = self._contexts.get(index)
        if context is None:
            device, context = self._device(index), c_void_p()
            # Never released: it ends with the process anyway, and torch retains it as well.
            self._call("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
            self._contexts[index] = context
        self._call("cuCtxPushCurrent", context)
        try:
            yield
        finally:
            self._call("cuCtxPopCurrent", ctypes.byref(c_void_p()))

    def device_uuids(self) -> list[bytes]:
        """The 16-byte UUID of each device visible to this process, in its own order."""
        count = c_int()
        self._call("cuDeviceGetCount", ctypes.byref(count))
        return [self._uuid(index) for index in range(count.value)]

    def can_access_peer(self, index: int, peer: int) -> bool:
        """Whether device `index` can read and write the memory of device `peer` directly."""
        able = c_int()
        devices = self._device(index), self._device(peer)
        self._call("cuDeviceCanAccessPeer", ctypes.byref(able), *devices)
        return bool(able.value)

    def allocate(self, nbytes: int) -> int:
        """Allocate `nbytes` of device memory outside torch's allocator; returns its address."""
        address = c_uint64()
        self._call("cuMemAlloc", ctypes.byref(address), nbytes)
        return address.value

    def free(self, address: int) -> None:
        """Free memory of `allocate`; waits for the device."""
        self._call("cuMemFree", address)

    def register(self, address: int, nbytes: int, *, writable: bool) -> None:
        """Lock pages of host memory, for copies from and to every device of this process; memory
        that is mapped read-only (not `writable`) devices can only read. Not every platform supports
        that.

        (The runtime's cudaHostRegister would do the same, but leaves a refusal behind as the last
        error of the thread, and torch raises that out of the next kernel that it launches.)
        """
        flags = _REGISTER_PORTABLE | _REGISTER_DEVICEMAP
        if not writable:
            flags |= _REGISTER_READ_ONLY
        self._call("cuMemHostRegister", address, nbytes, flags)

    def unregister(self, address: int) -> None:
        """Undo `register`."""
        self._call("cuMemHostUnregister", address)

    def device_address(self, host_address: int) -> int:
        """The device's address of registered host memory; nearly always the host's address."""
        address = c_uint64()
        self._call("cuMemHostGetDevicePointer", ctypes.byref(address), host_address, 0)
        return address.value

    def copy_each(
        self,
        targets: NDArray[np.int64],
        sources: NDArray[np.int64],
        lengths: NDArray[np.int64],
        stream: int,
    ) -> None:
        """Queue one copy per range. For few ranges, as each costs a call."""
        copy = self._functions["cuMemcpyAsync"]
        columns = (targets.tolist(), sources.tolist(), lengths.tolist())
        for target, source, length in zip(*columns, strict=True):
            self._check("cuMemcpyAsync", copy(target, source, length, stream))

    def copy_batch(
        self,
        targets: NDArray[np.int64],
        sources: NDArray[np.int64],
        lengths: NDArray[np.int64],
        stream: int,
    ) -> None:
        """Queue all ranges with one call. The copy engines move them in any order."""
        if self._batch is None:
            raise DeviceUnavailable("this driver has no cuMemcpyBatchAsync; CUDA 12.8 brings it")
        columns = [np.ascontiguousarray(c, np.uint64) for c in (targets, sources, lengths)]
        attributes = _Attributes(
            src_access_order=_SRC_ACCESS_ORDER_STREAM, flags=_FLAG_PREFER_OVERLAP_WITH_COMPUTE
        )
        first, refused = c_size_t(0), c_size_t(0)
        code = self._batch(
            *(column.ctypes.data for column in columns), len(targets),
            ctypes.byref(attributes), ctypes.byref(first), 1, ctypes.byref(refused), stream,
        )  # fmt: skip
        self._check(f"cuMemcpyBatchAsync (at entry {refused.value})", code)

    def ipc_handle(self, address: int) -> bytes:
        """The IPC handle with which another process can open memory of `allocate`."""
        handle = _IpcHandle()
        self._call("cuIpcGetMemHandle", ctypes.byref(handle), address)
        return bytes(handle)

    def ipc_open(self, handle: bytes) -> int:
        """Map memory of another process; the driver refuses memory of this one."""
        address = c_uint64()
        named = _IpcHandle.from_buffer_copy(handle)
        self._call("cuIpcOpenMemHandle", ctypes.byref(address), named, _IPC_LAZY_ENABLE_PEER_ACCESS)
        return address.value

    def ipc_close(self, address: int) -> None:
        """Unmap memory of `ipc_open`."""
        self._call("cuIpcCloseMemHandle", address)

    def _device(self, index: int) -> int:
        device = c_int()
        self._call("cuDeviceGet", ctypes.byref(device), index)
        return device.value

    def _uuid(self, index: int) -> bytes:
        uuid = _Uuid()
        self._call("cuDeviceGetUuid", ctypes.byref(uuid), self._device(index))
        return bytes(uuid)

    def _call(self, name: str, *arguments: Any) -> None:
        self._check(name, self._functions[name](*arguments))

    def _check(self, what: str, code: int) -> None:
        if code == _SUCCESS:
            return
        kind = DeviceMemoryError if code == _OUT_OF_MEMORY else CudaError
        name, text = self._text("cuGetErrorName", code), self._text("cuGetErrorString", code)
        raise kind(f"{what} failed: {name} ({code}), {text}", code)

    def _text(self, name: str, code: int) -> str:
        text = c_char_p()
        self._functions[name](code, ctypes.byref(text))
        return (text.value or b"unknown").decode("ascii", "replace")


@functools.cache
def load() -> Driver:
    """The driver of this machine. Raises DeviceUnavailable."""
    try:
        library = ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise DeviceUnavailable(f"no NVIDIA driver: {error}") from error
    try:
        get = library.cuGetProcAddress_v2
    except AttributeError as error:
        raise DeviceUnavailable("this NVIDIA driver is older than CUDA 12.0") from error
    get.argtypes = (c_char_p, POINTER(c_void_p), c_int, c_uint64, POINTER(c_int))
    get.restype = c_int

    def find(name: str, version: int) -> int | None:
        address, status = c_void_p(), c_int()
        code = get(name.encode(), ctypes.byref(address), version, 0, ctypes.byref(status))
        return address.value if code == _SUCCESS else None

    return Driver(find)
