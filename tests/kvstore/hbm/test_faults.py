"""Failures around an HBM store: a caller never gets wrong bytes."""

from __future__ import annotations

import contextlib
import gc
import threading
import time
from typing import TYPE_CHECKING, Any
from unittest.mock import Mock

import pytest

torch = pytest.importorskip("torch")

from hbmsupport import (
    BLOCK,
    HBM_BLOCKS,
    POOL_BYTES,
    SCHEMA,
    Clock,
    Later,
    assert_quiet,
    assert_right,
    before_copies,
    hbm_store,
    publish,
)
from kvsupport import (
    damage,
    fresh_prefix,
    held_bytes,
    payloads_of,
    wait_until,
    within,
)

from tiffin.kvstore import Client
from tiffin.kvstore.errors import (
    DeadlineExceeded,
    NodeUnavailable,
    StaleLease,
    TierUnavailable,
)
from tiffin.kvstore.hbm import HbmOptions
from tiffin.kvstore.hbm.background import TICK_S
from tiffin.kvstore.hbm.device.device_memory import Never, Point, Unfinished

if TYPE_CHECKING:
    from collections.abc import Callable

    from tiffin.kvstore.format.keys import Prefix
    from tiffin.kvstore.format.schema import KVSchema
    from tiffin.kvstore.hbm import HbmStore


def flip(store: HbmStore, prefix: Prefix, index: int, at: int = 77) -> None:
    """Change one bit of a block in HBM, as a stray kernel would."""
    with store.lease(prefix, verify="off") as blocks:
        blocks[index].tensor[at] ^= 1


# -- damage --------------------------------------------------------------------------------------


def test_damage_in_hbm_is_found_dropped_and_counted(
    store: HbmStore, client: Client, schema: KVSchema
) -> None:
    prefix = fresh_prefix(4, schema)
    publish(store, prefix)
    store.demote()
    flip(store, prefix, 2, at=BLOCK - 1)
    with store.lease(prefix) as blocks:
        assert (len(blocks), blocks.reason) == (2, "corrupt")
        assert_right(blocks, prefix)
    assert store.statistics()["damaged"] == 1
    with store.promote(prefix) as blocks:  # the pool's copy is whole
        assert (len(blocks), blocks.hits) == (4, 2)
        assert_right(blocks, prefix)
    assert_quiet(store)


def test_every_policy_but_always_may_miss_damage(store: HbmStore, schema: KVSchema) -> None:
    prefix = fresh_prefix(1, schema)
    publish(store, prefix)
    flip(store, prefix, 0)
    with store.lease(prefix, verify="off") as blocks:
        assert len(blocks) == 1
    found = 0
    for _ in range(400):  # one in 16: all 400 miss it once in 10**11 runs
        with store.lease(prefix, verify="sampled") as blocks:
            found += len(blocks) == 0
    assert found
    assert store.match(prefix) == 0


def test_damage_is_not_saved_as_if_it_were_right(
    store: HbmStore, client: Client, schema: KVSchema
) -> None:
    prefix = fresh_prefix(3, schema)
    publish(store, prefix)
    flip(store, prefix, 1)
    saved = store.demote()
    assert (saved.saved, saved.damaged) == (2, 1)
    assert client.exists(prefix) == [True, False, True]
    assert store.match(prefix) == 1
    assert_quiet(store)


def test_what_arrives_damaged_is_not_published(
    store: HbmStore, client: Client, schema: KVSchema, monkeypatch: pytest.MonkeyPatch
) -> None:
    prefix = fresh_prefix(3, schema)
    client.put(prefix, payloads_of(prefix))
    copy = store._memory.copy

    def copy_badly(pairs: Any, deadline: float) -> None:
        copy(pairs, deadline)
        pairs[1][0][5] ^= 1

    monkeypatch.setattr(store._memory, "copy", copy_badly)
    with store.promote(prefix) as blocks:
        assert (len(blocks), blocks.reason) == (1, "corrupt")
        assert_right(blocks, prefix)
    monkeypatch.undo()
    assert store.statistics()["damaged_arrivals"] == 1
    with store.promote(prefix) as blocks:  # the copy was wrong, not the pool's block
        assert blocks.complete
        assert_right(blocks, prefix)
    assert_quiet(store)


def test_what_is_damaged_in_the_pool_does_not_come_up(
    store: HbmStore, client: Client, schema: KVSchema
) -> None:
    prefix = fresh_prefix(3, schema)
    client.put(prefix, payloads_of(prefix))
    with client.get(prefix, verify="off") as blocks:
        damage(blocks[1].bytes, 9)
    with store.promote(prefix) as found:
        assert (len(found), found.reason) == (1, "corrupt")
        assert_right(found, prefix)
    wait_until(lambda: client.match(prefix).blocks == 1, "the pool has dropped it")
    assert_quiet(store)


# -- the pool ------------------------------------------------------------------------------------


@pytest.mark.slow
def test_without_a_pool_hbm_serves_what_it_has(own_daemon: Callable[..., Any], device: str) -> None:
    daemon = own_daemon(dram=POOL_BYTES)
    mine, lost = fresh_prefix(2, SCHEMA), fresh_prefix(2, SCHEMA)
    with Client.open(daemon.url) as client, hbm_store(client, device) as store:
        publish(store, mine)
        client.put(lost, payloads_of(lost))
        daemon.kill()
        for _ in range(3):
            with within(1.0, "a promote without a pool"), store.promote(mine) as blocks:
                assert blocks.complete
                assert_right(blocks, mine)
            with store.promote(lost) as blocks:
                assert (len(blocks), blocks.reason) == (0, "pool")
        with pytest.raises(NodeUnavailable):
            store.demote()
        assert publish(store, fresh_prefix(1, SCHEMA)) == (0,)
        assert store.statistics()["pool_errors"] >= 2
        assert store.statistics()["dirty_blocks"] == 3
        assert_quiet(store)
        daemon.start()
        wait_until(lambda: _saves(store), "a new node is used again")
        with client.get(mine) as blocks:
            assert blocks.complete
        assert_quiet(store)


@pytest.mark.slow
def test_a_pool_that_hangs_costs_one_deadline_and_not_every_prompt_one(
    own_daemon: Callable[..., Any], device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    daemon = own_daemon(dram=POOL_BYTES)
    mine, far = fresh_prefix(2, SCHEMA), fresh_prefix(2, SCHEMA)
    with Client.open(daemon.url) as client, hbm_store(client, device) as store:
        publish(store, mine)
        client.put(far, payloads_of(far))
        with daemon.stopped(), monkeypatch.context() as patch:
            # The next try is not due yet, however long these take.
            patch.setattr("tiffin.kvstore.hbm.promotion.time", Clock(lambda: 0.0))
            for _ in range(20):  # of 0.3 s each if every one asked
                with store.promote(far, timeout_s=0.3) as blocks:
                    assert (len(blocks), blocks.reason) == (0, "pool")
                with store.promote(mine, timeout_s=0.3) as blocks:
                    assert_right(blocks, mine)
                    assert blocks.complete
            assert store.statistics()["pool_errors"] == 1

        def back() -> bool:
            with store.promote(far) as blocks:
                assert_right(blocks, far)
                return blocks.complete

        wait_until(back, "it is asked again, and answers")
        assert_quiet(store)


def _saves(store: HbmStore) -> bool:
    with contextlib.suppress(NodeUnavailable, DeadlineExceeded, StaleLease):
        store.demote()
    return bool(store.statistics()["dirty_blocks"] == 0)


@pytest.mark.slow
def test_a_node_that_is_killed_during_a_demotion(
    own_daemon: Callable[..., Any], device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    daemon, prefix = own_daemon(dram=POOL_BYTES), fresh_prefix(4, SCHEMA)
    with Client.open(daemon.url) as client, hbm_store(client, device) as store:
        publish(store, prefix)
        before_copies(store, monkeypatch, lambda _: daemon.kill())
        with pytest.raises(NodeUnavailable):
            store.demote()
        monkeypatch.undo()
        assert store.statistics()["dirty_blocks"] == 4
        assert_quiet(store)
        with store.lease(prefix) as blocks:
            assert blocks.complete
            assert_right(blocks, prefix)
        daemon.start()
        wait_until(lambda: _saves(store), "the new node takes them")
        store.remove(prefix, pool=False)
        with store.promote(prefix) as blocks:
            assert (len(blocks), blocks.hits) == (4, 0)
            assert_right(blocks, prefix)


@pytest.mark.usefixtures("patient")
def test_a_pool_without_room_leaves_blocks_dirty(schema: KVSchema, device: str) -> None:
    with (
        Client.open(f"embedded:?dram={2 * schema.extent_bytes}&prefault=0") as client,
        hbm_store(client, device, schema) as store,
    ):
        taken, prefix = fresh_prefix(2, schema), fresh_prefix(3, schema)
        client.put(taken, payloads_of(taken))
        with client.get(taken):
            publish(store, prefix)
            saved = store.demote()
            assert (saved.saved, saved.refused) == (0, 3)
        assert store.statistics()["not_saved"] == 3
        assert store.statistics()["dirty_blocks"] == 3
        assert store.demote().saved == 2
        assert_quiet(store)


# -- the device ----------------------------------------------------------------------------------


def test_a_copy_up_that_goes_on_keeps_its_memory_until_it_has_ended(
    store: HbmStore, client: Client, schema: KVSchema, monkeypatch: pytest.MonkeyPatch
) -> None:
    prefix, later = fresh_prefix(2, schema), Later()
    client.put(prefix, payloads_of(prefix))
    never_ends = Mock(side_effect=Unfinished(TimeoutError("late"), later, late=True))
    monkeypatch.setattr(store._memory, "copy", never_ends)
    with store.promote(prefix) as blocks:
        assert (len(blocks), blocks.reason) == (0, "deadline")
    monkeypatch.undo()
    numbers = store.statistics()
    assert (numbers["quarantined_bytes"], numbers["timeouts"]) == (2 * BLOCK, 1)
    assert held_bytes(client.statistics()) == 2 * schema.extent_bytes  # it still reads them
    with store.promote(prefix) as blocks:
        assert blocks.complete
        assert_right(blocks, prefix)
    later.over = True
    assert_quiet(store)
    wait_until(lambda: held_bytes(client.statistics()) == 0, "the pool's blocks are let go")


def test_a_copy_down_that_goes_on_keeps_both_ends(
    store: HbmStore, client: Client, schema: KVSchema, monkeypatch: pytest.MonkeyPatch
) -> None:
    prefix, later = fresh_prefix(2, schema), Later()
    publish(store, prefix)
    never_ends = Mock(side_effect=Unfinished(TimeoutError("late"), later, late=True))
    monkeypatch.setattr(store._memory, "copy", never_ends)
    with pytest.raises(DeadlineExceeded):
        store.demote()
    monkeypatch.undo()
    assert store.statistics()["saving_blocks"] == 2
    assert store.remove(prefix, pool=False) == 2
    assert store.statistics()["quarantined_bytes"] == 2 * BLOCK
    assert client.statistics()["tiers"]["dram"]["reserved_bytes"] == 2 * schema.extent_bytes
    later.over = True
    assert_quiet(store)
    tier = wait_until(lambda: client.statistics()["tiers"]["dram"], "the slots are given back")
    wait_until(
        lambda: client.statistics()["tiers"]["dram"]["reserved_bytes"] == 0, f"free again: {tier}"
    )
    assert client.match(prefix).blocks == 0


def test_a_device_that_fails_is_an_error_and_its_memory_is_not_used_again(
    store: HbmStore, client: Client, schema: KVSchema, monkeypatch: pytest.MonkeyPatch
) -> None:
    up, down = fresh_prefix(1, schema), fresh_prefix(1, schema)
    client.put(up, payloads_of(up))
    publish(store, down)
    fails = Mock(side_effect=Unfinished(RuntimeError("ECC"), Never(), late=False))
    monkeypatch.setattr(store._memory, "copy", fails)
    with pytest.raises(TierUnavailable, match="ECC"):
        store.promote(up)
    with pytest.raises(TierUnavailable, match="ECC"):
        store.demote()
    monkeypatch.undo()
    assert store.statistics()["quarantined_bytes"] == BLOCK
    with store.lease(down) as blocks:
        assert blocks.complete
    store.check()


def test_a_save_that_failed_on_the_device_leaves_its_blocks_to_a_later_one(
    store: HbmStore, client: Client, schema: KVSchema, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A copy of unknown end only reads HBM. What it may still write to are the pool's slots."""
    prefix = fresh_prefix(2, schema)
    publish(store, prefix)
    fails = Mock(side_effect=Unfinished(RuntimeError("ECC"), Never(), late=False))
    monkeypatch.setattr(store._memory, "copy", fails)
    with pytest.raises(TierUnavailable, match="ECC"):
        store.demote()
    monkeypatch.undo()
    gc.collect()
    numbers = store.statistics()
    assert (numbers["saving_blocks"], numbers["dirty_blocks"], numbers["not_saved"]) == (0, 2, 2)
    assert client.statistics()["tiers"]["dram"]["reserved_bytes"] == 2 * schema.extent_bytes
    others = publish(store, fresh_prefix(HBM_BLOCKS, schema))  # they are evicted, and count as lost
    assert others == tuple(range(HBM_BLOCKS))
    assert store.statistics()["lost_dirty"] == 2
    assert_quiet(store)


@pytest.mark.slow
def test_after_the_device_failed_only_a_caller_tries_to_save_again(
    client: Client, schema: KVSchema, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each attempt may leave slots behind in the pool, so the background makes no further one."""
    eager = HbmOptions(high_watermark=0.2, low_watermark=0.1)
    with hbm_store(client, device, schema, eager) as store:
        fails = Mock(side_effect=Unfinished(RuntimeError("ECC"), Never(), late=False))
        monkeypatch.setattr(store._memory, "copy", fails)
        publish(store, fresh_prefix(4, schema))
        wait_until(lambda: fails.call_count, "the background tries to save")
        publish(store, fresh_prefix(1, schema))  # wakes it
        time.sleep(4 * TICK_S)
        assert fails.call_count == 1
        monkeypatch.undo()
        later = fresh_prefix(1, schema)
        publish(store, later)
        assert store.demote(later).saved == 1  # the device works: so the background goes on
        publish(store, fresh_prefix(1, schema))
        wait_until(lambda: store.statistics()["demotions"] > 1, "the background saves again")
        assert_quiet(store)


def test_checksums_that_fail_publish_nothing(
    store: HbmStore, client: Client, schema: KVSchema, monkeypatch: pytest.MonkeyPatch
) -> None:
    prefix = fresh_prefix(2, schema)
    client.put(prefix, payloads_of(prefix))
    fails = Mock(side_effect=TierUnavailable("no checksums today"))
    monkeypatch.setattr(store._memory, "checksums", fails)
    with pytest.raises(TierUnavailable):
        publish(store, prefix)
    with pytest.raises(TierUnavailable):
        store.promote(prefix)
    monkeypatch.undo()
    assert store.match(prefix) == 0
    assert_quiet(store)
    publish(store, prefix)
    monkeypatch.setattr(store._memory, "checksums", fails)
    with pytest.raises(TierUnavailable):
        store.lease(prefix)
    monkeypatch.undo()
    assert_quiet(store)


# -- callers' streams ----------------------------------------------------------------------------


def test_memory_is_held_until_the_callers_stream_has_passed(
    store: HbmStore, schema: KVSchema, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a GPU the kernels that read or write may still run when a `with` block ends."""
    prefix, later = fresh_prefix(HBM_BLOCKS, schema), Later()
    publish(store, prefix[:4])
    blocks = store.lease(prefix)
    slots = store.reserve(prefix[4:])
    monkeypatch.setattr(store._memory, "point", lambda stream=None: later)
    blocks.release()
    slots.abort()
    monkeypatch.setattr(store._memory, "point", lambda stream=None: Point(None))
    numbers = store.statistics()
    assert (numbers["committed_bytes"], numbers["quarantined_bytes"]) == (4 * BLOCK, 4 * BLOCK)
    with pytest.raises(Exception, match="no room"):
        store.reserve(fresh_prefix(1, schema))
    with store.lease(prefix) as blocks:  # other readers may lease it
        assert len(blocks) == 4
    later.over = True
    assert publish(store, prefix[4:]) == (0, 1, 2, 3)
    assert_quiet(store)


def test_an_expired_reservation_publishes_nothing(
    store: HbmStore, schema: KVSchema, monkeypatch: pytest.MonkeyPatch
) -> None:
    prefix = fresh_prefix(2, schema)
    slots = store.reserve(prefix)
    with monkeypatch.context() as patch:
        patch.setattr("tiffin.kvstore.hbm.background.time", Clock.ahead(100.0))
        wait_until(lambda: store.statistics()["quarantined_bytes"] == 2 * BLOCK, "it expires")
    assert publish(store, prefix) == (0, 1)  # another writer gets these blocks at other extents
    slots[0].tensor.fill_(7)
    with pytest.raises(StaleLease, match="expired"):
        slots.commit()
    with store.lease(prefix) as blocks:
        assert_right(blocks, prefix)
    assert_quiet(store)


# -- threads -------------------------------------------------------------------------------------


def test_threads(client: Client, schema: KVSchema, device: str) -> None:
    """Threads call all verbs on a few chains in little memory; every byte that they read is right.

    They run for a second, or until all the events that are asserted at the end have happened.
    """
    chains = [fresh_prefix(5, schema) for _ in range(4)]
    options = HbmOptions(high_watermark=0.5, low_watermark=0.25)
    wrong: list[BaseException] = []
    began = time.monotonic()
    with hbm_store(client, device, schema, options) as store:

        def enough() -> bool:
            numbers, took_s = store.statistics(), time.monotonic() - began
            both = numbers["brought"] > 0 and numbers["demotions"] > 0
            return took_s > 30.0 or (took_s > 1.0 and both)

        def work(seed: int) -> None:
            chance = torch.Generator().manual_seed(seed)

            def draw(limit: int) -> int:
                return int(torch.randint(limit, (1,), generator=chance))

            try:
                while not enough():
                    prefix = chains[draw(4)][: 1 + draw(5)]
                    act = draw(10)
                    if act < 3:
                        with contextlib.suppress(Exception):
                            publish(store, prefix)
                    elif act < 5:
                        with store.lease(prefix) as blocks:
                            assert_right(blocks, prefix)
                    elif act < 8:
                        with store.promote(prefix) as blocks:
                            assert_right(blocks, prefix)
                    elif act == 8:
                        store.demote(prefix, timeout_s=20)
                    else:
                        store.remove(prefix[draw(len(prefix)) :], pool=bool(draw(2)))
            except BaseException as error:  # noqa: BLE001 - raised again below
                wrong.append(error)

        threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        if wrong:
            raise wrong[0]
        assert_quiet(store)
        numbers = store.statistics()
        assert numbers["brought"], numbers
        assert numbers["demotions"], numbers
        assert numbers["damaged"] == numbers["damaged_arrivals"] == 0, numbers
