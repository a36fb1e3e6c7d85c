"""Device memory that another process on the host can map: CUDA IPC, or shared memory on `cpu`.

On a GPU the memory comes from the driver (cuMemAlloc), not from torch's allocator. torch returns
parts of larger allocations, and an IPC handle always opens the whole allocation: an attached
process could access tensors that were never meant to be shared, and with `expandable_segments`
there is no handle at all. A separate allocation, of whole 2 MiB, begins at its handle, is freed by
`close`, and torch's allocator never reuses it. torch accesses it through
`__cuda_array_interface__`.

A descriptor is no access control: any process of the same user on the same host that has it can
open the memory, so send it only to a process that may access the memory. On `cpu` it is useless
without the file descriptor that is passed beside it (SCM_RIGHTS).
"""

from __future__ import annotations

import ctypes
import os
import secrets
import weakref
from contextlib import AbstractContextManager, suppress
from typing import TYPE_CHECKING, Any, Literal, Self

import msgspec

from ..errors import RangeError, RegionError
from ..shm.region import Region
from .cuda_driver import IPC_HANDLE_BYTES, DeviceUnavailable, Driver, load

if TYPE_CHECKING:
    from collections.abc import Sequence

# A descriptor is about 200 bytes; longer input is rejected before parsing.
DESCRIPTOR_BYTES_MAX = 1024
# The driver may place smaller allocations in a larger one, whose handle opens all of it; shared
# memory should be of whole 2 MiB (CUDA C++ Programming Guide, Interprocess Communication).
GRANULE_BYTES = 2 << 20
_VERSION = 1
_NBYTES_MAX = 1 << 48

# Identifies this process, also where two containers have the same process number.
_process = secrets.token_bytes(16)


def _renew() -> None:
    global _process
    _process = secrets.token_bytes(16)


os.register_at_fork(after_in_child=_renew)


class _Descriptor(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The message to the attaching process, as msgpack."""

    version: int
    kind: Literal["cpu", "cuda"]
    process: bytes
    nbytes: int
    offset: int  # of the region in the memory that the handle opens: 0, as each has its own
    uuid: bytes = b""  # of the GPU
    handle: bytes = b""  # CUipcMemHandle


class DeviceRegion:
    """`nbytes` of memory of one device, made with `create` or mapped with `attach`.

    The creator must outlive all attached processes: to free memory of a GPU while another process
    has it mapped is undefined behaviour there (NVIDIA's reference on cuMemFree), and no checksum
    helps against it. On `cpu` the memory exists as long as any process maps it.

    The owner defines the meaning of the bytes and which process may write them when, as with a
    `Region`. A GPU has no read-only mapping: an attached process could write.
    """

    def __init__(self, device: str, nbytes: int, owner: bool, backing: Region | _Mapping) -> None:
        """Private: use `create` or `attach`."""
        self.device = device
        self.nbytes = nbytes
        self.owner = owner
        self._backing: Region | _Mapping | None = backing
        self._tensor: Any = None

    @classmethod
    def create(cls, nbytes: int, device: str = "cuda:0") -> DeviceRegion:
        """Allocate memory; its content is undefined (zeros on `cpu`).

        Raises RangeError for a size below 1, DeviceMemoryError when the device has too little
        memory, RegionError when the system has, DeviceUnavailable without a driver or such a
        device.
        """
        if not 1 <= nbytes <= _NBYTES_MAX:
            raise RangeError(f"a region of {nbytes} bytes: it needs at least 1")
        kind, index = _parse(device)
        if kind == "cpu":
            return cls("cpu", nbytes, True, Region.create(nbytes, name="tiffin-device"))
        driver = load()
        _check_index(driver, index)
        with driver.on(index):
            address = driver.allocate(-(-nbytes // GRANULE_BYTES) * GRANULE_BYTES)
        return cls(f"cuda:{index}", nbytes, True, _Mapping(driver, index, address, imported=False))

    def descriptor(self) -> bytes:
        """The argument of `attach` in another process, besides `fds`. Raises RegionError when the
        region is closed or attached: only its creator can describe it."""
        backing = self._open()
        if not self.owner:
            raise RegionError("an attached region cannot be passed on; ask its creator")
        if isinstance(backing, Region):
            described = _Descriptor(_VERSION, "cpu", _process, self.nbytes, 0)
        else:
            with backing.driver.on(backing.index):
                handle = backing.driver.ipc_handle(backing.address)
            uuid = backing.driver.device_uuids()[backing.index]
            described = _Descriptor(_VERSION, "cuda", _process, self.nbytes, 0, uuid, handle)
        return msgspec.msgpack.encode(described)

    @property
    def fds(self) -> tuple[int, ...]:
        """File descriptors to pass beside `descriptor()`: one on `cpu`, none on a GPU."""
        backing = self._open()
        return (backing.fd,) if isinstance(backing, Region) else ()

    @classmethod
    def attach(
        cls,
        descriptor: bytes,
        *,
        fds: Sequence[int] = (),
        device: str | None = None,
        writable: bool = False,
    ) -> DeviceRegion:
        """Map a region that another process of this host created. Takes ownership of `fds`, also
        when it raises.

        `device` is the device that will use it: None is the creator's. Another GPU needs peer
        access to that one. `writable` has no effect on a GPU.

        Raises RegionError for an invalid descriptor, for this process's own region, for a wrong
        number of file descriptors, a device of the wrong kind or not visible to this process;
        CudaError when the driver refuses (the creator has ended, or is of another user).
        """
        with _Taken(fds) as taken:
            described = _decode(descriptor)
            if described.process == _process:
                raise RegionError("this process made the region: use it, do not attach to it")
            wanted = 1 if described.kind == "cpu" else 0
            if len(fds) != wanted:
                raise RegionError(f"{len(fds)} descriptors came beside the region, not {wanted}")
            if described.kind == "cuda":
                return cls._attach_cuda(described, device)
            if device is not None and _parse(device)[0] != "cpu":
                raise RegionError(f"the region is memory of the host and cannot be on {device}")
            region = Region.attach(taken.pop(), described.nbytes, writable=writable)
            return cls("cpu", described.nbytes, False, region)

    @classmethod
    def _attach_cuda(cls, described: _Descriptor, device: str | None) -> DeviceRegion:
        if device is not None and _parse(device)[0] != "cuda":
            raise RegionError(f"the region is memory of a GPU and cannot be on {device}")
        driver = load()
        uuids = driver.device_uuids()
        if described.uuid not in uuids:
            raise RegionError(
                f"the region is on GPU {described.uuid.hex()}, which this process does not see: "
                "look at CUDA_VISIBLE_DEVICES, or at the container's devices"
            )
        home = uuids.index(described.uuid)
        index = home if device is None else _parse(device)[1]
        _check_index(driver, index)
        if index != home and not driver.can_access_peer(index, home):
            raise RegionError(
                f"cuda:{index} has no peer access to cuda:{home}, where the region is"
            )
        with driver.on(index):
            base = driver.ipc_open(described.handle)
        mapping = _Mapping(driver, index, base, imported=True)
        return cls(f"cuda:{index}", described.nbytes, False, mapping)

    @property
    def tensor(self) -> Any:
        """All bytes, as a uint8 tensor [nbytes] on the device. Must not be used after `close()`.

        Raises RegionError when closed or when torch cannot use the memory on that device,
        DeviceUnavailable without torch.
        """
        backing = self._open()
        if self._tensor is None:
            torch = _torch()
            if isinstance(backing, Region):
                self._tensor = _host_tensor(torch, backing)
            else:
                self._tensor = _device_tensor(torch, backing, self.nbytes, self.device)
        return self._tensor

    def close(self) -> None:
        """Free or unmap the memory; call it when no copy uses the memory. Idempotent.

        If it is memory of a GPU, existing tensors are invalid afterwards.
        """
        backing, self._backing, self._tensor = self._backing, None, None
        if backing is not None:
            backing.close()

    def _open(self) -> Region | _Mapping:
        if self._backing is None:
            raise RegionError("the region is closed")
        return self._backing

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        state = "closed" if self._backing is None else "own" if self.owner else "attached"
        return f"<DeviceRegion {self.nbytes} bytes on {self.device}, {state}>"


class _Mapping:
    """Memory of a GPU at `address`, allocated by this process or opened by IPC (`imported`)."""

    def __init__(self, driver: Driver, index: int, address: int, *, imported: bool) -> None:
        self.driver = driver
        self.index = index
        self.address = address
        self._end = weakref.finalize(self, _end, driver, index, address, imported, os.getpid())
        self._end.atexit = False  # the memory is freed with the process; CUDA may be gone before

    def close(self) -> None:
        self._end()


def _end(driver: Driver, index: int, address: int, imported: bool, process: int) -> None:
    if os.getpid() != process:
        return  # a forked child has the object, but neither CUDA nor the memory
    with driver.on(index):
        if imported:
            driver.ipc_close(address)
        else:
            driver.free(address)


class _CudaBytes:
    """Memory of a GPU, in the protocol that torch accepts. Stream None: the caller orders its own
    streams."""

    def __init__(self, mapping: _Mapping, nbytes: int) -> None:
        self._mapping = mapping
        self.__cuda_array_interface__ = {
            "data": (mapping.address, False),
            "shape": (nbytes,),
            "typestr": "|u1",
            "version": 3,
            "stream": None,
        }


class _Taken(AbstractContextManager["_Taken"]):
    """Owns file descriptors, and closes those that were not popped when the block ends."""

    def __init__(self, fds: Sequence[int]) -> None:
        self._fds = list(fds)

    def pop(self) -> int:
        """Pass ownership of the next one to the caller."""
        return self._fds.pop(0)

    def __exit__(self, *_: object) -> None:
        for fd in self._fds:
            with suppress(OSError):  # EBADF: it never was a descriptor
                os.close(fd)


def _decode(descriptor: bytes) -> _Descriptor:
    if len(descriptor) > DESCRIPTOR_BYTES_MAX:
        raise RegionError(f"a descriptor of {len(descriptor)} bytes is none")
    try:
        described = msgspec.msgpack.decode(descriptor, type=_Descriptor)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        # ValueError: a field's name that is not UTF-8. RecursionError: deeply nested lists.
        raise RegionError(f"these bytes describe no region: {error}") from error
    if described.version != _VERSION:
        raise RegionError(f"a descriptor of version {described.version}, not {_VERSION}")
    handle_bytes = IPC_HANDLE_BYTES if described.kind == "cuda" else 0
    lengths = (len(described.handle), len(described.uuid), len(described.process))
    uuid_bytes = 16 if described.kind == "cuda" else 0
    if (
        not 1 <= described.nbytes <= _NBYTES_MAX
        or described.offset != 0
        or lengths != (handle_bytes, uuid_bytes, 16)
    ):
        raise RegionError("a descriptor whose fields do not fit each other")
    return described


def _parse(device: str) -> tuple[str, int]:
    """("cuda", 1) for "cuda:1"."""
    kind, _, index = device.partition(":")
    if kind not in ("cpu", "cuda") or not (index or "0").isdecimal():
        raise DeviceUnavailable(f"regions are of cuda or cpu, not of {device!r}")
    return kind, int(index or 0)


def _check_index(driver: Driver, index: int) -> None:
    count = len(driver.device_uuids())
    if index >= count:
        raise DeviceUnavailable(f"no cuda:{index}: this process sees {count} devices")


def _device_tensor(torch: Any, mapping: _Mapping, nbytes: int, device: str) -> Any:
    """A tensor over the mapping, from its address and length; it keeps the mapping alive."""
    tensor = torch.as_tensor(_CudaBytes(mapping, nbytes), device=device)
    if tensor.data_ptr() != mapping.address:
        # If the memory is on another device, torch makes a copy.
        raise RegionError(f"torch sees the memory on another device than {device}")
    return tensor


def _host_tensor(torch: Any, region: Region) -> Any:
    """A tensor over the region, also where it is mapped read-only: torch has no read-only tensors
    and would warn, and a write through this one is a fault in this process, not damage in the other
    process."""
    array = region.array
    alias: Any = (ctypes.c_uint8 * region.nbytes).from_address(array.ctypes.data)
    alias.keep = array
    return torch.frombuffer(alias, dtype=torch.uint8)


def _torch() -> Any:
    try:
        import torch
    except ImportError as error:
        raise DeviceUnavailable("a tensor needs torch: pip install 'tiffin[torch]'") from error
    return torch
