"""The node's shell over real tiers: moves, failing disks, damaged slabs, restarts."""

from __future__ import annotations

import errno
import os
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from kvsupport import assert_right, payloads_of, wait_until, write_block

from tiffin.kvstore import Client, KVSchema
from tiffin.kvstore.errors import ClientClosed, InvalidInput, TierUnavailable
from tiffin.kvstore.node import node as node_module
from tiffin.kvstore.node.core import messages
from tiffin.kvstore.node.node import Node, NodeOptions
from tiffin.kvstore.tiers.nvme import NvmeTier

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from tiffin.kvstore.memory.arena import Extent

SCHEMA = KVSchema.gqa(
    model="node-test", layers=2, kv_heads=2, head_dim=16, dtype="float32", block_tokens=32
)
DRAM_BLOCKS, NVME_BLOCKS = 6, 24


def prefix_of(seed: int, blocks: int) -> Any:
    tokens = np.random.default_rng(seed).integers(0, 1000, blocks * SCHEMA.block_tokens)
    return SCHEMA.prefix(tokens)


def open_node(path: Path, flush_s: float = 30.0) -> Node:
    options = NodeOptions(
        dram_bytes=DRAM_BLOCKS * SCHEMA.extent_bytes,
        flush_s=flush_s,
        nvme_path=path,
        nvme_bytes=NVME_BLOCKS * SCHEMA.extent_bytes,
    )
    return Node(options)


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Node]:
    node = open_node(tmp_path)
    yield node
    node.check()
    node.close()


def refuse(code: int) -> Callable[..., int]:
    def call(*_: object) -> int:
        raise OSError(code, os.strerror(code))

    return call


def settled(node: Node) -> bool:
    with node.held():  # moves that are under way are not queued, and may evict nothing
        moving = bool(node.core.residency.moves)
    return not (moving or node.statistics()["waiting_requests"])


def settle(node: Node) -> None:
    wait_until(lambda: settled(node), "moves to end")


def test_what_overflows_dram_comes_back_from_nvme(node: Node, client: Client) -> None:
    prefixes = [prefix_of(seed, 4) for seed in range(4)]
    for prefix in prefixes:
        assert client.put(prefix, payloads_of(prefix)).complete
    for prefix in prefixes:
        with client.get(prefix) as blocks:
            assert blocks.complete, blocks
            assert_right(blocks, prefix)
    counters = node.statistics()["counters"]
    assert counters["demotions"] > 0
    assert counters["promotions"] > 0
    assert counters["corrupt"] == 0


def test_a_prefix_longer_than_dram_is_read_in_windows(node: Node, client: Client) -> None:
    prefix = prefix_of(1, 3 * DRAM_BLOCKS)
    assert client.put(prefix, payloads_of(prefix)).complete
    out = np.zeros((len(prefix), SCHEMA.block_bytes), np.uint8)
    assert client.get(prefix, into=out).complete
    assert np.array_equal(out, np.stack(payloads_of(prefix)))
    with client.get(prefix) as blocks:  # views must all be in DRAM at once
        assert 0 < len(blocks) <= DRAM_BLOCKS
        assert blocks.reason == "no_room"
        assert_right(blocks, prefix)


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO, errno.EROFS])
def test_a_disk_that_refuses_writes_costs_the_tier_and_not_the_node(
    node: Node, client: Client, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    monkeypatch.setattr(os, "pwritev", refuse(code))
    for seed in range(4):
        client.put(prefix_of(seed, 4), payloads_of(prefix_of(seed, 4)))
        settle(node)
    assert not node.statistics()["tiers"]["nvme"]["writable"]
    last = prefix_of(9, 4)
    assert client.put(last, payloads_of(last)).complete
    with client.get(last) as blocks:
        assert blocks.complete
        assert_right(blocks, last)


def test_a_disk_that_refuses_reads_costs_the_blocks_on_it(
    node: Node, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = prefix_of(1, 5), prefix_of(2, 5)
    for prefix in (first, second):
        client.put(prefix, payloads_of(prefix))
    settle(node)
    monkeypatch.setattr(os, "preadv", refuse(errno.EIO))
    with client.get(first) as blocks:
        assert_right(blocks, first)
        assert blocks.reason == "medium"
    assert node.statistics()["counters"]["medium_errors"] > 0
    with client.get(second) as blocks:
        assert_right(blocks, second)


def test_a_clean_stop_writes_back_and_a_restart_has_it_all(tmp_path: Path) -> None:
    prefix = prefix_of(3, 16)
    node = open_node(tmp_path)
    with Client.attach(node) as client:
        assert client.put(prefix, payloads_of(prefix)).complete
    node.close()
    node = open_node(tmp_path)
    with Client.attach(node) as client:
        assert client.match(prefix).blocks == len(prefix)
        out = np.zeros((len(prefix), SCHEMA.block_bytes), np.uint8)
        assert client.get(prefix, into=out).complete
        assert np.array_equal(out, np.stack(payloads_of(prefix)))
    node.check()
    node.close()


def test_without_the_flush_what_was_demoted_can_still_be_matched(tmp_path: Path) -> None:
    """A crash leaves only NVMe: the chains on it must begin with their heads."""
    prefix = prefix_of(3, 16)
    node = open_node(tmp_path, flush_s=0)
    with Client.attach(node) as client:
        assert client.put(prefix, payloads_of(prefix)).complete
        settle(node)
    node.close()  # before that, a tick may have moved more of it
    on_disk = [bool(block.where & 2) for block in map(node.core.index.get, prefix.keys)]
    leading = on_disk.index(False) if False in on_disk else len(prefix)
    assert leading >= len(prefix) - DRAM_BLOCKS
    node = open_node(tmp_path, flush_s=0)
    with Client.attach(node) as client:
        assert client.match(prefix).blocks == leading
        assert client.exists(prefix) == on_disk
    node.close()


def test_of_two_extents_with_one_key_the_newer_is_kept(tmp_path: Path) -> None:
    prefix = prefix_of(3, 1)
    with NvmeTier(tmp_path, NVME_BLOCKS * SCHEMA.extent_bytes) as tier:
        for generation, fill in ((7, 1), (9, 2), (8, 3)):
            extent = tier.reserve(SCHEMA.extent_bytes)
            write_block(tier, extent, prefix, generation, np.full(SCHEMA.block_bytes, fill))
    node = open_node(tmp_path)
    with Client.attach(node) as client:
        with client.get(prefix) as blocks:
            assert blocks[0].generation == 9
            assert set(blocks[0].bytes.tolist()) == {2}
        node.check()
        numbers = node.statistics()["tiers"]["nvme"]
        assert numbers["committed_bytes"] == SCHEMA.extent_bytes
    node.close()
    with NvmeTier(tmp_path, NVME_BLOCKS * SCHEMA.extent_bytes) as tier:
        assert len(list(tier.scan())) == 1


def test_a_scan_that_fails_halfway_starts_a_node_that_writes_no_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def scan(self: NvmeTier) -> Iterator[Any]:
        raise TierUnavailable("bad sector")
        yield

    monkeypatch.setattr(NvmeTier, "scan", scan)
    node = open_node(tmp_path)
    with Client.attach(node) as client:
        prefix = prefix_of(1, 4)
        assert client.put(prefix, payloads_of(prefix)).complete
        assert not node.statistics()["tiers"]["nvme"]["writable"]
    node.close()


def test_a_lying_reader_cannot_have_a_healthy_block_dropped(node: Node, client: Client) -> None:
    prefix = prefix_of(1, 1)
    client.put(prefix, payloads_of(prefix))
    generation = node.core.index[prefix.keys[0]].dram.generation
    replies: list[Any] = []
    session = node.connect("liar", 1)
    node.submit(session, messages.Report(1, prefix.keys[0], generation), replies.append)
    node.submit(session, messages.Report(2, prefix.keys[0], generation + 1), replies.append)
    node.submit(session, messages.Report(3, bytes(16), generation), replies.append)
    wait_until(lambda: len(replies) == 3, "the block was looked at")
    assert [reply.count for reply in replies] == [0, 0, 0]
    assert client.match(prefix).blocks == 1


def test_damage_in_dram_stops_at_the_demotion(node: Node, client: Client) -> None:
    prefix = prefix_of(1, DRAM_BLOCKS - 2)  # below the watermark: all in DRAM alone
    client.put(prefix, payloads_of(prefix))
    for victim in [block.dram for block in map(node.core.index.get, prefix.keys)]:
        node.dram.region.array[victim.offset + SCHEMA.header_bytes + 5] ^= 1
    other = prefix_of(2, DRAM_BLOCKS)
    client.put(other, payloads_of(other))
    settle(node)
    assert node.statistics()["counters"]["corrupt"] > 0
    with client.get(prefix) as blocks:
        assert_right(blocks, prefix)


def test_erase_that_fails_is_only_a_warning(
    node: Node, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    prefix = prefix_of(1, 10)
    client.put(prefix, payloads_of(prefix))
    settle(node)

    def erase(extent: Extent) -> None:
        raise TierUnavailable("no")

    monkeypatch.setattr(node.nvme, "erase", erase)
    assert client.remove(prefix) == len(prefix)
    assert client.match(prefix).blocks == 0


def test_requests_that_are_not_for_a_node_are_refused(node: Node) -> None:
    replies: list[Any] = []
    session = node.connect("odd", 1)
    node.submit(session, messages.Goodbye(5), replies.append)
    assert (replies[0].id, replies[0].error) == (5, "InvalidInput")


def test_closing_twice_is_fine_and_a_bad_disk_frees_the_dram(tmp_path: Path) -> None:
    node = open_node(tmp_path)
    node.close()
    node.close()
    holder = open_node(tmp_path)
    with pytest.raises(TierUnavailable):
        open_node(tmp_path)  # one node per directory
    holder.close()


def test_a_reservation_says_what_needed_no_slot(client: Client) -> None:
    prefix = prefix_of(1, 4)
    client.put(prefix[:1], payloads_of(prefix[:1]))
    with client.reserve(prefix[:2]) as first, client.reserve(prefix) as second:
        assert (first.resident, first.busy, [slot.index for slot in first]) == ((0,), (), [1])
        assert (second.resident, second.busy) == ((0,), (1,))
        assert [slot.index for slot in second] == [2, 3]
        for slot in [*first, *second]:
            slot.view[:] = 5
    assert (first.stored, second.stored, second.reason) == ((1,), (2, 3), None)


def test_a_commit_after_close_touches_nothing(node: Node) -> None:
    prefix = prefix_of(1, 1)
    client = Client.attach(node)
    slots = client.reserve(prefix)
    client.close()
    with pytest.raises(ClientClosed):
        slots.commit()


def test_one_client_cannot_fill_the_nodes_tables(
    node: Node, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(node_module, "LEASES_MAX", 2)
    monkeypatch.setattr(node_module, "WAITING_MAX", 1)
    prefix = prefix_of(1, DRAM_BLOCKS)
    client.put(prefix, payloads_of(prefix))
    settle(node)
    held = client.get(prefix[:1])
    with client.get(prefix[:1]), pytest.raises(InvalidInput, match="2 leases"):
        client.get(prefix[:1])
    held.release()
    with Client.attach(node) as other:  # another client's limit is its own
        assert other.get(prefix[:1]).tokens == SCHEMA.block_tokens


def test_one_client_cannot_queue_without_end(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node_module, "WAITING_MAX", 1)
    session = node.connect("greedy", 1)
    replies: list[Any] = []
    prefix, wanted = prefix_of(1, DRAM_BLOCKS), prefix_of(2, 1)

    def reserve(request_id: int, part: Any) -> None:
        size = SCHEMA.extent_bytes
        request = messages.Reserve(request_id, part.key_bytes, part.parent, 0, size, 30.0)
        node.submit(session, request, replies.append)

    reserve(1, prefix)  # all of DRAM
    reserve(2, wanted)  # waits
    reserve(3, wanted)
    assert [reply.id for reply in replies] == [1, 3]
    assert replies[1].error == "InvalidInput"
    node.disconnect(session, fenced=True)


def reserve_request(request_id: int, prefix: Any, size: int, timeout_s: float) -> messages.Reserve:
    return messages.Reserve(
        request_id, prefix.key_bytes, prefix.parent, prefix.start, size, timeout_s
    )


def test_a_large_writer_that_waits_does_not_stop_the_small_ones(tmp_path: Path) -> None:
    node = Node(NodeOptions(dram_bytes=DRAM_BLOCKS * SCHEMA.extent_bytes))
    with Client.attach(node) as client:
        first, second, third = (prefix_of(seed, 1) for seed in (1, 2, 3))
        client.put(first, payloads_of(first))
        held = client.get(first)
        session, replies = node.connect("large", 1), []
        whole = DRAM_BLOCKS * SCHEMA.extent_bytes  # never while the first block is held
        node.submit(session, reserve_request(1, second, whole, 60.0), replies.append)
        assert replies == []
        assert client.put(third, payloads_of(third), timeout_s=60.0).complete
        assert client.put(first, payloads_of(first), timeout_s=60.0).resident == (0,)
        held.release()
        assert replies[0].statuses == b"\x01"  # and it is served as soon as it can be
        node.disconnect(session, fenced=True)
    node.check()
    node.close()


def test_who_leaves_while_a_get_waits_leaves_nothing(node: Node, client: Client) -> None:
    prefix = prefix_of(1, 3 * DRAM_BLOCKS)
    client.put(prefix, payloads_of(prefix))
    settle(node)
    for _ in range(20):
        session, replies = node.connect("rude", 1), []
        node.submit(session, messages.Lease(1, prefix.key_bytes, 30.0), replies.append)
        held = bool(replies and replies[0].lease)
        assert node.disconnect(session, fenced=False) is not held
        if held:
            node.fence(session)
    settle(node)
    assert [s["name"] for s in node.statistics()["sessions"]] == [""]


def forge_header(node: Node, prefix: Any, **changes: Any) -> None:
    """Rewrite the header of a committed block with a valid checksum, as a broken client could."""
    from tiffin.kvstore.format.header import pack_header, read_header

    replica = node.core.index[prefix.keys[0]].dram
    view = node.dram.region.array[replica.offset : replica.offset + replica.length]
    header = read_header(view)
    fields = {
        name: getattr(header, name)
        for name in (
            "key",
            "parent",
            "schema_fingerprint",
            "namespace_fingerprint",
            "generation",
            "payload_bytes",
            "extent_offset",
            "extent_bytes",
            "tokens",
            "segment_bytes",
            "checksums",
        )
    }
    pack_header(view, **fields | changes)


def test_a_forged_header_costs_its_block_and_not_the_mover(node: Node, client: Client) -> None:
    longer = 8 * SCHEMA.extent_bytes
    for seed in range(4):  # more than there are mover threads
        prefix = prefix_of(seed, 1)
        client.put(prefix, payloads_of(prefix))
        forge_header(
            node,
            prefix,
            payload_bytes=2 * longer,
            extent_bytes=3 * longer,
            segment_bytes=[longer, longer],
        )
    for seed in range(10, 18):
        prefix = prefix_of(seed, 1)
        assert client.put(prefix, payloads_of(prefix)).complete
    settle(node)
    assert node.statistics()["counters"]["corrupt"] == 4
    assert node.statistics()["counters"]["demotions"] > 0


def test_a_bug_in_a_move_costs_one_block(
    node: Node, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> None:
        raise ZeroDivisionError

    prefix = prefix_of(1, 3 * DRAM_BLOCKS)
    with monkeypatch.context() as patch:
        patch.setattr(node.nvme, "write", broken)
        client.put(prefix, payloads_of(prefix), timeout_s=0.5)
        settle(node)
    other = prefix_of(2, 3 * DRAM_BLOCKS)
    assert client.put(other, payloads_of(other)).complete


def test_time_goes_on_after_a_bug_in_a_tick(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    ticks: list[float] = []

    def tick(now: float) -> None:
        ticks.append(now)
        if len(ticks) == 1:
            raise ZeroDivisionError

    monkeypatch.setattr(node.core, "tick", tick)
    wait_until(lambda: len(ticks) > 2, "more ticks")
