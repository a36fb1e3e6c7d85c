"""An HBM store in front of a pool: its verbs, one after the other."""

from __future__ import annotations

import contextlib
import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest.mock import Mock

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from hbmsupport import (
    BLOCK,
    HBM_BLOCKS,
    SCHEMA,
    assert_conserved,
    assert_quiet,
    assert_right,
    before_copies,
    fill,
    hbm_store,
    is_pinned,
    publish,
)
from kvsupport import SCHEMA as OTHER_SCHEMA
from kvsupport import Background, PoolOptions, fresh_prefix, is_quiet, payloads_of, wait_until
from waysupport import TwoNodes

from tiffin.kvstore.errors import (
    ClientClosed,
    InvalidInput,
    NoRoom,
    SchemaError,
    StaleLease,
    TierUnavailable,
)
from tiffin.kvstore.hbm import HbmOptions, HbmStore
from tiffin.kvstore.hbm.device.device_memory import host_checksums

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tiffin.kvstore import Client
    from tiffin.kvstore.format.schema import KVSchema


@pytest.fixture
def store(store: HbmStore) -> Iterator[HbmStore]:
    yield store
    assert_quiet(store)


# -- writing and reading -------------------------------------------------------------------------


def test_what_is_published_can_be_leased(store: HbmStore, schema: KVSchema) -> None:
    prefix = fresh_prefix(3, schema)
    with store.reserve(prefix) as slots:
        assert [slot.index for slot in slots] == [0, 1, 2]
        assert store.match(prefix) == 0
        with store.lease(prefix) as nothing:
            assert (len(nothing), nothing.reason) == (0, "busy")
        fill(slots, prefix)
    assert slots.stored == (0, 1, 2)
    assert store.match(prefix) == 3
    with store.lease(prefix) as blocks:
        assert blocks.complete
        assert blocks.tokens == 3 * schema.block_tokens
        assert blocks[0].key == prefix.keys[0]
        assert blocks[2].tensor.data_ptr() == store.tensor[blocks[2].offset :].data_ptr()
        assert_right(blocks, prefix)


def test_a_lease_covers_the_leading_blocks(store: HbmStore, schema: KVSchema) -> None:
    prefix = fresh_prefix(4, schema)
    publish(store, prefix[:2])
    publish(store, prefix[3:])
    with store.lease(prefix) as blocks:
        assert (len(blocks), blocks.reason, blocks.complete) == (2, "miss", False)
    assert_right(blocks._blocks, prefix)


def test_resident_blocks_get_no_slots(store: HbmStore, schema: KVSchema) -> None:
    prefix = fresh_prefix(4, schema)
    assert publish(store, prefix[:2]) == (0, 1)
    with store.reserve(prefix) as slots:
        assert slots.resident == (0, 1)
        with store.reserve(prefix) as others:
            assert (len(others), others.busy) == (0, (2, 3))
        fill(slots, prefix)
        slots[1].skip()
    assert slots.stored == (2,)
    assert store.match(prefix) == 3


def test_an_exception_aborts(store: HbmStore, schema: KVSchema) -> None:
    prefix = fresh_prefix(2, schema)
    slots = store.reserve(prefix)

    def write() -> None:
        with slots:
            fill(slots, prefix)
            raise KeyError

    with pytest.raises(KeyError):
        write()
    assert store.match(prefix) == 0
    with pytest.raises(StaleLease):
        slots.commit()
    with pytest.raises(ClientClosed):
        slots[0]


def test_blocks_end_with_their_lease(store: HbmStore, schema: KVSchema) -> None:
    prefix = fresh_prefix(1, schema)
    publish(store, prefix)
    with store.lease(prefix) as blocks:
        pass
    assert blocks.released
    with pytest.raises(ClientClosed):
        blocks[0]
    with pytest.raises(StaleLease):
        blocks.release()


def test_no_blocks_are_no_trouble(store: HbmStore, schema: KVSchema) -> None:
    nothing = fresh_prefix(0, schema)
    with store.reserve(nothing) as slots:
        assert len(slots) == 0
    with store.lease(nothing) as blocks, store.promote(nothing) as brought:
        assert blocks.complete
        assert brought.complete
    assert (store.pin(nothing), store.remove(nothing)) == (0, 0)


def test_bad_input_is_refused(store: HbmStore, client: Client, schema: KVSchema) -> None:
    with pytest.raises(SchemaError):
        store.reserve(fresh_prefix(1, OTHER_SCHEMA))
    with pytest.raises(InvalidInput):
        store.lease(b"key")  # type: ignore[arg-type]
    with pytest.raises(InvalidInput):
        store.promote(fresh_prefix(1, schema), timeout_s=-1)
    with pytest.raises(InvalidInput):
        store.lease(fresh_prefix(1, schema), verify="maybe")  # type: ignore[arg-type]
    with pytest.raises(InvalidInput):
        HbmStore(client, schema, BLOCK - 1, "cpu")
    with pytest.raises(InvalidInput):
        HbmStore(client, schema, BLOCK, "typewriter")
    if not torch.cuda.is_available():
        with pytest.raises(TierUnavailable):
            HbmStore(client, schema, BLOCK, "cuda:0")


# -- room ----------------------------------------------------------------------------------------


def test_leased_blocks_stay_and_others_make_room(store: HbmStore, schema: KVSchema) -> None:
    kept, cold = fresh_prefix(4, schema), fresh_prefix(4, schema)
    publish(store, kept)
    publish(store, cold)
    with store.lease(kept) as blocks:
        new = fresh_prefix(6, schema)
        with store.reserve(new) as slots:
            assert (len(slots), slots.reason) == (4, "no_room")
            fill(slots, new)
        assert store.match(cold) == 0
        with pytest.raises(NoRoom), store.lease(new):
            store.reserve(fresh_prefix(1, schema))
        assert_right(blocks, kept)
    assert store.statistics()["evictions"] == store.statistics()["lost_dirty"] == 4


def test_a_reservation_waits_for_room_if_it_is_told_to(store: HbmStore, schema: KVSchema) -> None:
    prefix = fresh_prefix(HBM_BLOCKS, schema)
    publish(store, prefix)
    blocks = store.lease(prefix)
    with pytest.raises(NoRoom):
        store.reserve(fresh_prefix(1, schema), timeout_s=0.05)
    blocks.release()
    with store.reserve(fresh_prefix(1, schema), timeout_s=5.0) as slots:
        assert len(slots) == 1


def test_pins(store: HbmStore, schema: KVSchema) -> None:
    prefix = fresh_prefix(HBM_BLOCKS, schema)
    publish(store, prefix)
    assert store.pin(prefix, hard=True) == HBM_BLOCKS
    with pytest.raises(NoRoom):
        store.reserve(fresh_prefix(1, schema))
    assert store.unpin(prefix) == HBM_BLOCKS
    publish(store, fresh_prefix(1, schema))
    assert store.match(prefix) == HBM_BLOCKS - 1


# -- up and down ---------------------------------------------------------------------------------


def test_what_is_in_the_pool_comes_up(store: HbmStore, client: Client, schema: KVSchema) -> None:
    prefix = fresh_prefix(5, schema)
    publish(store, prefix[:2])
    client.put(prefix[:4], payloads_of(prefix[:4]))
    with store.promote(prefix) as blocks:
        assert (len(blocks), blocks.hits, blocks.reason) == (4, 2, "miss")
        assert_right(blocks, prefix)
    with store.lease(prefix) as blocks:
        assert len(blocks) == 4
    numbers = store.statistics()
    assert (numbers["brought"], numbers["brought_bytes"]) == (2, 2 * BLOCK)
    assert (numbers["hbm_hits"], numbers["pool_hits"], numbers["misses"]) == (6, 2, 2)
    assert numbers["dirty_blocks"] == 2


def test_more_than_fits_is_a_partial_result(
    store: HbmStore, client: Client, schema: KVSchema
) -> None:
    prefix = fresh_prefix(HBM_BLOCKS + 2, schema)
    client.put(prefix, payloads_of(prefix))
    with store.promote(prefix) as blocks:
        assert (len(blocks), blocks.reason) == (HBM_BLOCKS, "no_room")
        assert_right(blocks, prefix)


def test_demoted_blocks_are_in_the_pool_and_here(
    store: HbmStore, client: Client, schema: KVSchema
) -> None:
    prefix, other = fresh_prefix(3, schema), fresh_prefix(1, schema)
    publish(store, prefix)
    publish(store, other)
    saved = store.demote(prefix)
    assert (saved.saved, saved.nbytes, saved.refused) == (3, 3 * BLOCK, 0)
    with client.get(prefix) as blocks:
        assert blocks.complete
        for block, payload in zip(blocks, payloads_of(prefix), strict=True):
            assert np.array_equal(block.bytes, payload)
    assert store.statistics()["dirty_blocks"] == 1
    assert store.demote(prefix).saved == 0
    assert store.demote().saved == 1
    assert store.match(prefix) == 3


def test_what_the_pool_has_is_not_copied_again(
    store: HbmStore, client: Client, schema: KVSchema
) -> None:
    prefix = fresh_prefix(3, schema)
    client.put(prefix[:2], payloads_of(prefix[:2]))
    publish(store, prefix)
    saved = store.demote()
    assert (saved.saved, saved.present) == (1, 2)
    assert store.statistics()["dirty_blocks"] == 0


def test_a_round_trip_through_the_pool(store: HbmStore, client: Client, schema: KVSchema) -> None:
    prefix = fresh_prefix(4, schema)
    publish(store, prefix)
    store.demote()
    assert store.remove(prefix, pool=False) == 4
    with store.promote(prefix) as blocks:
        assert (len(blocks), blocks.hits) == (4, 0)
        assert_right(blocks, prefix)


def test_removal_reaches_the_pool(store: HbmStore, client: Client, schema: KVSchema) -> None:
    prefix = fresh_prefix(2, schema)
    publish(store, prefix)
    store.demote()
    with store.lease(prefix) as blocks:
        assert store.remove(prefix) == 2
        assert_right(blocks, prefix)  # a lease keeps its bytes
        assert_conserved(store.statistics())
        assert store.statistics()["quarantined_bytes"] == 2 * BLOCK
    assert client.match(prefix).blocks == 0
    with store.promote(prefix) as blocks:
        assert (len(blocks), blocks.reason) == (0, "miss")


def test_above_the_watermark_blocks_go_down_by_themselves(
    client: Client, schema: KVSchema, device: str
) -> None:
    options = HbmOptions(high_watermark=0.5, low_watermark=0.25)
    with hbm_store(client, device, schema, options) as store:
        first, second = fresh_prefix(4, schema), fresh_prefix(2, schema)
        publish(store, first)
        assert client.match(first).blocks == 0
        publish(store, second)
        wait_until(lambda: client.match(first).blocks == 4, "the coldest are in the pool")
        wait_until(lambda: store.statistics()["dirty_blocks"] == 2, "they are known to be")
        with client.get(first) as blocks:
            for block, payload in zip(blocks, payloads_of(first), strict=True):
                assert np.array_equal(block.bytes, payload)
        assert_quiet(store)


def test_admission_on_second_use(client: Client, schema: KVSchema, device: str) -> None:
    options = HbmOptions(admit_on_second_use=True)
    prefix = fresh_prefix(2, schema)
    client.put(prefix, payloads_of(prefix))
    with hbm_store(client, device, schema, options) as store:
        with store.promote(prefix) as blocks:
            assert (len(blocks), blocks.reason) == (0, "admission")
        with store.promote(prefix) as blocks:
            assert blocks.complete
            assert_right(blocks, prefix)


def test_a_closed_store_says_so(client: Client, schema: KVSchema, device: str) -> None:
    store = HbmStore(client, schema, HBM_BLOCKS * BLOCK, device)
    prefix = fresh_prefix(2, schema)
    slots = store.reserve(prefix)
    store.close(timeout_s=0.1)
    store.close()
    with pytest.raises(ClientClosed):
        slots.commit()
    for verb in (store.reserve, store.lease, store.promote, store.match, store.remove):
        with pytest.raises(ClientClosed):
            verb(prefix)
    with pytest.raises(TierUnavailable):
        _ = store.tensor


def test_blocks_that_are_held_when_the_store_closes_keep_their_memory(
    client: Client, schema: KVSchema, device: str
) -> None:
    store, prefix = HbmStore(client, schema, HBM_BLOCKS * BLOCK, device), fresh_prefix(2, schema)
    publish(store, prefix)
    blocks = store.lease(prefix)
    store.close()
    assert_right(blocks, prefix)
    blocks.release()


# -- silent errors -------------------------------------------------------------------------------


def test_blocks_of_other_tokens_under_the_same_key_are_no_hit(
    store: HbmStore, schema: KVSchema
) -> None:
    prefix = fresh_prefix(3, schema)
    publish(store, prefix)
    entry = store._locked_core.core.entries[prefix.keys[1]]
    entry.prefix = schema.prefix(np.arange(3 * schema.block_tokens) + 7)  # as if the keys collided
    with store.lease(prefix) as blocks:
        assert (len(blocks), blocks.reason) == (1, "miss")


def test_what_was_removed_while_it_came_up_stays_away(
    store: HbmStore, client: Client, schema: KVSchema, monkeypatch: pytest.MonkeyPatch
) -> None:
    prefix = fresh_prefix(2, schema)
    client.put(prefix, payloads_of(prefix))
    before_copies(store, monkeypatch, lambda _: store.remove(prefix))
    with store.promote(prefix) as blocks:
        assert len(blocks) == 0
    assert store.match(prefix) == 0


def test_what_is_removed_while_it_goes_down_does_not_stay_in_the_pool(
    store: HbmStore, client: Client, schema: KVSchema, monkeypatch: pytest.MonkeyPatch
) -> None:
    prefix = fresh_prefix(2, schema)
    publish(store, prefix)
    removal: list[Background] = []

    def remove(_: Any) -> None:
        removal.append(Background(lambda: store.remove(prefix)))
        wait_until(lambda: store.match(prefix) == 0, "HBM has forgotten it")

    before_copies(store, monkeypatch, remove)
    store.demote()
    assert removal[0].result() == 2
    assert client.match(prefix).blocks == 0


def test_a_prefix_may_grow_while_its_blocks_are_here(
    store: HbmStore, client: Client, schema: KVSchema
) -> None:
    prefix = fresh_prefix(2, schema)
    publish(store, prefix)
    prefix.extend(np.arange(2 * schema.block_tokens))
    assert publish(store, prefix) == (2, 3)
    store.demote()
    assert client.match(prefix).blocks == 4
    store.remove(prefix, pool=False)
    with store.promote(prefix) as blocks:
        assert blocks.complete
        assert_right(blocks, prefix)


def test_a_slice_of_a_prefix(store: HbmStore, client: Client, schema: KVSchema) -> None:
    prefix = fresh_prefix(5, schema)
    client.put(prefix[:3], payloads_of(prefix[:3]))
    with store.promote(prefix[1:]) as blocks:
        assert (len(blocks), blocks.reason) == (2, "miss")
        assert_right(blocks, prefix[1:])
    publish(store, prefix[3:])
    assert store.demote(prefix[3:]).saved == 2
    assert client.match(prefix).blocks == 5


def test_in_front_of_a_node_over_the_network(
    network_client: Client, schema: KVSchema, device: str
) -> None:
    with hbm_store(network_client, device, schema) as store:
        prefix, other = fresh_prefix(4, schema), fresh_prefix(2, schema)
        publish(store, prefix)
        assert store.demote().saved == 4
        assert store.remove(prefix, pool=False) == 4
        network_client.put(other, payloads_of(other))
        for wanted in (prefix, other):
            with store.promote(wanted) as blocks:
                assert (len(blocks), blocks.hits) == (len(wanted), 0)
                assert_right(blocks, wanted)
        assert_quiet(store)


def test_the_page_explains_every_number_option_and_verb(store: HbmStore) -> None:
    page = (Path(__file__).parents[3] / "docs" / "hbm.md").read_text(encoding="utf-8")
    named = [*store.statistics(), *(field.name for field in dataclasses.fields(HbmOptions))]
    named += [verb for verb in vars(HbmStore) if verb[0] != "_"]
    internal = {"commit", "let_go", "forget", "check", "tensor"}
    missing = [name for name in named if f"`{name}" not in page and name not in internal]
    assert missing == []


def test_in_front_of_a_pool_with_a_node_on_this_host(
    device: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hashed = Mock(wraps=host_checksums)
    monkeypatch.setattr("tiffin.kvstore.hbm.pool_access.host_checksums", hashed)
    with contextlib.ExitStack() as stack:
        nodes = TwoNodes(PoolOptions(dram_blocks=64), tmp_path)
        stack.callback(nodes.close)
        client = stack.enter_context(nodes.open("engine"))
        store = stack.enter_context(hbm_store(client, device))
        prefix = fresh_prefix(5, SCHEMA)
        client.put(prefix[:2], payloads_of(prefix[:2]))
        nodes.put_far(prefix[:4])
        with store.promote(prefix) as blocks:
            assert (len(blocks), blocks.reason) == (4, "miss")
            assert_right(blocks, prefix)
        # For the two blocks at home, the header's checksums were compared on the device.
        assert [len(call.args[0]) for call in hashed.call_args_list] == [BLOCK, BLOCK]
        publish(store, prefix)
        assert store.demote().saved == 1
        assert_quiet(store)
        wait_until(lambda: is_quiet(nodes.home.statistics()), "home comes to rest")


def test_the_pools_memory_is_pinned_while_the_store_is_open(client: Client, device: str) -> None:
    memory = client.near_link.mapping.memory

    def pinned() -> bool:
        return is_pinned(memory, device)

    with contextlib.ExitStack() as later:
        with HbmStore(client, SCHEMA, BLOCK, device):
            assert pinned()
            later.enter_context(HbmStore(client, SCHEMA, BLOCK, device))
            assert pinned()
        assert pinned()  # the second one may be copying
    assert not pinned()
    with HbmStore(client, SCHEMA, BLOCK, device, pin=False):
        assert not pinned()
