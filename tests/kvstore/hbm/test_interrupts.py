"""Exceptions of a signal handler in the main thread, and results without a reference.

Interrupts at random times in all calls: `python -m tests.campaign interrupts --kind hbm`.
"""

from __future__ import annotations

import contextlib
import gc
import signal
import threading
import weakref
from typing import TYPE_CHECKING, Any

import pytest

pytest.importorskip("torch")

from hbmsupport import (
    BLOCK,
    HBM_BLOCKS,
    SCHEMA,
    Halfway,
    assert_quiet,
    assert_right,
    fill,
    hbm_store,
    publish,
)
from kvsupport import Background, fresh_prefix, payload_of, payloads_of, wait_until

from tiffin.kvstore.errors import NoRoom, StaleLease
from tiffin.kvstore.hbm.device.device_memory import Point

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tiffin.kvstore import Client, KVSchema
    from tiffin.kvstore.hbm import HbmStore


@pytest.fixture
def schema() -> KVSchema:
    return SCHEMA


class Interrupted(KeyboardInterrupt):
    """The exception that the handler raises."""


@contextlib.contextmanager
def interrupted(when: threading.Event) -> Iterator[None]:
    """The block ends with Interrupted, raised when the event is set."""

    def raise_it(number: int, frame: object) -> None:
        raise Interrupted

    def interrupt() -> None:
        assert when.wait(8)
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGUSR1)

    before = signal.signal(signal.SIGUSR1, raise_it)
    try:
        sender = Background(interrupt)
        with pytest.raises(Interrupted):
            yield
        sender.result()
    finally:
        signal.signal(signal.SIGUSR1, before)


# -- calls that are given up -----------------------------------------------------------------------


@pytest.mark.parametrize("way", ["up", "down"])
def test_an_interrupt_during_a_copy_is_raised_at_once_and_costs_no_memory(
    store: HbmStore, client: Client, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    prefix = fresh_prefix(2, SCHEMA)
    if way == "up":
        client.put(prefix, payloads_of(prefix))
    else:
        publish(store, prefix)
    copy = Halfway(store, monkeypatch)
    with interrupted(copy.there):
        store.promote(prefix) if way == "up" else store.demote()
    numbers = store.statistics()
    assert numbers["reserved_bytes" if way == "up" else "saving_blocks"] > 0  # it goes on
    copy.go.set()
    assert_quiet(store)
    with store.promote(prefix) as blocks:
        assert blocks.complete
        assert_right(blocks, prefix)
    store.demote()
    assert client.match(prefix).blocks == 2
    assert_quiet(store)


def test_who_waits_for_room_in_vain_gets_none_later(store: HbmStore) -> None:
    prefix = fresh_prefix(HBM_BLOCKS, SCHEMA)
    held = store.reserve(prefix)
    soon = threading.Event()
    threading.Timer(0.1, soon.set).start()
    with interrupted(soon):
        store.reserve(fresh_prefix(1, SCHEMA), timeout_s=30.0)
    held.abort()
    assert_quiet(store)


def test_a_commit_that_was_given_up_is_not_ended_twice(
    store: HbmStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    prefix, checksums = fresh_prefix(2, SCHEMA), store._memory.checksums
    there, go = threading.Event(), threading.Event()

    def slow(*arguments: Any, **options: Any) -> Any:
        there.set()
        assert go.wait(8)
        return checksums(*arguments, **options)

    monkeypatch.setattr(store._memory, "checksums", slow)
    with store.reserve(prefix) as slots:
        fill(slots, prefix)
        with interrupted(there):
            slots.commit()
        for end in (slots.commit, slots.abort):
            with pytest.raises(StaleLease):
                end()
    go.set()
    wait_until(lambda: store.match(prefix) == 2, "the commit is carried out")
    assert_quiet(store)


def test_a_second_close_waits_for_one_that_was_given_up(
    client: Client, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The client may be closed after it."""
    store, prefix = hbm_store(client, device), fresh_prefix(2, SCHEMA)
    client.put(prefix, payloads_of(prefix))
    copy = Halfway(store, monkeypatch)
    promotion = Background(lambda: store.promote(prefix).release())
    assert copy.there.wait(8)
    soon = threading.Event()
    threading.Timer(0.1, soon.set).start()
    with interrupted(soon):
        store.close()
    second = Background(store.close)
    with pytest.raises(AssertionError, match="did not return"):
        second.result(0.1)
    copy.go.set()
    second.result()
    promotion.result()


# -- results without a reference -------------------------------------------------------------------


def test_what_is_dropped_goes_back(store: HbmStore) -> None:
    """Dropped results are released: an exception may come between a verb and its assignment."""
    prefix = fresh_prefix(2, SCHEMA)
    publish(store, prefix)
    store.lease(prefix)
    store.promote(prefix)
    store.reserve(fresh_prefix(2, SCHEMA))
    Background(lambda: store.lease(prefix) and None).result()
    gc.collect()
    assert_quiet(store)


def test_a_view_keeps_its_memory_when_nothing_else_does(store: HbmStore) -> None:
    prefix = fresh_prefix(2, SCHEMA)
    publish(store, prefix)
    view = store.lease(prefix)[1].tensor[:BLOCK]
    halves = [half.view(-1) for half in view.chunk(2)]
    del view
    gc.collect()
    for _ in range(3):  # fill all the room
        with contextlib.suppress(NoRoom):
            publish(store, fresh_prefix(HBM_BLOCKS, SCHEMA))
    assert store.statistics()["uses"] == 1
    found = b"".join(half.cpu().numpy().tobytes() for half in halves)
    assert found == payload_of(prefix.keys[1], SCHEMA).tobytes()
    del halves
    assert_quiet(store)


def test_a_slot_keeps_its_memory_when_nothing_else_does(store: HbmStore) -> None:
    tensor = store.reserve(fresh_prefix(1, SCHEMA))[0].tensor
    gc.collect()
    publish(store, fresh_prefix(HBM_BLOCKS - 1, SCHEMA))
    assert store.statistics()["reserved_bytes"] == BLOCK
    del tensor
    assert_quiet(store)


def test_what_was_ended_is_not_ended_again_when_it_goes(store: HbmStore) -> None:
    prefix = fresh_prefix(2, SCHEMA)
    publish(store, prefix)
    with store.lease(prefix) as blocks:
        pass
    with store.lease(prefix) as others:
        del blocks
        gc.collect()
        assert store.statistics()["uses"] == 1
        assert_right(others, prefix)
    assert_quiet(store)


@pytest.mark.parametrize("run", [lambda action: action(), lambda a: Background(a).result()])
def test_what_is_got_in_inference_mode_can_be_written_outside(store: HbmStore, run: Any) -> None:
    import torch

    prefix = fresh_prefix(2, SCHEMA)

    def reserve() -> Any:
        with torch.inference_mode():
            return store.reserve(prefix)

    with run(reserve) as slots:
        fill(slots, prefix)
    with store.lease(prefix) as blocks:
        assert_right(blocks, prefix)


def test_a_store_that_is_dropped_closes_itself(client: Client, device: str) -> None:
    def threads() -> set[threading.Thread]:
        return {thread for thread in threading.enumerate() if thread.name == "tiffin-hbm"}

    before = threads()
    store = hbm_store(client, device)
    blocks, gone = store.lease(fresh_prefix(1, SCHEMA)), weakref.ref(store)
    publish(store, fresh_prefix(2, SCHEMA))
    del store
    assert gone() is not None  # its results need it
    del blocks
    wait_until(lambda: threads() <= before and gone() is None, "its thread ends")


# -- streams ---------------------------------------------------------------------------------------


def test_the_callers_current_stream_goes_along(
    store: HbmStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The current stream belongs to a thread, and a worker thread does the main thread's copies."""
    import torch

    current, seen, prefix = threading.local(), [], fresh_prefix(4, SCHEMA)
    publish(store, prefix[:2])
    blocks, slots, more = store.lease(prefix[:2]), store.reserve(prefix), store.lease(prefix)

    @contextlib.contextmanager
    def entered(stream: str) -> Iterator[None]:
        current.stream = stream
        yield
        del current.stream

    def point(stream: Any = None) -> Point:
        seen.append(getattr(current, "stream", "default") if stream is None else stream)
        return Point(None)

    with monkeypatch.context() as patched:
        patched.setattr(store._memory, "device", "cuda:0")
        patched.setattr(store._memory, "point", point)
        patched.setattr(torch.cuda, "is_initialized", lambda: True)
        patched.setattr(torch.cuda, "current_stream", lambda _: getattr(current, "stream", "none"))
        patched.setattr(torch.cuda, "stream", entered)
        with entered("mine"):
            blocks.release()
            slots.abort("named")
        with entered("another"):
            more.release()
    assert seen == ["mine", "named", "another"]
    assert_quiet(store)


def test_on_a_gpu_memory_is_held_until_the_current_stream_has_passed(
    store: HbmStore, device: str
) -> None:
    import torch

    if device == "cpu":
        pytest.skip("streams are a GPU's")
    prefix, side = fresh_prefix(2, SCHEMA), torch.cuda.Stream(device)
    publish(store, prefix)
    for drop in (False, True):
        blocks = store.lease(prefix)
        with torch.cuda.stream(side):
            torch.cuda._sleep(2_000_000_000)  # cycles: about a second
            if not drop:
                blocks.release()
        del blocks
        assert store.statistics()["uses"] == 1
        assert not side.query()
        side.synchronize()
        assert_quiet(store)
