"""Regions: sharing, sealing, and what remains after a fork and a close."""

from __future__ import annotations

import contextlib
import errno
import gc
import logging
import mmap
import os
import signal
import tempfile
from pathlib import Path

import numpy as np
import pytest

from tiffin.messenger.errors import RangeError, RegionError
from tiffin.messenger.shm import region as region_module
from tiffin.messenger.shm.region import Region

NBYTES = (1 << 20) + 123


def test_a_peer_sees_the_same_bytes() -> None:
    with (
        Region.create(NBYTES) as owner,
        Region.attach(os.dup(owner.fd), NBYTES, writable=True) as peer,
    ):
        owner.view(5, 3)[:] = 7, 8, 9
        assert peer.view(5, 3).tolist() == [7, 8, 9]
        peer.array[-1] = 4
        assert owner.array[NBYTES - 1] == 4
        assert owner.nbytes == peer.nbytes == len(peer.array) == NBYTES


def test_a_peer_may_map_less() -> None:
    with Region.create(NBYTES) as owner, Region.attach(os.dup(owner.fd), 4096) as peer:
        assert len(peer.array) == 4096
        peer.populate()


def test_who_does_not_ask_to_write_can_not() -> None:
    """Neither the mapping, with any flags of NumPy, nor the passed descriptor can be written."""
    with Region.create(NBYTES) as owner, Region.attach(os.dup(owner.fd), NBYTES) as peer:
        assert (owner.writable, peer.writable) == (True, False)
        assert not peer.array.flags.writeable
        with pytest.raises(ValueError, match="WRITEABLE"):
            peer.array.setflags(write=True)
        for region in (owner, peer):
            with pytest.raises(OSError, match="Bad file descriptor"):
                os.pwrite(region.fd, b"x", 0)
            with pytest.raises(PermissionError):
                mmap.mmap(region.fd, 4096, flags=mmap.MAP_SHARED)


def test_prefault_allocates_and_keeps_content() -> None:
    nbytes = 40 << 20
    with Region.create(nbytes) as region:
        region.array[12345] = 6
        region.prefault()
        assert os.fstat(region.fd).st_blocks * 512 == nbytes
        assert region.array[12345] == 6
        with Region.attach(os.dup(region.fd), nbytes) as peer:
            peer.populate()
            assert peer.array[12345] == 6


def test_kernels_without_populate_touch_instead(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(region_module, "_MADV_POPULATE_WRITE", 9999)
    monkeypatch.setattr(region_module, "_MADV_POPULATE_READ", 9998)
    with Region.create(NBYTES) as region:
        region.array[4096] = 3
        region.populate()
        region.prefault()
        assert os.fstat(region.fd).st_blocks * 512 >= NBYTES
        assert region.array[4096] == 3
        with Region.attach(os.dup(region.fd), NBYTES) as peer:
            peer.populate()


def test_more_than_the_machine_has_is_refused_before_touching() -> None:
    with (
        Region.create(1 << 45) as region,
        pytest.raises(RegionError, match="too little available memory"),
    ):
        region.prefault()


def test_its_size_cannot_change() -> None:
    with Region.create(NBYTES) as region:
        for size in (0, NBYTES - 4096, 1 << 30):
            for mode, refusal in ((os.O_RDONLY, OSError), (os.O_RDWR, PermissionError)):
                fd = os.open(f"/proc/self/fd/{region.fd}", mode)
                with pytest.raises(refusal):
                    os.ftruncate(fd, size)
                os.close(fd)


def test_attach_refuses_what_could_shrink_or_is_too_small() -> None:
    with tempfile.TemporaryFile() as file:
        file.truncate(NBYTES)
        with pytest.raises(RegionError, match="not sealed"):
            Region.attach(os.dup(file.fileno()), NBYTES)
    unsealed = os.memfd_create("unsealed", os.MFD_ALLOW_SEALING)
    os.ftruncate(unsealed, NBYTES)
    with pytest.raises(RegionError, match="not sealed"):
        Region.attach(unsealed, NBYTES)
    with Region.create(4096) as region:
        for nbytes in (4097, 0, -1):
            with pytest.raises(RegionError, match="descriptor of 4096"):
                Region.attach(os.dup(region.fd), nbytes)


def test_attach_owns_the_descriptor_also_when_it_fails() -> None:
    reader, writer = os.pipe()
    os.close(writer)
    with pytest.raises(RegionError):
        Region.attach(reader, 1)
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(reader)


@pytest.mark.parametrize(
    ("offset", "length"), [(-1, 1), (0, -1), (NBYTES, 1), (0, NBYTES + 1), (NBYTES + 1, 0)]
)
def test_views_outside_are_refused(offset: int, length: int) -> None:
    with Region.create(NBYTES) as region, pytest.raises(RangeError):
        region.view(offset, length)


def test_sizes_that_cannot_be() -> None:
    with pytest.raises(RangeError):
        Region.create(0)
    with pytest.raises(RegionError):
        Region.create(1 << 62)


def test_views_outlive_close() -> None:
    region = Region.create(NBYTES)
    view = region.view(0, 10)
    view[:] = 5
    region.close()
    region.close()
    assert view.tolist() == [5] * 10
    assert "closed" in repr(region)
    for use in (lambda: region.array, lambda: region.fd, lambda: region.view(0, 1)):
        with pytest.raises(RegionError, match="closed"):
            use()


def test_close_gives_everything_back() -> None:
    region = Region.create(NBYTES, name="tiffin-leak-test")
    assert _is_mapped("tiffin-leak-test")
    assert _descriptors_of("tiffin-leak-test")
    view = region.array[:1]
    region.close()
    assert _is_mapped("tiffin-leak-test")
    del view
    assert not _is_mapped("tiffin-leak-test")
    assert not _descriptors_of("tiffin-leak-test")


def _is_mapped(name: str) -> bool:
    with open("/proc/self/maps") as maps:
        return any(name in line for line in maps)


def _descriptors_of(name: str) -> int:
    """How many descriptors this process has of regions of this name; its other threads may open
    and close descriptors meanwhile."""
    found = 0
    for one in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # of this loop itself, or of another thread
            found += name in os.readlink(one)
    return found


@pytest.mark.parametrize("what", ["reads", "lets go"])
def test_nothing_of_a_forked_child_lies_where_the_region_was(what: str) -> None:
    """Memory that a child maps later, such as thread stacks, is neither visible through its copies
    of views nor unmapped with its copy of the region."""
    region = Region.create(NBYTES)
    view = region.view(0, 8)
    child = os.fork()
    if not child:
        status = 1
        try:
            signal.signal(signal.SIGSEGV, signal.SIG_DFL)
            mapped = [mmap.mmap(-1, NBYTES) for _ in range(64)]
            if what == "reads":
                bytes(view)
            region.close()
            del region, view
            gc.collect()
            for one in mapped:
                one[:] = bytes(NBYTES)
            status = 0
        finally:
            os._exit(status)
    _, status = os.waitpid(child, 0)
    region.close()
    assert status == (signal.SIGSEGV if what == "reads" else 0)


def test_a_forked_child_has_no_view() -> None:
    """Writers are fenced by the death of their process, so no child may keep their mapping."""
    with Region.create(NBYTES) as region:
        view = region.array
        child = os.fork()
        if child == 0:
            signal.signal(signal.SIGSEGV, signal.SIG_DFL)
            view[0] = 1  # ends the child
            os._exit(0)
        _, status = os.waitpid(child, 0)
        assert os.WIFSIGNALED(status)
        assert os.WTERMSIG(status) == signal.SIGSEGV
        assert view[0] == 0


def test_without_huge_pages_it_warns_and_works(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    real = mmap.mmap

    def refuse(fd: int, length: int, **kwargs: int) -> mmap.mmap:
        if os.fstat(fd).st_blksize > mmap.PAGESIZE:
            raise OSError(errno.ENOMEM, "Cannot allocate memory")
        return real(fd, length, **kwargs)

    monkeypatch.setattr(mmap, "mmap", refuse)
    with (
        caplog.at_level(logging.WARNING),
        Region.create(NBYTES, hugepages=True) as region,
    ):
        region.array[:] = np.uint8(3)
        assert not region.hugepages
    assert "no huge pages" in caplog.text


def test_a_region_that_is_dropped_gives_its_descriptor_back() -> None:
    owner = Region.create(4096, name="tiffin-drop-test")
    before = _descriptors_of("tiffin-drop-test")
    for _ in range(20):
        Region.attach(os.dup(owner.fd), 4096)
    gc.collect()
    assert _descriptors_of("tiffin-drop-test") == before
    owner.close()
