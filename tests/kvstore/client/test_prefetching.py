"""Prefetches, for every way to reach a pool: how far they come, why they end, and what they leave
alone."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import pytest
from kvsupport import (
    DRAM_BLOCKS,
    EXTENT,
    Daemon,
    assert_right,
    fresh_prefix,
    payloads_of,
    wait_until,
    within,
)
from waysupport import IN_PLACE_WAYS, Pool

from tiffin.kvstore import Client
from tiffin.kvstore.errors import ClientClosed, NodeUnavailable, NoRoom

if TYPE_CHECKING:
    from collections.abc import Callable

    from tiffin.kvstore import Prefix

in_place_ways = pytest.mark.parametrize("way", IN_PLACE_WAYS)


def prefetch(pool: Pool, prefix: Prefix, **options: Any) -> Any:
    return pool.client._run("prefetch", prefix, **options)


def call(pool: Pool, verb: Callable[..., Any], **options: Any) -> Any:
    """A verb of a handle."""
    return pool.loop.run(verb(**options)) if pool.way.startswith("asyncio") else verb(**options)


def on_nvme(pool: Pool, blocks: int) -> list[Prefix]:
    """Prompts of so many blocks that are on NVMe only, of more than DRAM has room for."""
    stored = [pool.put(fresh_prefix(blocks)) for _ in range(2 * DRAM_BLOCKS // blocks)]

    def demoted() -> list[Prefix]:
        pool.quiet()
        return [one for one in stored if set(pool.client.match(one).where) == {2}]

    found: list[Prefix] = wait_until(demoted, "some are demoted")
    return found


@in_place_ways
def test_what_is_in_dram_needs_no_time(pool: Pool) -> None:
    prefix = pool.put(fresh_prefix(3))
    handle = prefetch(pool, prefix)
    assert call(pool, handle.wait, timeout_s=10)
    assert (handle.blocks, handle.tokens, handle.reason) == (3, 3 * 16, None)
    assert handle.complete
    assert handle.ended
    assert call(pool, handle.poll)
    assert handle.prefix.keys == prefix.keys
    assert "3 of 3 blocks, complete" in repr(handle)


@in_place_ways
def test_what_nobody_has_is_missed(pool: Pool) -> None:
    prefix = fresh_prefix(3)
    pool.put(prefix[:2])
    handle = prefetch(pool, prefix)
    assert call(pool, handle.wait, timeout_s=10)
    assert (handle.blocks, handle.reason, handle.complete) == (2, "miss", False)


@in_place_ways
def test_no_blocks(pool: Pool) -> None:
    handle = prefetch(pool, fresh_prefix(0))
    assert call(pool, handle.wait, timeout_s=10)
    assert handle.complete


@pytest.mark.parametrize("way", ["sync-network", "asyncio-network"])
def test_without_a_node_on_this_host_there_is_nowhere_to_bring_them(pool: Pool) -> None:
    handle = prefetch(pool, pool.put(fresh_prefix(2)))
    assert call(pool, handle.poll)
    assert call(pool, handle.wait)
    assert (handle.blocks, handle.reason) == (0, "no_home")


@in_place_ways
def test_blocks_come_from_nvme_while_nobody_waits(deep_pool: Pool) -> None:
    prefix = on_nvme(deep_pool, 2)[0]
    handle = prefetch(deep_pool, prefix, timeout_s=30)
    wait_until(lambda: call(deep_pool, handle.poll), "they come")
    assert (handle.blocks, handle.reason) == (2, None)
    assert all(flag & 1 for flag in deep_pool.client.match(prefix).where)
    with deep_pool.client.get(prefix, timeout_s=0) as blocks:
        assert blocks.complete
        assert_right(blocks, prefix)


@in_place_ways
def test_waiting_for_nvme(deep_pool: Pool) -> None:
    prefix = on_nvme(deep_pool, 4)[0]
    handle = prefetch(deep_pool, prefix, timeout_s=30)
    assert call(deep_pool, handle.wait, timeout_s=30)
    assert handle.complete
    assert handle.blocks == 4


@in_place_ways
def test_nothing_that_is_leased_makes_room(deep_pool: Pool) -> None:
    prefix = on_nvme(deep_pool, 2)[0]
    held = deep_pool.hold(fresh_prefix(DRAM_BLOCKS))
    handle = prefetch(deep_pool, prefix, timeout_s=0.3)
    with within(0.3, "a prefetch without room"):
        wait_until(lambda: call(deep_pool, handle.poll), "it ends")
    assert (handle.blocks, handle.reason) == (0, "no_room")
    assert len(held) == DRAM_BLOCKS
    assert_right(held, held.prefix)
    held.release()
    again = prefetch(deep_pool, prefix, timeout_s=30)
    assert call(deep_pool, again.wait, timeout_s=30)
    assert again.complete


def test_no_time(pool: Pool) -> None:
    handle = prefetch(pool, fresh_prefix(2), timeout_s=0)
    assert call(pool, handle.wait, timeout_s=10)
    assert handle.reason in ("miss", "deadline", "no_home")


def test_a_closed_client_has_no_prefetches(pool: Pool) -> None:
    other = pool.open("other")
    handle = other._run("prefetch", pool.put(fresh_prefix(1)))
    other.close()
    for verb in (handle.poll, handle.wait):
        with pytest.raises(ClientClosed):
            call(pool, verb)
    with pytest.raises(ClientClosed):
        other._run("prefetch", fresh_prefix(1))


@pytest.mark.slow
def test_a_node_that_is_killed_meanwhile(own_daemon: Callable[..., Daemon]) -> None:
    daemon = own_daemon(nvme=48 * EXTENT)
    with Client.open(daemon.url) as client:
        stored = [fresh_prefix(1) for _ in range(2 * DRAM_BLOCKS)]
        for one in stored:
            assert client.put(one, payloads_of(one)).complete

        slots = []
        with contextlib.suppress(NoRoom):
            while True:  # take all of DRAM
                slots.append(client.reserve(fresh_prefix(1), timeout_s=2))
        assert len(slots) == DRAM_BLOCKS
        wanted = next(one for one in stored if client.match(one).where == b"\x02")
        handles = [client.prefetch(wanted, timeout_s=60) for _ in range(2)]
        assert not any(handle.ended for handle in handles)
        daemon.kill()
        assert handles[0].poll()
        assert handles[1].wait(timeout_s=10)
        assert {handle.reason for handle in handles} == {"lost"}
        with pytest.raises(NodeUnavailable):
            client.prefetch(wanted)
        with pytest.raises(NodeUnavailable):
            slots[0].commit()
