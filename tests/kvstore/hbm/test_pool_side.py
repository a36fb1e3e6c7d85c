"""A pool below an HBM store that restarts, closes early and is slow."""

from __future__ import annotations

import contextlib
import threading
import time
from typing import TYPE_CHECKING, Any
from unittest.mock import Mock

import numpy as np
import pytest

pytest.importorskip("torch")

from hbmsupport import (
    HBM_BLOCKS,
    POOL_BYTES,
    SCHEMA,
    SCHEMAS,
    Halfway,
    Later,
    assert_quiet,
    assert_right,
    before_copies,
    hbm_store,
    is_pinned,
    publish,
)
from kvsupport import Background, fresh_prefix, is_quiet, payloads_of, wait_until
from kvsupport import assert_right as pool_assert_right

from tiffin.kvstore import Client, KVSchema
from tiffin.kvstore.client.verbs.arguments import BLOCKS_MAX
from tiffin.kvstore.errors import (
    ClientClosed,
    DeadlineExceeded,
    NodeUnavailable,
    NoRoom,
    ProtocolError,
    TierUnavailable,
)
from tiffin.kvstore.hbm import HbmOptions, pool_access
from tiffin.kvstore.hbm.device.device_memory import Never, Unfinished
from tiffin.kvstore.hbm.writeback import _cut
from tiffin.kvstore.node.node import Node, NodeOptions
from tiffin.messenger.gpu.pinning import registration

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tiffin.kvstore.hbm import HbmStore


@pytest.fixture
def schema() -> KVSchema:
    return SCHEMA


# -- a client that is closed first ---------------------------------------------------------------


@pytest.fixture(params=sorted(SCHEMAS))
def small_node(request: pytest.FixtureRequest) -> Iterator[tuple[Node, KVSchema]]:
    """A node with room for two blocks: freed extents are written by the next writer at once."""
    schema = SCHEMAS[request.param]
    node = Node(NodeOptions(2 * schema.extent_bytes, prefault=False))
    yield node, schema
    node.close()


@pytest.mark.usefixtures("patient")
def test_a_client_that_closes_during_a_save_spoils_nobody_elses_block(
    small_node: tuple[Node, KVSchema], device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A client's goodbye frees its slots, but only after the copy into them has ended."""
    node, schema = small_node
    theirs = fresh_prefix(2, schema)
    other, client = Client.attach(node), Client.attach(node)
    with other, client, hbm_store(client, device, schema) as store:
        publish(store, fresh_prefix(2, schema))
        copy = Halfway(store, monkeypatch)
        saving = Background(store.demote)
        assert copy.there.wait(8)
        closing = Background(client.close)
        wait_until(lambda: client.near_link.gate.closed, "close has begun")
        with pytest.raises(NoRoom):
            other.reserve(theirs, timeout_s=0.1)
        copy.go.set()
        with pytest.raises(ClientClosed):
            saving.result()
        closing.result()
        other.put(theirs, payloads_of(theirs))
        with other.get(theirs) as blocks:
            assert blocks.complete
            pool_assert_right(blocks, theirs)


@pytest.mark.usefixtures("patient")
@pytest.mark.parametrize("small_node", ["xxh3_64"], indirect=True)
def test_a_client_that_closes_during_a_promote(
    small_node: tuple[Node, KVSchema], device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Page checksums are computed from the bytes that the client verified, not from later ones."""
    node, schema = small_node
    prefix, others = fresh_prefix(2, schema), fresh_prefix(2, schema)
    hashing, go, real = threading.Event(), threading.Event(), pool_access.host_checksums

    def late(view: Any, spans: Any) -> Any:
        hashing.set()
        assert go.wait(8)
        return real(view, spans)

    other, client = Client.attach(node), Client.attach(node)
    with other, client, hbm_store(client, device, schema) as store:
        client.put(prefix, payloads_of(prefix))
        monkeypatch.setattr(pool_access, "host_checksums", late)

        def promote() -> int:
            with store.promote(prefix) as blocks:
                assert_right(blocks, prefix)
                return len(blocks)

        promoting = Background(promote)
        assert hashing.wait(8)
        closing = Background(client.close)
        assert not other.put(others, payloads_of(others), timeout_s=0.1).stored
        go.set()
        assert promoting.result() == 2
        closing.result()


def test_a_device_that_failed_does_not_keep_the_client_from_closing(
    client: Client, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with hbm_store(client, device) as store:
        publish(store, fresh_prefix(2, SCHEMA))
        fails = Mock(side_effect=Unfinished(RuntimeError("ECC"), Never(), late=False))
        monkeypatch.setattr(store._memory, "copy", fails)
        with pytest.raises(TierUnavailable):
            store.demote()
        Background(client.close).result(8)


def test_what_goes_on_after_close_lets_go_when_it_ends(
    client: Client, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    up, down = fresh_prefix(2, SCHEMA), fresh_prefix(2, SCHEMA)
    client.put(up, payloads_of(up))
    store = hbm_store(client, device)
    publish(store, down)
    later = Later()
    never_ends = Mock(side_effect=Unfinished(TimeoutError("late"), later, late=True))
    monkeypatch.setattr(store._memory, "copy", never_ends)
    store.promote(up).release()
    with pytest.raises(DeadlineExceeded):
        store.demote()
    store.close(timeout_s=0.05)
    assert not is_quiet(client.statistics())
    later.over = True
    wait_until(lambda: is_quiet(client.statistics()), "the pool has all of its memory again")
    Background(client.close).result(8)


# -- a pool that restarts ------------------------------------------------------------------------


@pytest.mark.slow
def test_after_a_restart_the_new_memory_is_pinned_and_the_old_let_go(
    own_daemon: Callable[..., Any], device: str
) -> None:
    daemon = own_daemon(dram=POOL_BYTES)
    with Client.open(daemon.url) as client, hbm_store(client, device) as store:
        before = client.near_link.mapping.memory
        assert is_pinned(before, device)
        old = int(before.__array_interface__["data"][0]), len(before)
        daemon.kill()
        daemon.start()
        prefix = fresh_prefix(2, SCHEMA)
        publish(store, prefix)

        def saved() -> bool:
            with contextlib.suppress(NodeUnavailable, DeadlineExceeded):
                store.demote()
            return store.statistics()["dirty_blocks"] == 0

        wait_until(saved, "the new node is used")
        wait_until(
            lambda: is_pinned(client.near_link.mapping.memory, device), "its memory is pinned"
        )
        kind = device.partition(":")[0]
        wait_until(lambda: registration(*old, kind) is None, "the old memory is let go of")
        assert_quiet(store)
    assert not is_pinned(before, device)


def test_a_pool_of_another_version_is_a_pool_that_does_not_answer(
    store: HbmStore, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    prefix = fresh_prefix(3, SCHEMA)
    publish(store, prefix[:2])
    garbage = Mock(side_effect=ProtocolError("the node sent garbage"))
    monkeypatch.setattr(client.near_link, "call", garbage)
    with store.promote(prefix) as blocks:
        assert (len(blocks), blocks.reason) == (2, "pool")
        assert_right(blocks, prefix)


def test_who_has_nothing_to_save_does_not_ask_for_the_others(client: Client, device: str) -> None:
    """The store's thread must not claim the probes of an unavailable pool without using them."""
    options = HbmOptions(high_watermark=0.5, low_watermark=0.1)
    clean = fresh_prefix(6, SCHEMA)
    client.put(clean, payloads_of(clean))
    with hbm_store(client, device, options=options) as store:
        with store.promote(clean) as blocks:
            assert blocks.complete
        pool_health = store._background._pool_health
        pool_health.failed()
        time.sleep(0.11)  # a probe is due now
        assert not store._background._save_due()
        assert pool_health.admits()


def test_a_demotion_of_nothing_says_nothing_about_the_pool(store: HbmStore) -> None:
    pool_health = store._background._pool_health
    for _ in range(6):
        pool_health.failed()
    store.demote()
    assert not pool_health.admits()


# -- time ----------------------------------------------------------------------------------------


def test_a_demotion_ends_with_its_time(
    store: HbmStore, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    prefixes = [fresh_prefix(1, SCHEMA) for _ in range(HBM_BLOCKS)]
    for prefix in prefixes:
        publish(store, prefix)
    begun: list[float] = []

    def slow(_: Any) -> None:
        begun.append(time.monotonic())
        time.sleep(0.1)

    before_copies(store, monkeypatch, slow)
    with pytest.raises(DeadlineExceeded):
        store.demote(timeout_s=0.15)
    assert len(begun) <= 2, "a third one would have begun after 0.2 s"
    monkeypatch.undo()
    assert store.statistics()["dirty_blocks"] >= HBM_BLOCKS - 2
    assert_quiet(store)
    store.demote()
    assert all(client.match(prefix).blocks == 1 for prefix in prefixes)


def test_a_slow_network_is_given_the_time_that_there_is(
    network_client: Client, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    put = Mock(wraps=network_client._nodes.put)
    monkeypatch.setattr(network_client._nodes, "put", put)
    with hbm_store(network_client, device) as store:
        publish(store, fresh_prefix(2, SCHEMA))
        assert store.demote(timeout_s=30.0).saved == 2
    assert put.call_args_list[0].args[3] > 20.0


def test_a_call_to_the_pool_takes_no_more_blocks_than_it_may() -> None:
    schema = KVSchema.gqa(
        model="small", layers=1, kv_heads=1, head_dim=2, dtype="bfloat16", block_tokens=1
    )
    prefix = schema.prefix(np.zeros(BLOCKS_MAX + 1, np.uint32))
    replicas: list[Any] = [None] * len(prefix)
    parts = [(len(part), len(members)) for part, members in _cut([(prefix, replicas)])]
    assert parts == [(BLOCKS_MAX, BLOCKS_MAX), (1, 1)]
