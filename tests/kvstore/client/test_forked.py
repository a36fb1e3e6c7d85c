"""A forked child can't use its parent's client, blocks, slots or streams, of any kind of client:
they refuse at once, and nothing that the parent holds ends by it."""

from __future__ import annotations

import asyncio
import inspect
import os
import signal
import traceback
import warnings
from typing import TYPE_CHECKING, Any

import pytest
from kvsupport import assert_right, fresh_prefix, payloads_of, wait_until
from verbsupport import GOOD, verbs_of

from tiffin.kvstore import AsyncClient, Client
from tiffin.kvstore.errors import ClientClosed

if TYPE_CHECKING:
    from collections.abc import Callable

    from waysupport import Pool

CHILD_S = 20


def in_a_child(action: Callable[[], None]) -> None:
    """Run it in a forked child; its failure fails the test, and a child that hangs is killed."""
    readable, writable = os.pipe()
    with warnings.catch_warnings():  # Python 3.12 and later warn of a fork with threads
        warnings.simplefilter("ignore", DeprecationWarning)
        child = os.fork()
    if not child:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(CHILD_S)
        try:
            action()
        except BaseException:  # noqa: BLE001 - reported to the parent
            os.write(writable, traceback.format_exc().encode()[-4000:])
        finally:
            os._exit(0)
    os.close(writable)
    with os.fdopen(readable, "rb") as told:
        said = told.read().decode()
    _, status = os.waitpid(child, 0)
    assert not said, said
    assert status == 0, f"the child ended by signal {os.WTERMSIG(status)}"


def refuse(action: Callable[[], Any]) -> None:
    """The action must raise ClientClosed at once, or when it is awaited."""
    with pytest.raises(ClientClosed, match="fork"):
        end(action)


def end(action: Callable[[], Any]) -> None:
    """Carry it out; await it if needed."""

    async def awaited(found: Any) -> None:
        await found

    found = action()
    if inspect.isawaitable(found):
        asyncio.run(awaited(found))


def ends_of(held: Any) -> list[str]:
    return [name for name in ("release", "abort", "close") if hasattr(held, name)]


def test_a_child_uses_nothing_of_its_parent(pool: Pool) -> None:
    pool.touched.append(GOOD["put"]["prefix"])
    kept = pool.put(fresh_prefix(2))
    blocks = pool.client.get(kept)
    reserved = fresh_prefix(2)
    slots = pool.client.reserve(reserved)
    streamed = pool.client.raw.stream(kept)
    fetched = pool.client._run("prefetch", kept)
    raw, inner = pool.client.raw, [getattr(held, "_held", held) for held in (blocks, slots)]

    def child() -> None:
        for verb in verbs_of(raw):
            refuse(lambda verb=verb: getattr(raw, verb)(**GOOD[verb]))
        if pool.in_place:
            refuse(lambda: inner[0][0])
        refuse(lambda: inner[1][0])
        refuse(lambda: inner[1].publish(0))
        refuse(inner[1].commit)
        enter = getattr(streamed, "__enter__", None) or streamed.__aenter__
        refuse(enter)
        refuse(fetched.poll)
        refuse(fetched.wait)
        if hasattr(streamed, "step"):
            refuse(streamed.step)
        if pool.node is not None:
            refuse(lambda: Client.attach(pool.node))
            refuse(lambda: AsyncClient.attach(pool.node))
        for held in (*inner, streamed, raw):
            for name in ends_of(held):
                end(getattr(held, name))

    in_a_child(child)
    assert_right(blocks, kept)
    for slot, payload in zip(slots, payloads_of(reserved), strict=True):
        slot.view[:] = payload
    slots.commit()
    assert slots.stored == (0, 1)
    blocks.release()
    with pool.client.get(reserved) as found:
        assert_right(found, reserved)
        assert found.complete
    assert pool.client.match(kept).blocks == 2


def test_a_stream_that_has_begun(pool: Pool) -> None:
    """The thread that prefetches over the network belongs to the parent."""
    kept = pool.put(fresh_prefix(1))
    if pool.way.startswith("asyncio"):
        stream = pool.loop.call(pool.client.raw.stream(kept).__aenter__)
    else:
        stream = pool.client.raw.stream(kept).__enter__()
    steps = pool.loop.call(anext, aiter(stream)) if hasattr(stream, "__aiter__") else stream.step()
    assert steps.index == 0

    def child() -> None:
        if hasattr(stream, "step"):
            refuse(stream.step)
            refuse(lambda: next(iter(stream)))
        end(stream.close)

    in_a_child(child)
    if hasattr(stream, "step"):
        last = stream.step()
        assert last is not None
        assert last.index == 1
        assert stream.step() is None
    pool.loop.call(stream.close)


def test_a_client_over_the_network_opens_no_connection_in_the_child(pool: Pool) -> None:
    """A connection of the child would belong to the parent's session."""

    def clients() -> int:
        """Nodes ask each other when they like."""
        names = [one["name"] for one in pool.client.statistics()["sessions"]]
        return sum(not name.startswith("node ") for name in names)

    before = clients()
    pool.client.match(fresh_prefix(1))

    def child() -> None:
        refuse(lambda: pool.client.raw.match(fresh_prefix(1)))
        refuse(lambda: pool.client.raw.statistics())

    in_a_child(child)
    wait_until(lambda: clients() == before, "nobody else came")
