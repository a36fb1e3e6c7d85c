"""A pool that comes, goes, closes early and is slow, below an HBM store."""

from __future__ import annotations

import contextlib
import threading
import time
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hbmsupport import BLOCK, DEVICES, SCHEMA, SCHEMAS, assert_quiet, assert_right, publish
from kvsupport import Background, fresh_prefix, payload_of, payloads_of, wait_until
from waysupport import NetworkNode

from tiffin.kvstore import Client
from tiffin.kvstore.errors import ClientClosed, CorruptBlock, DeadlineExceeded, ProtocolError
from tiffin.kvstore.hbm import HbmOptions, HbmStore
from tiffin.kvstore.node.node import Node, NodeOptions
from tiffin.messenger.pinning import registration

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

HBM_BLOCKS = 8
QUIET = HbmOptions(write_back=False)
POOL = f"embedded:?dram={32 * SCHEMA.extent_bytes}&prefault=0"


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def client() -> Iterator[Client]:
    with Client.open(POOL) as client:
        yield client


@pytest.fixture
def store(client: Client, device: str) -> Iterator[HbmStore]:
    with HbmStore(client, SCHEMA, HBM_BLOCKS * BLOCK, device, options=QUIET) as store:
        yield store


class Halfway:
    """A copy that stops before its bytes move, until it is told to go on."""

    def __init__(self, store: HbmStore, monkeypatch: pytest.MonkeyPatch) -> None:
        self._copy = store._memory.copy
        self.there, self.go = threading.Event(), threading.Event()
        monkeypatch.setattr(store._memory, "copy", self._wait)

    def _wait(self, pairs: Any, deadline: float) -> None:
        self.there.set()
        assert self.go.wait(8)
        self._copy(pairs, deadline)


# -- a client that is closed first ---------------------------------------------------------------


@pytest.mark.parametrize("algorithm", sorted(SCHEMAS))
def test_a_client_that_closes_during_a_save_spoils_nobody_elses_block(
    own_daemon: Callable[..., Any], device: str, algorithm: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its goodbye frees the slots; the copy must have ended by then."""
    schema = SCHEMAS[algorithm]
    daemon = own_daemon(dram=2 * schema.extent_bytes)
    mine, theirs = fresh_prefix(2, schema), fresh_prefix(2, schema)
    with (
        Client.open(daemon.url) as other,
        Client.open(daemon.url) as client,
        HbmStore(client, schema, HBM_BLOCKS * BLOCK, device, options=QUIET) as store,
    ):
        publish(store, mine)
        copy = Halfway(store, monkeypatch)
        saving = Background(store.demote)
        assert copy.there.wait(8)
        closing = Background(client.close)
        time.sleep(0.05)

        def reserve() -> Any:
            with contextlib.suppress(Exception):
                return other.reserve(theirs, timeout_s=0.1)

        slots = reserve()
        copy_went_on = slots is not None
        if slots is not None:
            for slot, right in zip(slots, payloads_of(theirs), strict=True):
                slot.view[:] = right
        copy.go.set()
        with contextlib.suppress(ClientClosed):
            saving.result()
        closing.result()
        slots = slots or wait_until(reserve, "the slots are free")
        if not copy_went_on:
            for slot, right in zip(slots, payloads_of(theirs), strict=True):
                slot.view[:] = right
        slots.commit()
        with other.get(theirs) as blocks:
            assert blocks.complete
            for block, key in zip(blocks, theirs.keys, strict=True):
                assert np.array_equal(block.bytes, payload_of(key, schema))


def test_a_client_that_closes_during_a_promote(
    own_daemon: Callable[..., Any], device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What its lease held may be another's by the time that page checksums are made of it."""
    schema = SCHEMAS["xxh3_64"]
    daemon = own_daemon(dram=2 * schema.extent_bytes)
    prefix, others = fresh_prefix(2, schema), fresh_prefix(2, schema)
    from tiffin.kvstore.hbm import below

    hashing, go, real = threading.Event(), threading.Event(), below.host_checksums

    def late(view: Any, spans: Any) -> Any:
        hashing.set()
        go.wait(8)
        return real(view, spans)

    with (
        Client.open(daemon.url) as other,
        Client.open(daemon.url) as client,
        HbmStore(client, schema, HBM_BLOCKS * BLOCK, device, options=QUIET) as store,
    ):
        client.put(prefix, payloads_of(prefix))
        monkeypatch.setattr(below, "host_checksums", late)

        def promote() -> None:
            with store.promote(prefix) as blocks:
                assert_right(blocks, prefix)

        promoting = Background(promote)
        assert hashing.wait(8)
        closing = Background(client.close)
        time.sleep(0.05)
        other.put(others, payloads_of(others), timeout_s=0.2)
        go.set()
        promoting.result()
        closing.result()


# -- a pool that restarts ------------------------------------------------------------------------


def test_after_a_restart_the_new_memory_is_pinned_and_the_old_let_go(
    own_daemon: Callable[..., Any], device: str
) -> None:
    daemon = own_daemon(dram=32 * SCHEMA.extent_bytes)
    kind = device.partition(":")[0]

    def pinned(memory: Any) -> bool:
        address = int(memory.__array_interface__["data"][0])
        return registration(address, len(memory), kind) is not None

    with (
        Client.open(daemon.url) as client,
        HbmStore(client, SCHEMA, HBM_BLOCKS * BLOCK, device, options=QUIET) as store,
    ):
        before = client._link.memory
        assert pinned(before)
        old = int(before.__array_interface__["data"][0]), len(before)
        daemon.kill()
        daemon.start()
        prefix = fresh_prefix(2, SCHEMA)
        publish(store, prefix)

        def saved() -> bool:
            with contextlib.suppress(ConnectionError):
                store.demote()
            return store.statistics()["dirty_blocks"] == 0

        wait_until(saved, "the new node is used")
        wait_until(lambda: pinned(client._link.memory), "its memory is pinned")
        if client._link.memory.__array_interface__["data"][0] != old[0]:
            assert registration(*old, kind) is None
        assert_quiet(store)
    assert not pinned(before)


def test_a_pool_of_another_version_is_a_pool_that_does_not_answer(
    store: HbmStore, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    prefix = fresh_prefix(3, SCHEMA)
    publish(store, prefix[:2])

    def garbage(*_: Any) -> Any:
        raise ProtocolError("the node sent garbage")

    monkeypatch.setattr(client._link, "call", garbage)
    with store.promote(prefix) as blocks:
        assert (len(blocks), blocks.reason) == (2, "pool")
        assert_right(blocks, prefix)


def test_who_has_nothing_to_save_does_not_ask_for_the_others(
    own_daemon: Callable[..., Any], device: str
) -> None:
    """The store's thread must not take every probe of a pool that was away, and not use it."""
    daemon = own_daemon(dram=32 * SCHEMA.extent_bytes)
    options = HbmOptions(high_watermark=0.5, low_watermark=0.1)
    clean, far = fresh_prefix(6, SCHEMA), fresh_prefix(1, SCHEMA)
    with (
        Client.open(daemon.url) as client,
        HbmStore(client, SCHEMA, HBM_BLOCKS * BLOCK, device, options=options) as store,
    ):
        client.put(clean, payloads_of(clean))
        with store.promote(clean) as blocks:
            assert blocks.complete
        door = store._background._door
        door.failed()
        door.failed()
        asked: list[float] = []
        admits = door.admits
        door.admits = lambda: bool(asked.append(0.0)) or admits()  # type: ignore[method-assign]
        for _ in range(20):
            store._background.kick()
            time.sleep(0.01)
        assert asked == []
        del door.admits
        assert store.match(far) == 0


def test_a_demotion_of_nothing_says_nothing_about_the_pool(store: HbmStore) -> None:
    door = store._background._door
    for _ in range(6):
        door.failed()
    store.demote()
    assert not door.admits()


# -- time ----------------------------------------------------------------------------------------


def test_a_demotion_ends_with_its_time(
    store: HbmStore, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    prefixes = [fresh_prefix(1, SCHEMA) for _ in range(HBM_BLOCKS)]
    for prefix in prefixes:
        publish(store, prefix)
    copy = store._memory.copy

    def slow(pairs: Any, deadline: float) -> None:
        time.sleep(0.1)
        copy(pairs, deadline)

    monkeypatch.setattr(store._memory, "copy", slow)
    began = time.monotonic()
    with pytest.raises(DeadlineExceeded):
        store.demote(timeout_s=0.15)
    assert time.monotonic() - began < 0.6
    monkeypatch.undo()
    assert store.statistics()["dirty_blocks"] >= 5
    assert_quiet(store)
    store.demote()
    assert all(client.match(prefix).blocks == 1 for prefix in prefixes)


def test_a_slow_network_is_given_the_time_that_there_is(
    device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    node = NetworkNode(Node(NodeOptions(32 * SCHEMA.extent_bytes, prefault=False)))
    with contextlib.ExitStack() as stack:
        stack.callback(node.close)
        client = stack.enter_context(Client.open(node.url))
        store = stack.enter_context(
            HbmStore(client, SCHEMA, HBM_BLOCKS * BLOCK, device, options=QUIET)
        )
        granted: list[float] = []
        put = client.put

        def note(*arguments: Any, timeout_s: float, **keywords: Any) -> Any:
            granted.append(timeout_s)
            return put(*arguments, timeout_s=timeout_s, **keywords)

        monkeypatch.setattr(client, "put", note)
        publish(store, fresh_prefix(2, SCHEMA))
        assert store.demote(timeout_s=30.0).saved == 2
        assert granted[0] > 20.0


def test_corrupt_is_still_an_error() -> None:
    assert issubclass(CorruptBlock, Exception)
