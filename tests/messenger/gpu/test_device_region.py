"""Device memory that another process maps: on `cpu` with a real one, on a GPU against a double of
the driver, and with a real one where there is a GPU."""

from __future__ import annotations

import contextlib
import os
import random
import socket
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import pytest

from tiffin.messenger.errors import RangeError, RegionError
from tiffin.messenger.gpu import device_region
from tiffin.messenger.gpu.cuda_driver import DeviceMemoryError, DeviceUnavailable
from tiffin.messenger.gpu.device_region import DESCRIPTOR_BYTES_MAX, DeviceRegion

if TYPE_CHECKING:
    from collections.abc import Iterator

torch = pytest.importorskip("torch")
PEER = Path(__file__).parent / "regionpeer.py"
GPU = torch.cuda.is_available()


@pytest.fixture
def peer() -> Iterator[socket.socket]:
    """A connection to another process that attaches."""
    ours, theirs = socket.socketpair()
    command = [sys.executable, str(PEER), str(theirs.fileno())]
    process = subprocess.Popen(command, pass_fds=[theirs.fileno()])
    theirs.close()
    ours.settimeout(120.0)  # it imports torch first
    with ours:
        yield ours
    assert process.wait(timeout=120) == 0


def ask(peer: socket.socket, verb: bytes, region: DeviceRegion, fds: tuple[int, ...]) -> bytes:
    socket.send_fds(peer, [verb + b" " + region.descriptor()], fds)
    return peer.recv(4096)


@pytest.mark.slow
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda:0", marks=pytest.mark.skipif(
    not GPU, reason="needs a GPU"
))])  # fmt: skip
def test_another_process_reads_and_writes(peer: socket.socket, device: str) -> None:
    with DeviceRegion.create(5000, device) as region:
        region.tensor[:4] = torch.tensor([1, 2, 3, 4], dtype=torch.uint8)
        if device != "cpu":
            torch.cuda.current_stream().synchronize()
        assert ask(peer, b"read", region, region.fds) == bytes([1, 2, 3, 4]) + b"5000"
        if device == "cpu":
            assert ask(peer, b"write", region, region.fds) == b"written"
            assert bytes(region.tensor[:4].tolist()) == b"peer"


def test_another_process_is_told_what_is_wrong(peer: socket.socket) -> None:
    with DeviceRegion.create(5000, "cpu") as region, DeviceRegion.create(10, "cpu") as small:
        assert b"0 descriptors came" in ask(peer, b"read", region, ())
        assert b"2 descriptors came" in ask(peer, b"read", region, region.fds * 2)
        # The size that was announced is checked against the file.
        longer = msgspec.msgpack.decode(region.descriptor())
        longer["nbytes"] = 1 << 30
        socket.send_fds(peer, [b"read " + msgspec.msgpack.encode(longer)], small.fds)
        assert b"RegionError: the peer announced" in peer.recv(4096)


class TestAttaching:
    def refused(self, data: bytes, match: str, fds: tuple[int, ...] = ()) -> None:
        with pytest.raises(RegionError, match=match):
            DeviceRegion.attach(data, fds=fds)

    def test_ones_own_is_refused_and_its_descriptor_closed(self) -> None:
        with DeviceRegion.create(100, "cpu") as region:
            fd = os.dup(region.fds[0])
            self.refused(region.descriptor(), "this process made", (fd,))
            with pytest.raises(OSError, match="Bad file"):
                os.fstat(fd)

    @pytest.mark.parametrize(
        "data",
        [
            *(b"", b"\x00", b"\x80"),
            random.Random(1).randbytes(100),
            b"x" * (DESCRIPTOR_BYTES_MAX + 1),
        ],
    )
    def test_bytes_that_describe_nothing(self, data: bytes) -> None:
        self.refused(data, "describe|descriptor")

    @pytest.mark.parametrize(
        ("field", "value"),
        [
            ("version", 2), ("kind", "tpu"), ("nbytes", 0), ("nbytes", -1), ("nbytes", 1 << 60),
            ("offset", 4096), ("handle", b"x" * 64), ("uuid", b"x" * 16), ("process", b"short"),
            ("more", 1), ("nbytes", "12"),
        ],
    )  # fmt: skip
    def test_fields_that_do_not_fit(self, field: str, value: object) -> None:
        with DeviceRegion.create(100, "cpu") as region:
            fields = msgspec.msgpack.decode(region.descriptor())
        fields |= {"process": b"another process!", field: value}
        self.refused(msgspec.msgpack.encode(fields), "describe|version|fit")

    def test_damaged_bytes_describe_nothing(self) -> None:
        """Every byte of a descriptor changed in turn: it is refused, or describes some region."""
        with DeviceRegion.create(100, "cpu") as region:
            fields = msgspec.msgpack.decode(region.descriptor())
        data = msgspec.msgpack.encode(fields | {"process": b"another process!"})
        refused = 0
        for at in range(len(data)):
            for flipped in (0x01, 0x80, 0xFF):
                damaged = bytearray(data)
                damaged[at] ^= flipped
                try:
                    device_region._decode(bytes(damaged))
                except RegionError:
                    refused += 1
        assert refused > len(data)
        self.refused(b"\x81\xa1\xff\x01", "describe")  # a field's name that is no UTF-8
        self.refused(b"\x81\xa1x" + b"\x91" * 1000 + b"\x01", "describe")

    def test_memory_of_the_host_is_on_no_gpu(self) -> None:
        with DeviceRegion.create(100, "cpu") as region:
            data, fd = region.descriptor(), os.dup(region.fds[0])
        device_region._renew()  # as if another process had described it
        with pytest.raises(RegionError, match="memory of the host"):
            DeviceRegion.attach(data, fds=(fd,), device="cuda:0")

    def test_an_attached_region_is_not_passed_on(self) -> None:
        with DeviceRegion.create(100, "cpu") as region:
            fd = os.dup(region.fds[0])
            data = region.descriptor()
            device_region._renew()
            with DeviceRegion.attach(data, fds=(fd,)) as attached:
                region.tensor[7] = 9
                assert attached.tensor[7] == 9
                with pytest.raises(RegionError, match="creator"):
                    attached.descriptor()


def test_sizes_devices_and_closing() -> None:
    with pytest.raises(RangeError):
        DeviceRegion.create(0, "cpu")
    for device in ("tpu", "cuda:x"):
        with pytest.raises(DeviceUnavailable):
            DeviceRegion.create(1, device)
    region = DeviceRegion.create(10, "cpu")
    region.close()
    region.close()
    for use in (lambda: region.tensor, lambda: region.fds, region.descriptor):
        with pytest.raises(RegionError, match="closed"):
            use()
    assert "closed" in repr(region)


@pytest.mark.skipif(GPU, reason="there is a GPU")
def test_a_machine_without_gpu_says_so() -> None:
    with pytest.raises(DeviceUnavailable, match="no NVIDIA driver"):
        DeviceRegion.create(10, "cuda:0")


class FakeDriver:
    """The driver calls of regions, recorded in order. Two GPUs, of which 1 can reach 0."""

    def __init__(self) -> None:
        self.calls: list[tuple[object, ...]] = []
        self.current: int | None = None

    def device_uuids(self) -> list[bytes]:
        return [b"A" * 16, b"B" * 16]

    def can_access_peer(self, index: int, peer: int) -> bool:
        return (index, peer) == (1, 0)

    @contextlib.contextmanager
    def on(self, index: int) -> Iterator[None]:
        self.current = index
        yield
        self.current = None

    def note(self, *call: object) -> None:
        assert self.current is not None, f"{call} without a context"
        self.calls.append((*call, self.current))

    def allocate(self, nbytes: int) -> int:
        if nbytes > 1 << 40:
            raise DeviceMemoryError("out of memory", 2)
        self.note("allocate", nbytes)
        return 0x7000_0000

    def free(self, address: int) -> None:
        self.note("free", address)

    def ipc_handle(self, address: int) -> bytes:
        self.note("handle", address)
        return b"H" * 64

    def ipc_open(self, handle: bytes) -> int:
        self.note("open", handle[:1])
        return 0x9000_0000

    def ipc_close(self, address: int) -> None:
        self.note("close", address)


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> FakeDriver:
    fake = FakeDriver()
    monkeypatch.setattr(device_region, "load", lambda: fake)
    return fake


class TestCalls:
    """Which calls of the driver regions make, on which device."""

    def described(self, driver: FakeDriver, device: str) -> bytes:
        with DeviceRegion.create(64, device) as region:
            data = region.descriptor()
            assert region.fds == ()
        driver.calls.clear()
        device_region._renew()
        return data

    def test_of_the_creator(self, driver: FakeDriver) -> None:
        with DeviceRegion.create(64, "cuda:1") as region:
            region.descriptor()
        region.close()
        at = 0x7000_0000
        # Whole 2 MiB: the driver may put smaller allocations beside others, into one handle.
        assert driver.calls == [("allocate", 2 << 20, 1), ("handle", at, 1), ("free", at, 1)]
        assert region.nbytes == 64
        DeviceRegion.create((2 << 20) + 1, "cuda:1").close()
        assert driver.calls[3] == ("allocate", 4 << 20, 1)

    def test_of_who_attaches(self, driver: FakeDriver) -> None:
        data = self.described(driver, "cuda:0")
        with DeviceRegion.attach(data) as region:
            assert (region.device, region.nbytes, region.owner) == ("cuda:0", 64, False)
        assert driver.calls == [("open", b"H", 0), ("close", 0x9000_0000, 0)]

    def test_from_another_gpu(self, driver: FakeDriver) -> None:
        data = self.described(driver, "cuda:0")
        DeviceRegion.attach(data, device="cuda:1").close()
        assert driver.calls == [("open", b"H", 1), ("close", 0x9000_0000, 1)]
        data = self.described(driver, "cuda:1")
        with pytest.raises(RegionError, match="no peer access"):
            DeviceRegion.attach(data, device="cuda:0")
        with pytest.raises(RegionError, match="memory of a GPU"):
            DeviceRegion.attach(data, device="cpu")
        with pytest.raises(DeviceUnavailable, match="sees 2"):
            DeviceRegion.attach(data, device="cuda:2")
        assert driver.calls == []

    def test_of_a_gpu_that_is_not_seen(
        self, driver: FakeDriver, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        data = self.described(driver, "cuda:0")
        monkeypatch.setattr(driver, "device_uuids", lambda: [b"C" * 16])
        with pytest.raises(RegionError, match="CUDA_VISIBLE_DEVICES"):
            DeviceRegion.attach(data)

    def test_same_process_and_no_memory(self, driver: FakeDriver) -> None:
        with DeviceRegion.create(64, "cuda:0") as region, pytest.raises(RegionError, match="made"):
            DeviceRegion.attach(region.descriptor())
        with pytest.raises(DeviceMemoryError):
            DeviceRegion.create(1 << 41, "cuda:0")

    def test_a_region_that_is_dropped_is_freed(self, driver: FakeDriver) -> None:
        region = DeviceRegion.create(64, "cuda:0")
        del region
        assert driver.calls[-1] == ("free", 0x7000_0000, 0)

    def test_a_fork_frees_nothing_of_its_parent(
        self, driver: FakeDriver, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        region = DeviceRegion.create(64, "cuda:0")
        driver.calls.clear()
        monkeypatch.setattr(os, "getpid", lambda: -1)
        region.close()
        assert driver.calls == []

    def test_a_tensor_is_the_memory_and_no_copy_of_it(
        self, driver: FakeDriver, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        asked: list[tuple[object, object]] = []

        def as_tensor(memory: Any, device: str) -> Any:
            asked.append((memory.__cuda_array_interface__["data"], device))
            return torch.zeros(64, dtype=torch.uint8)  # somewhere else

        monkeypatch.setattr(torch, "as_tensor", as_tensor)
        with (
            DeviceRegion.create(64, "cuda:1") as region,
            pytest.raises(RegionError, match="another device than cuda:1"),
        ):
            _ = region.tensor
        assert asked == [((0x7000_0000, False), "cuda:1")]
