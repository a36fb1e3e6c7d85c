"""A process that has no file descriptors left: opening a client says so, whatever it needed one for
first, and works again when there are some."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import gc
import os
import resource
import socket
import sys
from typing import TYPE_CHECKING, Any

import pytest
from kvsupport import PoolOptions

from tiffin.kvstore import AsyncClient, Client
from tiffin.kvstore.client.connection import connection
from tiffin.kvstore.errors import InvalidInput, NodeUnavailable
from tiffin.messenger.errors import RegionError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from kvsupport import Daemon

EMBEDDED = "embedded:?dram=1MiB"


@contextlib.contextmanager
def descriptors_left(count: int) -> Iterator[None]:
    """This process can open `count` more descriptors."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    taken = [os.open("/dev/null", os.O_RDONLY)]
    highest = max(map(int, os.listdir("/proc/self/fd")))
    while taken[-1] < highest + count:
        taken.append(os.dup(taken[0]))
    resource.setrlimit(resource.RLIMIT_NOFILE, (taken[-1] + 1, hard))
    for _ in range(count):
        os.close(taken.pop())
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        for one in taken:
            os.close(one)


@pytest.fixture
def urls(tmp_path: Path) -> dict[str, str]:
    token = tmp_path / "token"
    token.write_text("t" * 40)
    token.chmod(0o600)
    return {
        "unix": f"unix:{tmp_path / 'nobody'}",
        "token": f"tiffin://127.0.0.1:1?token_file={token}",
        "embedded": EMBEDDED,
    }


def open_and_close(url: str) -> None:
    Client.open(url).close()


def open_and_close_in_a_loop(url: str, count: int) -> None:
    async def opened() -> None:
        with descriptors_left(count):
            client = await AsyncClient.open(url)
        await client.close()

    asyncio.run(opened())


@pytest.mark.parametrize(("kind", "count"), [("unix", 0), ("token", 0), ("embedded", 0),
                                             ("embedded", 1), ("embedded", 2)])  # fmt: skip
def test_opening_says_that_no_descriptors_are_left(
    urls: dict[str, str], kind: str, count: int
) -> None:
    open_and_close(EMBEDDED)  # imports what it needs
    with contextlib.suppress(NodeUnavailable):
        open_and_close(urls["token"])
    gc.collect()  # what other tests left
    before = os.listdir("/proc/self/fd")
    with (
        descriptors_left(count),
        pytest.raises(NodeUnavailable, match=r"no file descriptor is left .*ulimit -n"),
    ):
        open_and_close(urls[kind])
    gc.collect()  # a mapping in the error's traceback has a descriptor of its own
    assert len(os.listdir("/proc/self/fd")) <= len(before)  # others' threads may close some
    with pytest.raises(NodeUnavailable, match=r"no file descriptor is left .*ulimit -n"):
        open_and_close_in_a_loop(urls[kind], count)
    open_and_close(EMBEDDED)


def test_other_mistakes_at_opening_keep_their_class(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match="token file"):
        Client.open(f"tiffin://127.0.0.1:1?token_file={tmp_path / 'none'}")


def test_a_region_that_finds_no_descriptor_is_no_garbage(
    shared_daemon: Callable[[PoolOptions], Daemon], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel drops a descriptor for which the receiver has no number; mapping needs another."""
    receive = socket.socket.recvmsg

    def dropped(*arguments: Any) -> tuple[bytes, list[Any], int, Any]:
        data, ancillary, flags, address = receive(*arguments)
        for _, _, content in ancillary:
            os.close(int.from_bytes(content[:4], sys.byteorder))
        return data, [], flags | socket.MSG_CTRUNC, address

    def full(fd: int, _nbytes: int) -> None:
        os.close(fd)
        raise RegionError("no") from OSError(errno.EMFILE, "too many")

    url = shared_daemon(PoolOptions()).url
    for place, name, fault in (
        (socket.socket, "recvmsg", dropped),
        (connection.Region, "attach", full),
    ):
        monkeypatch.setattr(place, name, fault)
        with pytest.raises(NodeUnavailable, match=r"no file descriptor is left .*ulimit -n"):
            open_and_close(url)
        monkeypatch.undo()
    open_and_close(url)
