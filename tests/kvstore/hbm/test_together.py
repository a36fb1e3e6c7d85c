"""Threads and processes at one HBM store: which calls must not block each other."""

from __future__ import annotations

import gc
import os
import threading
import time
from typing import TYPE_CHECKING, Any
from unittest.mock import Mock

import pytest

pytest.importorskip("torch")

from hbmsupport import (
    BLOCK,
    HBM_BLOCKS,
    SCHEMA,
    Clock,
    Halfway,
    Later,
    assert_quiet,
    assert_right,
    before_copies,
    hbm_store,
    publish,
)
from kvsupport import Background, fresh_prefix, payloads_of, wait_until, within

from tiffin.kvstore.errors import ClientClosed, InvalidInput, TierUnavailable
from tiffin.kvstore.hbm import HbmOptions, HbmStore
from tiffin.kvstore.hbm.device.deferred_release import DeferredReleases
from tiffin.kvstore.hbm.device.device_memory import Point
from tiffin.messenger.errors import TransferTimeout
from tiffin.messenger.gpu.copier import DeviceCopier, DeviceTransfer

if TYPE_CHECKING:
    from tiffin.kvstore import Client, KVSchema


@pytest.fixture
def schema() -> KVSchema:
    return SCHEMA


# -- threads -------------------------------------------------------------------------------------


def test_who_wants_what_another_brings_waits_for_it(
    store: HbmStore, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A common prefix of a burst of requests is fetched once, and all of them get it."""
    prefix = fresh_prefix(4, SCHEMA)
    client.put(prefix, payloads_of(prefix))
    copied = []

    def slow(pairs: Any) -> None:
        copied.append(len(pairs))
        time.sleep(0.1)

    before_copies(store, monkeypatch, slow)

    def promote(count: int) -> int:
        with store.promote(prefix[:count]) as blocks:
            assert_right(blocks, prefix)
            return len(blocks)

    threads = [Background(lambda count=count: promote(count)) for count in (4, 4, 4, 2, 3)]  # type: ignore[misc]
    assert [thread.result() for thread in threads] == [4, 4, 4, 2, 3]
    assert sum(copied) == 4
    assert_quiet(store)


def test_who_waits_for_another_waits_no_longer_than_it_said(
    store: HbmStore, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    prefix = fresh_prefix(2, SCHEMA)
    client.put(prefix, payloads_of(prefix))
    copy = Halfway(store, monkeypatch)
    first = Background(lambda: store.promote(prefix).release())
    assert copy.there.wait(8)
    with store.promote(prefix, timeout_s=0.1) as blocks:
        assert (len(blocks), blocks.reason) == (0, "busy")
    copy.go.set()
    first.result()  # waits no longer than `Halfway` does
    assert_quiet(store)


def test_a_removal_stops_only_what_it_names(
    store: HbmStore, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    prefix, unrelated = fresh_prefix(2, SCHEMA), fresh_prefix(1, SCHEMA)
    client.put(prefix, payloads_of(prefix))
    before_copies(store, monkeypatch, lambda _: store.remove(unrelated))
    with store.promote(prefix) as blocks:
        assert blocks.complete
        assert_right(blocks, prefix)


def test_a_large_promote_finds_its_turn_among_other_copies(
    store: HbmStore, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A promote larger than the limit in flight would otherwise wait until nothing is in flight."""
    prefix = fresh_prefix(6, SCHEMA)
    client.put(prefix, payloads_of(prefix))
    monkeypatch.setattr("tiffin.kvstore.hbm.device.device_memory.COPY_BYTES", BLOCK)
    with DeviceCopier(str(store._memory.device), in_flight_bytes=4 * BLOCK) as copier:
        monkeypatch.setattr(store._memory, "copier", copier)
        other = DeviceTransfer(copier, 1, None)
        copier._live[other] = False  # goes on and on
        with store.promote(prefix, timeout_s=20.0) as blocks:
            assert blocks.complete
            assert_right(blocks, prefix)
        copier._ended(other)
        monkeypatch.undo()
    assert_quiet(store)


@pytest.mark.parametrize("queued", [0, 2])
def test_a_part_of_a_copy_that_is_late_keeps_all_of_its_memory(
    store: HbmStore, client: Client, queued: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    prefix, over = fresh_prefix(4, SCHEMA), threading.Event()
    client.put(prefix, payloads_of(prefix))
    monkeypatch.setattr("tiffin.kvstore.hbm.device.device_memory.COPY_BYTES", BLOCK)
    submit, begun = store._memory.copier.submit, []

    def late(groups: Any, *, timeout_s: float) -> Any:
        if len(begun) == queued:
            raise TransferTimeout("no room")
        begun.append(submit(groups, timeout_s=timeout_s))
        begun[-1].done = over.is_set
        return begun[-1]

    monkeypatch.setattr(store._memory.copier, "submit", late)
    with store.promote(prefix) as blocks:
        assert (len(blocks), blocks.reason) == (0, "deadline")
    assert store.statistics()["quarantined_bytes"] == (4 * BLOCK if queued else 0)
    over.set()
    monkeypatch.undo()
    assert_quiet(store)
    assert store.promote(prefix).complete


def test_what_is_removed_stays_away_whoever_asks_meanwhile(
    store: HbmStore, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A block that is promoted between its removal from HBM and from the pool is removed too."""
    prefix, remove = fresh_prefix(2, SCHEMA), client.remove
    client.put(prefix, payloads_of(prefix))

    def promote_before(*arguments: Any, **keywords: Any) -> int:
        with store.promote(prefix) as blocks:
            assert blocks.complete
        return remove(*arguments, **keywords)

    monkeypatch.setattr(client, "remove", promote_before)
    store.remove(prefix)
    assert store.match(prefix) == 0
    assert client.match(prefix).blocks == 0
    assert_quiet(store)


def test_reservations_expire_while_a_copy_down_takes_long(
    client: Client, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = HbmOptions(high_watermark=0.25, low_watermark=0.1)
    with hbm_store(client, device, options=options) as store:
        copy = Halfway(store, monkeypatch)
        abandoned = fresh_prefix(1, SCHEMA)
        slots = store.reserve(abandoned)
        publish(store, fresh_prefix(4, SCHEMA))
        assert copy.there.wait(8)
        # The clock of reservations is ahead of that of the copying thread.
        monkeypatch.setattr("tiffin.kvstore.hbm.locked_core.time", Clock.ahead(100.0))
        assert publish(store, abandoned) == (0,)
        copy.go.set()
        slots.abort()
        assert_quiet(store)


def test_close_does_not_wait_for_who_waits_for_room(client: Client, device: str) -> None:
    store = hbm_store(client, device)
    publish(store, fresh_prefix(HBM_BLOCKS, SCHEMA))
    held = store.reserve(fresh_prefix(HBM_BLOCKS, SCHEMA))
    waiting = Background(lambda: store.reserve(fresh_prefix(1, SCHEMA), timeout_s=20))
    time.sleep(0.05)
    with within(0.2, "closing while somebody waits for room"):
        store.close(timeout_s=0.2)
    with pytest.raises(ClientClosed):
        waiting.result()
    held.abort()


# -- mistakes of one caller ----------------------------------------------------------------------


def test_a_stream_that_is_none_leaves_what_is_held_to_be_released(
    store: HbmStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    prefix = fresh_prefix(4, SCHEMA)
    publish(store, prefix[:2])

    def point(stream: Any = None) -> Point:
        if stream is not None:
            raise TypeError("not a stream")
        return Point(None)

    monkeypatch.setattr(store._memory, "point", point)
    blocks = store.lease(prefix)
    with pytest.raises(TypeError):
        blocks.release("stream")
    blocks.release()
    for end in ("commit", "abort"):
        slots = store.reserve(prefix)
        with pytest.raises(TypeError):
            getattr(slots, end)("stream")
        slots.abort()
    assert_quiet(store)


def test_one_ending_that_fails_does_not_take_others_along() -> None:
    releases, later, done = DeferredReleases(), Later(), []
    releases.add(later, Mock(side_effect=RuntimeError("of somebody else")))
    releases.add(later, lambda: done.append(1))
    later.over = True
    releases.look()
    assert done == [1]
    assert len(releases) == 0


# -- forks, ends ---------------------------------------------------------------------------------


def test_in_a_forked_child_the_store_is_closed(store: HbmStore) -> None:
    prefix = fresh_prefix(2, SCHEMA)
    publish(store, prefix)
    blocks = store.lease(prefix)
    with store._locked_core.lock:  # held at the fork, as by another thread
        child = os.fork()
        if child == 0:
            try:
                code = 0
                for verb in (store.lease, store.match, store.promote, store.reserve):
                    try:
                        verb(prefix)
                        code = 1
                    except ClientClosed:
                        pass
                blocks.release()
                store.close()
                os._exit(code)
            except BaseException:  # noqa: BLE001
                os._exit(2)

    def ended() -> Any:
        pid, status = os.waitpid(child, os.WNOHANG)
        return (status,) if pid else None

    try:
        (status,) = wait_until(ended, "the child ends")
    except AssertionError:
        os.kill(child, 9)
        os.waitpid(child, 0)
        raise
    assert status == 0
    assert_right(blocks, prefix)
    blocks.release()
    assert_quiet(store)


def test_stores_leave_nothing_behind(client: Client, device: str) -> None:
    def count() -> tuple[int, int]:
        gc.collect()  # garbage of earlier tests
        return len(os.listdir("/proc/self/fd")), threading.active_count()

    def once() -> None:
        with HbmStore(client, SCHEMA, HBM_BLOCKS * BLOCK, device) as store:
            publish(store, fresh_prefix(2, SCHEMA))

    once()
    descriptors, threads = count()
    for _ in range(5):
        once()

    def as_before() -> bool:
        now = count()
        return now[0] <= descriptors and now[1] <= threads

    wait_until(as_before, f"{descriptors} descriptors and {threads} threads")


@pytest.mark.parametrize("nbytes", ["8GiB", 4.5 * BLOCK, True, None, -BLOCK, 1 << 62])
def test_sizes_that_are_none(client: Client, device: str, nbytes: Any) -> None:
    with pytest.raises((InvalidInput, TierUnavailable)):
        HbmStore(client, SCHEMA, nbytes, device)
