"""Pinning of the node's memory that a client maps: once, shared, renewed after restarts, unpinned
in time. On device "cpu" only the bookkeeping is done, which is what these tests check."""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from kvsupport import Background, PoolOptions
from waysupport import NetworkNode, TwoNodes

from tiffin.kvstore import Client
from tiffin.kvstore.errors import ClientClosed
from tiffin.kvstore.hbm.device import host_pinning
from tiffin.kvstore.hbm.device.host_pinning import PinnedPool
from tiffin.messenger.errors import MessengerError
from tiffin.messenger.gpu.pinning import Pinned, PinningError, registration

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path


class FakeClient:
    """A client of a node that may be restarted: then its memory is another mapping."""

    def __init__(self) -> None:
        self.near_link: Any = SimpleNamespace(mapping=SimpleNamespace(all=()))
        self.restart()

    def restart(self) -> Any:
        self.near_link.mapping.all = (np.zeros(8192, np.uint8),)
        return self.memory

    def write(self) -> Any:
        """As at the first reservation, the memory is mapped a second time."""
        self.near_link.mapping.all += (np.zeros(8192, np.uint8),)
        return self.near_link.mapping.all[1]

    @property
    def memory(self) -> Any:
        return self.near_link.mapping.all[0]


class ClosedLink:
    @property
    def mapping(self) -> Any:
        raise ClientClosed("this client is closed")


class Owner:
    """Knows whether its copies are in flight."""

    def __init__(self) -> None:
        self.busy = False

    def while_idle(self, action: Callable[[], None]) -> bool:
        if self.busy:
            return False
        action()
        return True


def pool_of(client: Any, owner: Owner | None = None) -> PinnedPool:
    return PinnedPool(client, "cpu", (owner or Owner()).while_idle)


def is_pinned(memory: Any) -> bool:
    return registration(memory.ctypes.data, memory.nbytes, "cpu") is not None


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The address of each mapping for which pinning was requested."""
    found: list[int] = []

    def counted(memory: Any, device: str) -> Pinned:
        found.append(memory.ctypes.data)
        return Pinned(memory, device)

    monkeypatch.setattr(host_pinning, "Pinned", counted)
    return found


# -- one mapping -----------------------------------------------------------------------------------


def test_a_mapping_is_pinned_once(calls: list[int]) -> None:
    client = FakeClient()
    pool = pool_of(client)
    assert not is_pinned(client.memory)
    pool.follow()
    pool.follow()
    assert is_pinned(client.memory)
    assert calls == [client.memory.ctypes.data]
    pool.close()
    pool.close()
    assert not is_pinned(client.memory)


def test_what_is_written_is_pinned_since_it_is_mapped(calls: list[int]) -> None:
    client = FakeClient()
    pool = pool_of(client)
    pool.follow()
    written = client.write()
    pool.follow()
    pool.follow()
    assert calls == [client.memory.ctypes.data, written.ctypes.data]
    old = client.memory, written
    new = client.restart()
    pool.follow()
    assert [is_pinned(memory) for memory in (*old, new)] == [False, False, True]
    pool.close()
    assert not is_pinned(new)


def test_a_node_that_was_restarted_has_other_memory() -> None:
    client = FakeClient()
    old, pool = client.memory, pool_of(client)
    pool.follow()
    new = client.restart()
    pool.follow()
    assert [is_pinned(memory) for memory in (old, new)] == [False, True]
    pool.close()
    assert not is_pinned(new)


def test_the_old_memory_is_let_go_of_before_the_new_is_pinned(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A system limits how much memory can be locked."""
    client = FakeClient()
    old, pool = client.memory, pool_of(client)
    pool.follow()

    def checked(memory: Any, device: str) -> Pinned:
        assert not is_pinned(old)
        return Pinned(memory, device)

    monkeypatch.setattr(host_pinning, "Pinned", checked)
    new = client.restart()
    pool.follow()
    assert is_pinned(new)
    pool.close()


def test_nothing_is_let_go_of_while_a_copy_is_under_way() -> None:
    client, owner = FakeClient(), Owner()
    pool = pool_of(client, owner)
    memories = [client.memory]
    pool.follow()
    owner.busy = True
    for _ in range(2):
        memories.append(client.restart())
        pool.follow()
    assert all(is_pinned(memory) for memory in memories)
    owner.busy = False
    pool.follow()
    assert [is_pinned(memory) for memory in memories] == [False, False, True]
    owner.busy = True
    pool.close()
    assert is_pinned(memories[-1])
    owner.busy = False
    pool.close()
    assert not is_pinned(memories[-1])


def test_a_client_that_is_closed_keeps_what_is_pinned_until_close() -> None:
    client = FakeClient()
    memory, pool = client.memory, pool_of(client)
    pool.follow()
    client.near_link = ClosedLink()
    pool.follow()
    assert is_pinned(memory)
    pool.close()
    assert not is_pinned(memory)


# -- refusals --------------------------------------------------------------------------------------


def test_a_refusal_is_said_once_for_a_mapping(caplog: pytest.LogCaptureFixture) -> None:
    client = FakeClient()
    pool = pool_of(client)
    with Pinned(client.memory[:1], "cpu"), caplog.at_level(logging.WARNING):
        pool.follow()
        pool.follow()
        (record,) = caplog.records
        assert record.getMessage().startswith(
            "the pool's memory is not pinned, so copies pass through staging buffers: cannot pin"
        )
        refused, new = client.memory, client.restart()
        pool.follow()
    assert [is_pinned(memory) for memory in (refused, new)] == [False, True]
    assert len(caplog.records) == 1
    pool.close()


def test_memory_that_was_pinned_is_let_go_of_also_when_the_next_is_refused() -> None:
    client = FakeClient()
    old, pool = client.memory, pool_of(client)
    pool.follow()
    with Pinned(client.restart()[:1], "cpu"):
        pool.follow()
    assert not is_pinned(old)
    pool.close()


def test_a_release_that_is_refused_is_said(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = FakeClient()
    pool = pool_of(client)

    def stays(memory: Any, device: str) -> Any:
        def close() -> None:
            raise PinningError("8192 bytes stay pinned")

        return SimpleNamespace(close=close)

    monkeypatch.setattr(host_pinning, "Pinned", stays)
    pool.follow()
    with caplog.at_level(logging.WARNING):
        pool.close()
        pool.close()
    assert [record.getMessage() for record in caplog.records] == ["8192 bytes stay pinned"]


# -- several that want the same --------------------------------------------------------------------


def test_who_wants_the_same_mapping_shares_it(
    calls: list[int], caplog: pytest.LogCaptureFixture
) -> None:
    client = FakeClient()
    pools = [pool_of(client) for _ in range(3)]
    for pool in pools:
        pool.follow()
    assert calls == [client.memory.ctypes.data]
    for pool in pools[:2]:
        pool.close()
        assert is_pinned(client.memory)
    pools[2].close()
    assert not is_pinned(client.memory)
    pools[0].follow()  # from the beginning
    assert is_pinned(client.memory)
    pools[0].close()
    assert not caplog.records


def test_the_old_memory_stays_until_nobody_copies_from_it() -> None:
    client, owner = FakeClient(), Owner()
    idle, busy = pool_of(client), pool_of(client, owner)
    old = client.memory
    idle.follow()
    busy.follow()
    owner.busy = True
    new = client.restart()
    idle.follow()
    busy.follow()
    assert [is_pinned(memory) for memory in (old, new)] == [True, True]
    owner.busy = False
    busy.follow()
    assert [is_pinned(memory) for memory in (old, new)] == [False, True]
    idle.close()
    busy.close()
    assert not is_pinned(new)


def test_who_is_dropped_without_being_closed_takes_nothing_along() -> None:
    client = FakeClient()
    dropped, other = pool_of(client), pool_of(client)
    dropped.follow()
    other.follow()
    del dropped
    assert is_pinned(client.memory)
    del other
    assert not is_pinned(client.memory)


def test_several_at_once_pin_once(calls: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Pinning takes seconds: threads that need the same memory wait; other threads do not."""
    client, other = FakeClient(), FakeClient()
    begun, go, counted = threading.Event(), threading.Event(), host_pinning.Pinned

    def slow(memory: Any, device: str) -> Any:
        if memory is client.memory:
            begun.set()
            assert go.wait(8)
        return counted(memory, device)

    monkeypatch.setattr(host_pinning, "Pinned", slow)
    pools = [pool_of(client) for _ in range(3)]
    threads = [Background(pool.follow) for pool in pools]
    assert begun.wait(8)
    with contextlib.closing(pool_of(other)) as elsewhere:
        elsewhere.follow()
        assert is_pinned(other.memory)
    go.set()
    for thread in threads:
        thread.result()
    assert sorted(calls) == sorted([client.memory.ctypes.data, other.memory.ctypes.data])
    for pool in pools:
        assert is_pinned(client.memory)
        pool.close()
    assert not is_pinned(client.memory)


def test_a_forked_child_pins_for_itself() -> None:
    """The parent's memory is not pinned in the child, and stays pinned in the parent."""
    client = FakeClient()
    with contextlib.closing(pool_of(client)) as pool:
        pool.follow()
        child = os.fork()
        if not child:
            with contextlib.suppress(BaseException):
                own = pool_of(client)
                before = is_pinned(client.memory)
                own.follow()
                pool.close()  # the parent's
                during = is_pinned(client.memory)
                own.close()
                os._exit(0 if (before, during) == (False, True) else 1)
            os._exit(2)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert is_pinned(client.memory)


# -- whose memory it is ----------------------------------------------------------------------------


@pytest.fixture
def two_nodes(tmp_path: Path) -> Iterator[TwoNodes]:
    nodes = TwoNodes(PoolOptions(), tmp_path)
    yield nodes
    nodes.close()


def test_of_a_node_in_this_process() -> None:
    with Client.open("embedded:?dram=1MiB&prefault=false") as client:
        link = client.near_link
        assert link is client.near_link
        with contextlib.closing(pool_of(client)) as pool:
            pool.follow()
            memory = link.mapping.memory
            assert memory.nbytes >= 1 << 20
            assert is_pinned(memory)
    assert not is_pinned(memory)
    with pytest.raises(ClientClosed):
        link.mapping  # noqa: B018 - the look itself is refused


def test_of_the_home_of_a_pool(two_nodes: TwoNodes) -> None:
    with two_nodes.open("client") as client, contextlib.closing(pool_of(client)) as pool:
        pool.follow()
        assert is_pinned(client.near_link.mapping.memory)
        assert not is_pinned(two_nodes.far.dram.region.array)


def test_a_client_without_a_node_on_its_host_pins_nothing(calls: list[int], tmp_path: Path) -> None:
    node = NetworkNode(PoolOptions().start_node(tmp_path))
    with contextlib.closing(node), Client.open(node.url) as client:
        assert client.near_link is None
        pool_of(client).follow()
    assert not calls


def test_a_device_that_cannot_be_is_a_refusal(caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(MessengerError) as raised:
        Pinned(np.zeros(1, np.uint8), "tpu:0")
    with caplog.at_level(logging.WARNING):
        PinnedPool(FakeClient(), "tpu:0", Owner().while_idle).follow()  # type: ignore[arg-type]
    assert str(raised.value) in caplog.text
