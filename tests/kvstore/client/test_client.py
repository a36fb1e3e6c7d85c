"""The promises of a client, tested for every way to reach a pool.

Eight ways: synchronous and asyncio clients, of a node in this process, of a daemon, of a node over
the network, and of two nodes of which one is home. The asyncio client runs behind an adapter
with the synchronous verbs (`waysupport.Client`). Every test finds the pool empty, and after it
nothing may be held, lost or leaked (`Pool.finish`). `pool.scatter` puts a prompt on all nodes that
there are.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from kvsupport import (
    DRAM_BLOCKS,
    EXTENT,
    NVME_BLOCKS,
    SCHEMA,
    SLACK_S,
    Background,
    Daemon,
    PoolOptions,
    assert_conserved,
    assert_right,
    damage_on_disk,
    fresh_prefix,
    held_bytes,
    is_quiet,
    payload_of,
    payloads_of,
    skip_time,
    stop_time,
    wait_until,
    within,
)
from waysupport import IN_PLACE_WAYS, Pool

from tiffin.kvstore import AsyncClient, Client, KVSchema, LayerSpec, Prefix
from tiffin.kvstore.client.connection import connections, loop_threads
from tiffin.kvstore.errors import (
    ClientClosed,
    DeadlineExceeded,
    InvalidInput,
    NodeUnavailable,
    NoRoom,
    SchemaError,
    StaleLease,
)
from tiffin.kvstore.node.core import messages
from tiffin.kvstore.node.node import Node

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

daemon_ways = pytest.mark.parametrize("way", ["sync-daemon", "asyncio-daemon"])
embedded_ways = pytest.mark.parametrize("way", ["sync-embedded", "asyncio-embedded"])
# Over the network a client maps nothing: it reads into its own memory, and writes from there.
in_place_ways = pytest.mark.parametrize("way", IN_PLACE_WAYS)
# The asyncio client of several nodes does not show the lease behind its blocks.
leasing_ways = pytest.mark.parametrize("way", [w for w in IN_PLACE_WAYS if w != "asyncio-pool"])


def singles(count: int) -> list[Prefix]:
    """Prompts of one block each, which have no ancestors."""
    return [fresh_prefix(1) for _ in range(count)]


def flip(pool: Pool, offset: int) -> None:
    """Damage one bit of the region, as a stray write of any process that maps it would."""
    pool.client.memory[offset] ^= 1


def stored(pool: Pool, prefix: Prefix) -> bool:
    """Put it; returns whether it is stored (on a slow machine its reservation may expire)."""
    with contextlib.suppress(StaleLease):
        return bool(pool.client.put(prefix, payloads_of(prefix)).complete)
    return False


def flip_on_disk(pool: Pool, prefix: Prefix, at: int) -> None:
    """Damage one bit of a block in the slab file, `at` bytes from its header's start."""
    if isinstance(pool.host, Daemon):
        folder = pool.host.nvme
    else:
        assert pool.node is not None
        assert pool.node.nvme is not None
        folder = pool.node.nvme.directory
    damage_on_disk(folder, prefix, at)


class TestPutAndGet:
    def test_get_returns_the_bytes_that_were_put(self, pool: Pool) -> None:
        prefix = fresh_prefix(5)
        result = pool.client.put(prefix, payloads_of(prefix))
        assert (result.stored, result.complete) == ((0, 1, 2, 3, 4), True)
        with pool.client.get(prefix) as blocks:
            assert len(blocks) == 5
            assert blocks.complete
            assert blocks.missing == ()
            assert blocks.tokens == 5 * SCHEMA.block_tokens
            assert_right(blocks, prefix)
            assert [block.key for block in blocks] == list(prefix.keys)

    def test_another_client_reads_what_one_has_put(self, pool: Pool) -> None:
        prefix = pool.scatter(fresh_prefix(3))
        with pool.open() as other, other.get(prefix) as blocks:
            assert len(blocks) == 3
            assert_right(blocks, prefix)

    def test_a_second_put_finds_everything_resident(self, pool: Pool) -> None:
        prefix = pool.put(fresh_prefix(3))
        wrong = [np.zeros(SCHEMA.block_bytes, np.uint8)] * 3
        result = pool.client.put(prefix, wrong)
        assert (result.stored, result.resident) == ((), (0, 1, 2))
        assert result.complete
        with pool.client.get(prefix) as blocks:
            assert_right(blocks, prefix)

    def test_a_put_adds_only_what_is_missing(self, pool: Pool) -> None:
        prefix = fresh_prefix(4)
        pool.put(prefix[:2])
        result = pool.client.put(prefix, payloads_of(prefix))
        assert (result.stored, result.resident) == ((2, 3), (0, 1))

    def test_slices_of_a_prefix_can_be_put_and_got(self, pool: Pool) -> None:
        prefix = pool.scatter(fresh_prefix(6))
        with pool.client.get(prefix[2:5]) as blocks:
            assert len(blocks) == 3
            assert_right(blocks, prefix[2:5])

    @pytest.mark.parametrize("tokens", [0, 1, SCHEMA.block_tokens - 1])
    def test_a_prompt_shorter_than_a_block_is_nothing_to_do(self, pool: Pool, tokens: int) -> None:
        prefix = SCHEMA.prefix(list(range(tokens)))
        client = pool.client
        assert client.put(prefix, []).complete
        assert client.match(prefix).blocks == 0
        assert client.exists(prefix) == []
        assert client.pin(prefix) == client.unpin(prefix) == client.remove(prefix) == 0
        with client.get(prefix) as blocks:
            assert (len(blocks), blocks.complete, blocks.tokens) == (0, True, 0)
        with client.reserve(prefix) as slots:
            assert len(slots) == 0
        assert slots.stored == ()

    def test_blocks_are_a_sequence(self, pool: Pool) -> None:
        prefix = pool.scatter(fresh_prefix(3))
        with pool.client.get(prefix) as blocks:
            assert [b.key for b in blocks[1:]] == list(prefix.keys[1:])
            assert blocks[-1].key == prefix.keys[-1]
            with pytest.raises(IndexError):
                blocks[3]


class TestMatch:
    def test_match_stops_at_the_first_missing_block_and_exists_does_not(self, pool: Pool) -> None:
        prefix = pool.scatter(fresh_prefix(5))
        pool.client.remove(prefix[2])
        hit = pool.client.match(prefix)
        assert (hit.blocks, hit.tokens) == (2, 2 * SCHEMA.block_tokens)
        assert [str(tier) for tier in hit.tiers] == ["dram", "dram"]
        assert pool.client.exists(prefix) == [True, True, False, True, True]

    def test_namespaces_and_schemas_keep_their_blocks_apart(self, pool: Pool) -> None:
        prefix = pool.scatter(fresh_prefix(2))
        tokens = prefix.tokens
        assert pool.client.match(SCHEMA.prefix(tokens, namespace="other")).blocks == 0
        twin = KVSchema.gqa(
            model="small", layers=2, kv_heads=2, head_dim=8, dtype="float16", block_tokens=16
        )
        assert pool.client.match(twin.prefix(tokens, namespace=prefix.namespace)).blocks == 0
        secret = SCHEMA.prefix(tokens, namespace=prefix.namespace, secret=b"s" * 16)
        assert pool.client.match(secret).blocks == 0


class TestPartialResults:
    def test_blocks_behind_a_miss_are_said_to_be_behind(self, pool: Pool) -> None:
        prefix = pool.scatter(fresh_prefix(4))
        pool.client.remove(prefix[1])
        with pool.client.get(prefix) as blocks:
            assert len(blocks) == 1
            assert not blocks.complete
            missing = [(m.index, m.reason) for m in blocks.missing]
            assert missing == [(1, "miss"), (2, "behind"), (3, "behind")]
            assert_right(blocks, prefix)

    def test_a_block_that_is_being_written_is_busy(self, pool: Pool) -> None:
        prefix = fresh_prefix(2)
        with pool.open_in_place() as writer:
            slots = writer.reserve(prefix)
            with pool.client.get(prefix) as blocks:
                assert (len(blocks), blocks.reason) == (0, "busy")
            slots.abort()

    def test_a_copying_get_leaves_the_other_buffers_alone(self, pool: Pool) -> None:
        prefix = fresh_prefix(3)
        pool.scatter(prefix[:2])
        buffers = [np.full(SCHEMA.block_bytes, 7, np.uint8) for _ in range(3)]
        with pool.client.get(prefix, into=buffers) as blocks:
            assert [m.reason for m in blocks.missing] == ["miss"]
            assert_right(blocks, prefix)
        assert (buffers[2] == 7).all()


class TestCopyingGets:
    def test_into_one_buffer(self, pool: Pool) -> None:
        prefix = pool.scatter(fresh_prefix(3))
        buffer = np.zeros((3, SCHEMA.block_bytes), np.uint8)
        blocks = pool.client.get(prefix, into=buffer)
        assert np.array_equal(buffer, np.stack(payloads_of(prefix)))
        assert_right(blocks, prefix)
        blocks.release()

    @pytest.mark.parametrize("make", [np.zeros, lambda n, _: bytearray(n)], ids=["array", "bytes"])
    def test_into_one_buffer_per_block(self, pool: Pool, make: Any) -> None:
        prefix = pool.scatter(fresh_prefix(2))
        buffers = [make(SCHEMA.block_bytes, np.uint8) for _ in range(2)]
        with pool.client.get(prefix, into=buffers) as blocks:
            assert blocks.complete
        for buffer, payload in zip(buffers, payloads_of(prefix), strict=True):
            assert bytes(buffer) == payload.tobytes()

    def test_a_copy_holds_nothing_in_the_pool(self, pool: Pool) -> None:
        prefix = pool.scatter(fresh_prefix(2))
        blocks = pool.client.get(prefix, into=np.zeros(2 * SCHEMA.block_bytes, np.uint8))
        assert held_bytes(pool.quiet()) == 0
        pool.client.remove(prefix)
        assert_right(blocks, prefix)

    def test_torch_tensors_are_sources_and_targets(self, pool: Pool) -> None:
        torch = pytest.importorskip("torch")
        prefix = fresh_prefix(2)
        values = torch.arange(2 * SCHEMA.block_bytes // 2, dtype=torch.bfloat16).reshape(2, -1)
        assert pool.client.put(prefix, values).complete
        target = torch.zeros_like(values)
        pool.client.get(prefix, into=target).release()
        assert torch.equal(target, values)


# -- ranges ----------------------------------------------------------------------------------------

SCHEMAS = {
    "gqa": KVSchema.gqa(
        model="g", layers=3, kv_heads=4, head_dim=8, dtype="float16", block_tokens=16
    ),
    "mla": KVSchema.mla(
        model="m", layers=3, latent_dim=24, rope_dim=8, dtype="bfloat16", block_tokens=16
    ),
    "hybrid": KVSchema.of(
        "h",
        [
            LayerSpec.gqa(kv_heads=4, head_dim=8, dtype="bfloat16"),
            LayerSpec.window(kv_heads=4, head_dim=8, dtype="bfloat16", window_tokens=5),
            LayerSpec.compressed(kv_heads=4, head_dim=8, dtype="float16", tokens_per_entry=4),
            LayerSpec.state(shape=(3, 5), dtype="float32"),
            LayerSpec.opaque(nbytes=37, format="odd"),
            LayerSpec.gqa(kv_heads=4, head_dim=4, dtype="float32"),
        ],
        block_tokens=16,
    ),
    "mixed dtypes": KVSchema.of(
        "d",
        [
            LayerSpec.gqa(kv_heads=4, head_dim=3, dtype="float8_e4m3", v_dtype="bfloat16"),
            LayerSpec.gqa(kv_heads=4, head_dim=5, v_head_dim=3, dtype="int8", v_dtype="float64"),
        ],
        block_tokens=7,
    ),
    "one byte": KVSchema.of("o", [LayerSpec.opaque(nbytes=1, format="one")], block_tokens=1),
    "odd sizes": KVSchema.of(
        "s",
        [LayerSpec.state(nbytes=4099), LayerSpec.opaque(nbytes=3, format="x")],
        block_tokens=3,
    ),
}
LAYERS: list[Any] = [None, 0, (0, 1), slice(0, None), range(1)]
HEADS: list[Any] = [None, (0, 1), (1, 3), slice(2, None), range(4)]


def entries_of(spec: LayerSpec, tokens: int) -> int:
    """Rows per head, by the kinds' documentation."""
    kind = str(spec.kind)
    if kind in ("state", "opaque"):
        return 1
    if kind == "window":
        return min(spec.window_tokens, tokens)
    return tokens // spec.tokens_per_entry


def sliced(schema: KVSchema, payload: np.ndarray, layers: Any, heads: Any) -> bytes:
    """What a get of this range must return: layer, part, head, token, dim, cut with numpy."""
    pieces, at = [], 0
    for index, spec in enumerate(schema.layers):
        for part in spec.parts:
            row = part.dim * part.numpy_dtype.itemsize
            size = part.heads * entries_of(spec, schema.block_tokens) * row
            array = payload[at : at + size].reshape(part.heads, -1)
            at += size
            if index not in chosen(layers, len(schema.layers)):
                continue
            has_heads = str(spec.kind) in ("gqa", "window", "compressed")
            rows = chosen(heads, part.heads) if has_heads else range(1)
            pieces.append(array[rows.start : rows.stop].tobytes())
    assert at == schema.block_bytes
    return b"".join(pieces)


def chosen(selection: Any, count: int) -> range:
    if selection is None:
        return range(count)
    if isinstance(selection, int):
        return range(selection, selection + 1)
    if isinstance(selection, tuple):
        return range(*selection)
    return range(count)[selection] if isinstance(selection, slice) else selection


class TestRanges:
    @pytest.mark.parametrize("name", SCHEMAS)
    def test_every_range_is_what_numpy_cuts_out_of_the_payload(self, pool: Pool, name: str) -> None:
        schema = SCHEMAS[name]
        prefix = pool.scatter(fresh_prefix(2, schema))
        for layers in [*LAYERS, (1, len(schema.layers)), len(schema.layers) - 1]:
            for heads in HEADS:
                if layers != (1, 1):  # empty for the schema of one layer
                    self._check(pool, prefix, layers, heads)

    def _check(self, pool: Pool, prefix: Prefix, layers: Any, heads: Any) -> None:
        wanted = [sliced(prefix.schema, p, layers, heads) for p in payloads_of(prefix)]
        with pool.client.get(prefix, layers=layers, heads=heads) as blocks:
            assert [block.bytes.tobytes() for block in blocks] == wanted, (layers, heads)
        target = np.zeros((2, len(wanted[0])), np.uint8)
        with pool.client.get(prefix, into=target, layers=layers, heads=heads) as blocks:
            assert [row.tobytes() for row in target] == wanted, (layers, heads)
            assert [block.bytes.tobytes() for block in blocks] == wanted

    @pytest.mark.parametrize("into", [False, True], ids=["view", "copy"])
    def test_typed_views_have_the_schemas_dtypes_and_shapes(self, pool: Pool, into: bool) -> None:
        schema = SCHEMAS["hybrid"]
        prefix = pool.scatter(fresh_prefix(1, schema))
        target = np.zeros(schema.block_bytes, np.uint8) if into else None
        with pool.client.get(prefix, into=target) as blocks:
            block = blocks[0]
            assert block.layer(0).k.shape == (4, 16, 8)
            assert block.layer(0).v.dtype.name == "bfloat16"
            assert block.layer(1).k.shape == (4, 5, 8)
            assert block.layer(2).v.shape == (4, 4, 8)
            assert block.layer(3).part("state").shape == (1, 1, 15)
            assert block.layer(4).part("data").shape == (1, 1, 37)
            assert block.layer(5).k.dtype == np.float32
            with pytest.raises(SchemaError, match="part"):
                block.layer(0).part("latent")
            with pytest.raises(SchemaError, match="layer 6"):
                block.layer(6)
            joined = [
                block.layer(i).part(part.name).tobytes()
                for i, spec in enumerate(schema.layers)
                for part in spec.parts
            ]
            assert b"".join(joined) == payload_of(prefix.keys[0], schema).tobytes()

    @pytest.mark.parametrize("dtype", ["bfloat16", "float8_e4m3", "float8_e5m2", "float16", "int8"])
    def test_values_of_every_dtype_survive(self, pool: Pool, dtype: str) -> None:
        schema = KVSchema.gqa(
            model="t", layers=2, kv_heads=2, head_dim=4, dtype=dtype, block_tokens=8
        )
        values = np.arange(2 * 2 * 2 * 8 * 4).reshape(2, 2, 2, 8, 4) % 13
        array = values.astype(schema.layers[0].parts[0].numpy_dtype)
        prefix = fresh_prefix(1, schema)
        pool.client.put(prefix, [array])
        with pool.client.get(prefix) as blocks:
            for layer in range(2):
                assert blocks[0].layer(layer).k.dtype == array.dtype
                assert np.array_equal(blocks[0].layer(layer).k, array[layer, 0])
                assert np.array_equal(blocks[0].layer(layer).v, array[layer, 1])

    def test_a_ranks_heads_of_one_layer(self, pool: Pool) -> None:
        schema = SCHEMAS["gqa"]
        prefix = pool.scatter(fresh_prefix(1, schema))
        whole = payload_of(prefix.keys[0], schema).view(np.float16).reshape(3, 2, 4, 16, 8)
        for into in (None, np.zeros(2 * 2 * 16 * 8 * 2, np.uint8)):
            with pool.client.get(prefix, into=into, layers=1, heads=(2, 4)) as blocks:
                layer = blocks[0].layer(1)
                assert layer.k.tobytes() == whole[1, 0, 2:4].tobytes()
                assert layer.v.tobytes() == whole[1, 1, 2:4].tobytes()
                with pytest.raises(SchemaError, match="not among"):
                    blocks[0].layer(0)


class TestViews:
    @in_place_ways
    def test_a_view_is_the_pools_own_memory(self, pool: Pool) -> None:
        prefix = pool.put(fresh_prefix(1))
        with pool.client.get(prefix) as blocks:
            view = blocks[0].layer(1).k
            assert np.shares_memory(view, pool.client.mapping.memory)
            assert np.shares_memory(blocks[0].bytes, pool.client.mapping.memory)

    @in_place_ways
    def test_readers_cannot_write_through_their_views(self, pool: Pool) -> None:
        prefix = pool.put(fresh_prefix(1))
        with pool.client.get(prefix) as blocks:
            for view in (blocks[0].bytes, blocks[0].layer(0).k, blocks[0].memory):
                assert not view.flags.writeable
                with pytest.raises(ValueError, match="read-only"):
                    view[...] = 0

    def test_views_end_with_their_lease(self, pool: Pool) -> None:
        prefix = pool.scatter(fresh_prefix(2))
        blocks = pool.client.get(prefix)
        block = blocks[0]
        blocks.release()
        with pytest.raises(ClientClosed):
            block.bytes  # noqa: B018 - the access is the test
        with pytest.raises(ClientClosed):
            block.layer(0).k  # noqa: B018
        with pytest.raises(ClientClosed):
            blocks[1]
        with pytest.raises(StaleLease):
            blocks.release()

    @in_place_ways
    @pytest.mark.usefixtures("patient")
    def test_a_removed_block_stays_readable_for_who_holds_it(self, pool: Pool) -> None:
        prefix = pool.put(fresh_prefix(2))
        others = singles(DRAM_BLOCKS)
        with pool.client.get(prefix) as blocks, pool.open() as other:
            assert other.remove(prefix) == 2
            assert other.match(prefix).blocks == 0
            with other.get(prefix) as nothing:
                assert (len(nothing), nothing.reason) == (0, "miss")
            for one in others:  # new writers get other extents
                other.put(one, payloads_of(one), timeout_s=0)
            assert_right(blocks, prefix)
            numbers = other.statistics()
            assert numbers["tiers"]["dram"]["quarantined_bytes"] == 2 * EXTENT
            assert other.put(prefix, payloads_of(prefix)).stored == (0, 1)
            assert_right(blocks, prefix)


class TestWritingInPlace:
    def test_leaving_the_block_commits_what_was_written(self, pool: Pool) -> None:
        prefix = fresh_prefix(3)
        with pool.client.reserve(prefix) as slots:
            assert [slot.index for slot in slots] == [0, 1, 2]
            for slot, payload in zip(slots, payloads_of(prefix), strict=True):
                assert np.shares_memory(slot.view, pool.client.memory) == pool.in_place
                slot.view[:] = payload
            assert pool.client.match(prefix).blocks == 0
        assert slots.stored == (0, 1, 2)
        with pool.client.get(prefix) as blocks:
            assert_right(blocks, prefix)

    def test_typed_slots_write_into_the_pool(self, pool: Pool) -> None:
        prefix = fresh_prefix(1)
        with pool.client.reserve(prefix) as slots:
            slots[0].view[:] = 0
            slots[0].layer(1).v[:] = 2.5
        with pool.client.get(prefix) as blocks:
            assert (blocks[0].layer(1).v == 2.5).all()
            assert (blocks[0].layer(1).k == 0).all()

    def test_only_missing_blocks_get_slots(self, pool: Pool) -> None:
        prefix = fresh_prefix(4)
        pool.put(prefix[:3])
        pool.client.remove(prefix[1])
        with pool.client.reserve(prefix) as slots:
            assert [slot.index for slot in slots] == [1, 3]
            for slot in slots:
                slot.view[:] = payload_of(prefix.keys[slot.index])
        assert slots.stored == (1, 3)
        with pool.client.get(prefix) as blocks:
            assert blocks.complete
            assert_right(blocks, prefix)

    def test_a_skipped_slot_is_not_stored(self, pool: Pool) -> None:
        prefix = fresh_prefix(3)
        with pool.client.reserve(prefix) as slots:
            for slot in slots:
                slot.view[:] = payload_of(prefix.keys[slot.index])
            slots[1].skip()
        assert slots.stored == (0, 2)
        assert pool.client.exists(prefix) == [True, False, True]

    def test_an_exception_aborts_everything(self, pool: Pool) -> None:
        prefix = fresh_prefix(3)
        with contextlib.suppress(RuntimeError), pool.client.reserve(prefix) as slots:
            slots[0].view[:] = 1
            raise RuntimeError("mine")
        assert slots.stored == ()
        assert pool.client.exists(prefix) == [False] * 3
        assert pool.quiet()["tiers"]["dram"]["free_bytes"] == DRAM_BLOCKS * EXTENT

    @in_place_ways  # over the network the client writes the headers itself
    def test_a_header_of_another_block_is_not_committed(self, pool: Pool) -> None:
        prefix = fresh_prefix(2)
        with pool.client.reserve(prefix) as slots:
            for slot in slots:
                slot.view[:] = 0
            slots[0].index, slots[1].index = 1, 0  # as if a writer had swapped them
        assert slots.stored == ()
        assert pool.client.exists(prefix) == [False, False]

    def test_a_reservation_ends_once(self, pool: Pool) -> None:
        slots = pool.client.reserve(fresh_prefix(1))
        view = slots[0].view
        view[:] = 0
        slots.commit()
        with pytest.raises(StaleLease):
            slots.commit()
        with pytest.raises(StaleLease):
            slots.abort()
        with pytest.raises(ClientClosed):
            slots[0].view  # noqa: B018 - the access is the test

    def test_the_second_writer_of_a_key_is_told_that_it_is_busy(self, pool: Pool) -> None:
        prefix = fresh_prefix(2)
        with pool.open_in_place() as first:
            slots = first.reserve(prefix[:1])
            result = pool.client.put(prefix, payloads_of(prefix))
            assert (result.busy, result.stored, result.complete) == ((0,), (1,), False)
            with pool.open_in_place() as third, third.reserve(prefix[:1]) as second:
                assert len(second) == 0
            slots.abort()
            assert pool.client.put(prefix, payloads_of(prefix)).stored == (0,)
        with pool.client.get(prefix) as blocks:
            assert blocks.complete
            assert_right(blocks, prefix)

    def test_a_client_that_closes_gives_everything_back(self, pool: Pool) -> None:
        prefix, written = pool.put(fresh_prefix(2)), fresh_prefix(2)
        other = pool.open()
        other.reserve(written)
        other.get(prefix)
        other.close()
        assert held_bytes(pool.quiet()) == 0
        assert pool.client.put(written, payloads_of(written)).complete


class TestPinsAndRoom:
    def test_the_least_recently_used_block_leaves_first(self, pool: Pool) -> None:
        stored = [pool.put(one) for one in singles(DRAM_BLOCKS)]
        pool.client.get(stored[0]).release()
        pool.put(fresh_prefix(1))
        assert [pool.client.match(one).blocks for one in stored[:3]] == [1, 0, 1]

    @pytest.mark.parametrize("hard", [False, True], ids=["soft", "hard"])
    def test_a_pinned_block_outlives_pressure(self, pool: Pool, hard: bool) -> None:
        pinned = pool.put(fresh_prefix(1))
        assert pool.client.pin(pinned, hard=hard) == 1
        for one in singles(3 * DRAM_BLOCKS):
            pool.put(one)
        with pool.client.get(pinned) as blocks:
            assert_right(blocks, pinned)
            assert blocks.complete
        assert pool.client.unpin(pinned) == 1
        for one in singles(DRAM_BLOCKS):
            pool.put(one)
        assert pool.client.match(pinned).blocks == 0

    def test_soft_pins_give_way_when_nothing_else_can(self, pool: Pool) -> None:
        pinned = [pool.put(one) for one in singles(DRAM_BLOCKS)]
        for one in pinned:
            pool.client.pin(one)
        pool.put(fresh_prefix(1))
        assert sum(pool.client.match(one).blocks for one in pinned) == DRAM_BLOCKS - 1

    @pytest.mark.usefixtures("patient")
    def test_hard_pins_never_give_way(self, pool: Pool) -> None:
        pinned = [pool.put(one) for one in singles(DRAM_BLOCKS)]
        assert all(pool.client.pin(one, hard=True) == 1 for one in pinned)
        with pytest.raises(NoRoom), pool.open_in_place() as writer:
            writer.reserve(fresh_prefix(1), timeout_s=0.05)
        more = fresh_prefix(1)
        assert pool.client.put(more, payloads_of(more), timeout_s=0.05).reason == "no_room"
        assert all(pool.client.match(one).blocks == 1 for one in pinned)
        assert pool.client.remove(pinned[0]) == 1
        pool.put(fresh_prefix(1))

    def test_a_pin_ends_with_its_time(self, pool: Pool) -> None:
        pinned = [pool.put(one) for one in singles(DRAM_BLOCKS)]
        for one in pinned:
            pool.client.pin(one, hard=True, ttl_s=0.2)
        waiting = fresh_prefix(1)
        assert pool.client.put(waiting, payloads_of(waiting), timeout_s=20).complete
        wait_until(lambda: not pool.client.statistics()["pinned_blocks"], "no pin is left")

    def test_pins_count_what_is_resident(self, pool: Pool) -> None:
        prefix = fresh_prefix(4)
        pool.put(prefix[:3])
        assert pool.client.pin(prefix, ttl_s=60) == 3
        assert pool.client.unpin(prefix) == 3
        assert pool.client.remove(prefix) == 3
        assert pool.client.remove(prefix) == 0

    def test_a_prompt_larger_than_the_pool_keeps_its_head(self, pool: Pool) -> None:
        prefix = fresh_prefix(DRAM_BLOCKS + 5)
        with within(0, "a put that no wait can help"):
            result = pool.client.put(prefix, payloads_of(prefix))
        assert result.stored == tuple(range(DRAM_BLOCKS))
        assert (result.reason, result.complete) == ("no_room", False)
        assert pool.client.match(prefix).blocks == DRAM_BLOCKS
        buffer = np.zeros((len(prefix), SCHEMA.block_bytes), np.uint8)
        with pool.client.get(prefix, into=buffer) as blocks:
            assert len(blocks) == DRAM_BLOCKS
            assert_right(blocks, prefix)

    @pytest.mark.usefixtures("patient")
    def test_a_full_pool_says_so_at_the_deadline(self, pool: Pool) -> None:
        held = [pool.hold(one) for one in singles(DRAM_BLOCKS)]
        prefix = fresh_prefix(2)
        with within(0.2, "a put into a full pool"):
            result = pool.client.put(prefix, payloads_of(prefix), timeout_s=0.2)
        assert (result.stored, result.reason) == ((), "no_room")
        with pool.open_in_place() as writer:
            with within(0.2, "a reserve in a full pool"), pytest.raises(NoRoom, match="no room"):
                writer.reserve(prefix, timeout_s=0.2)
            with within(0, "a reserve that does not want to wait"), pytest.raises(NoRoom):
                writer.reserve(prefix, timeout_s=0)
        for blocks in held:
            blocks.release()

    @pytest.mark.parametrize("verb", ["put", "reserve"])
    def test_a_waiting_writer_goes_on_when_another_client_lets_go(
        self, pool: Pool, verb: str
    ) -> None:
        held = [pool.hold(one) for one in singles(DRAM_BLOCKS)]
        prefix, writer = fresh_prefix(1), pool.open("writer")

        def write() -> tuple[int, ...]:
            if verb == "put":
                stored: tuple[int, ...] = writer.put(
                    prefix, payloads_of(prefix), timeout_s=60
                ).stored
                return stored
            with writer.reserve(prefix, timeout_s=60) as slots:
                slots[0].view[:] = payload_of(prefix.keys[0])
            return tuple(slots.stored)

        waiting = Background(write)
        wait_until(lambda: pool.client.statistics()["waiting_requests"], "the writer waits")
        held.pop().release()
        with within(0, "a writer who has got room"):
            assert waiting.result() == (0,)
        for blocks in held:
            blocks.release()
        with pool.client.get(prefix) as blocks:
            assert_right(blocks, prefix)

    def test_readers_of_resident_blocks_do_not_wait_behind_writers(self, pool: Pool) -> None:
        stored = singles(DRAM_BLOCKS)
        held = [pool.hold(one) for one in stored]
        writer, more = pool.open("writer"), fresh_prefix(1)
        waiting = Background(lambda: writer.put(more, payloads_of(more), timeout_s=40))
        wait_until(lambda: pool.client.statistics()["waiting_requests"], "the writer waits")
        with within(0, "a hit"), pool.client.get(stored[0], timeout_s=30) as blocks:
            assert blocks.complete
        for blocks in held:
            blocks.release()
        assert waiting.result().complete


class TestNvme:
    def test_a_prompt_larger_than_dram_goes_on_in_nvme(self, deep_pool: Pool) -> None:
        pool = deep_pool
        prefix = fresh_prefix(DRAM_BLOCKS + 24)
        assert pool.client.put(prefix, payloads_of(prefix), timeout_s=30).complete
        hit = pool.client.match(prefix)
        assert hit.blocks == len(prefix)
        assert {str(tier) for tier in hit.tiers} == {"dram", "nvme"}
        buffer = np.zeros((len(prefix), SCHEMA.block_bytes), np.uint8)
        with pool.client.get(prefix, into=buffer, timeout_s=30) as blocks:
            assert blocks.complete
            assert_right(blocks, prefix)
        assert np.array_equal(buffer, np.stack(payloads_of(prefix)))

    def test_views_cover_what_fits_dram(self, deep_pool: Pool) -> None:
        pool = deep_pool
        prefix = fresh_prefix(DRAM_BLOCKS + 24)
        pool.client.put(prefix, payloads_of(prefix), timeout_s=30)
        with pool.client.get(prefix, timeout_s=30) as blocks:
            if pool.in_place:
                assert 0 < len(blocks) <= DRAM_BLOCKS
                assert blocks.reason == "no_room"
            else:  # copies, not views
                assert blocks.complete
            assert_right(blocks, prefix)

    def test_a_demoted_block_comes_back_with_its_bytes(self, deep_pool: Pool) -> None:
        pool = deep_pool
        stored = [pool.put(one) for one in singles(2 * DRAM_BLOCKS)]
        pool.quiet()
        assert [str(t) for t in pool.client.match(stored[0]).tiers] == ["nvme"]
        for one in stored:
            with pool.client.get(one) as blocks:
                assert blocks.complete
                assert_right(blocks, one)
        numbers = pool.quiet()
        assert numbers["counters"]["promotions"] >= DRAM_BLOCKS
        assert numbers["counters"]["demotions"] >= DRAM_BLOCKS

    @pytest.mark.parametrize("at", ["header", "payload"])
    def test_damage_on_disk_stops_there_whatever_the_reader_verifies(
        self, deep_pool: Pool, at: str
    ) -> None:
        pool = deep_pool
        stored = [pool.put(one) for one in singles(2 * DRAM_BLOCKS)]
        pool.quiet()
        victim = next(one for one in stored if str(pool.client.match(one).tiers[0]) == "nvme")
        flip_on_disk(pool, victim, SCHEMA.header_bytes + 9 if at == "payload" else 50)
        with pool.client.get(victim, verify="off") as blocks:
            assert (len(blocks), blocks.reason) == (0, "corrupt")
        assert pool.client.match(victim).blocks == 0
        assert pool.client.put(victim, payloads_of(victim)).complete
        with pool.client.get(victim) as blocks:
            assert_right(blocks, victim)

    def test_both_tiers_full_and_nobody_leased_still_takes_more(self, deep_pool: Pool) -> None:
        pool = deep_pool
        stored = [pool.put(one) for one in singles(DRAM_BLOCKS + NVME_BLOCKS + 10)]
        assert pool.client.match(stored[-1]).blocks == 1
        found = 0
        for one in stored:
            with pool.client.get(one) as blocks:
                assert_right(blocks, one)
                found += len(blocks)
        assert found >= NVME_BLOCKS


class TestStatistics:
    def test_statistics_have_the_documented_shape(self, pool: Pool) -> None:
        prefix = pool.put(fresh_prefix(3))
        with pool.client.get(prefix):
            numbers = pool.client.statistics()
        assert numbers["blocks"] >= 3
        assert {"node", "pid", "uptime_s", "policy", "tiers", "counters", "sessions"} <= {*numbers}
        dram = numbers["tiers"]["dram"]
        assert dram["capacity_bytes"] == DRAM_BLOCKS * EXTENT
        assert dram["committed_bytes"] == 3 * EXTENT
        assert dram["writable"]
        assert dram["healthy"]
        assert_conserved(numbers)
        mine = [s for s in numbers["sessions"] if s["name"] == "main"]
        assert len(mine) == 1
        held = (1, 3 * EXTENT) if pool.in_place else (0, 0)
        assert (mine[0]["read_leases"], mine[0]["held_bytes"]) == held

    def test_hits_and_misses_are_counted(self, pool: Pool) -> None:
        before = pool.client.statistics()["counters"]
        prefix = fresh_prefix(4)
        pool.put(prefix[:3])
        pool.client.get(prefix).release()
        after = pool.client.statistics()["counters"]
        assert after["commits"] - before["commits"] == 3
        assert after["dram_hits"] - before["dram_hits"] == 3
        assert after["misses"] - before["misses"] == 1


@pytest.mark.usefixtures("patient")
class TestDamage:
    """Damaged shared memory never leads to a wrong byte in a result."""

    @pytest.mark.parametrize("into", [False, True], ids=["view", "copy"])
    def test_a_flipped_bit_is_reported_missing_and_the_block_is_dropped(
        self, pool: Pool, into: bool
    ) -> None:
        prefix = pool.scatter(fresh_prefix(3))
        flip(pool, pool.payload_offset(prefix[1]) + 100)
        target = np.zeros(3 * SCHEMA.block_bytes, np.uint8) if into else None
        with pool.client.get(prefix, into=target) as blocks:
            assert [(m.index, m.reason) for m in blocks.missing] == [(1, "corrupt"), (2, "behind")]
            assert_right(blocks, prefix)
        assert pool.client.exists(prefix) == [True, False, True]
        assert pool.client.statistics()["counters"]["corrupt"] >= 1
        # Block 0, which the far node has, is stored at home too: home gets the whole prefix.
        assert pool.client.put(prefix, payloads_of(prefix)).stored[0] == 1
        with pool.client.get(prefix) as blocks:
            assert blocks.complete
            assert_right(blocks, prefix)

    def test_only_the_touched_layers_are_verified(self, pool: Pool) -> None:
        prefix = pool.scatter(fresh_prefix(1))
        flip(pool, pool.payload_offset(prefix) + SCHEMA.segments[1].offset)
        with pool.client.get(prefix, layers=0) as blocks:
            assert blocks.complete
        with pool.client.get(prefix, layers=1, heads=(1, 2)) as blocks:
            assert blocks.reason == "corrupt"

    def test_without_verification_the_payload_is_the_callers_risk(self, pool: Pool) -> None:
        prefix = pool.scatter(fresh_prefix(1))
        flip(pool, pool.payload_offset(prefix) + 7)
        with pool.client.get(prefix, verify="off") as blocks:
            assert blocks.complete
            assert not np.array_equal(blocks[0].bytes, payload_of(prefix.keys[0]))
        trusting = pool.open(verify="off")
        with trusting.get(prefix) as blocks:
            assert blocks.complete
        with trusting.get(prefix, verify="always") as blocks:
            assert blocks.reason == "corrupt"

    def test_sampling_finds_damage_sooner_or_later(self, pool: Pool) -> None:
        prefix = pool.scatter(fresh_prefix(1))
        flip(pool, pool.payload_offset(prefix))
        for _ in range(2000):
            with pool.client.get(prefix, verify="sampled") as blocks:
                if not blocks.complete:
                    break
        assert blocks.reason == "corrupt"

    # magic, key, parent, schema, namespace, generation, payload bytes, place, counts, version,
    # extent bytes, tokens
    @pytest.mark.parametrize("at", [0, 16, 32, 48, 64, 80, 88, 96, 104, 116, 120, 128 + 32])
    def test_damage_of_a_header_is_found_even_without_verification(
        self, pool: Pool, at: int
    ) -> None:
        prefix = pool.scatter(fresh_prefix(1))
        flip(pool, pool.payload_offset(prefix) - SCHEMA.header_bytes + at)
        with pool.client.get(prefix, verify="off") as blocks:
            assert (len(blocks), blocks.reason) == (0, "corrupt")
        assert pool.client.match(prefix).blocks == 0

    @pytest.mark.parametrize("at", [8, 128, 144])  # its own checksum, a segment's, a length
    def test_damage_of_the_rest_of_a_header_is_harmless(self, pool: Pool, at: int) -> None:
        prefix = pool.scatter(fresh_prefix(1))
        flip(pool, pool.payload_offset(prefix) - SCHEMA.header_bytes + at)
        with pool.client.get(prefix) as blocks:
            assert_right(blocks, prefix)

    def test_another_block_in_the_right_place_is_not_served(self, pool: Pool) -> None:
        one, two = pool.scatter(fresh_prefix(1)), pool.scatter(fresh_prefix(1))
        memory, size = pool.client.memory, SCHEMA.header_bytes + SCHEMA.block_bytes
        source = pool.payload_offset(one) - SCHEMA.header_bytes
        target = pool.payload_offset(two) - SCHEMA.header_bytes
        memory[target : target + size] = memory[source : source + size]
        with pool.client.get(two, verify="off") as blocks:
            assert blocks.reason == "corrupt"
        with pool.client.get(one) as blocks:
            assert_right(blocks, one)

    def test_a_colliding_key_is_told_by_its_tokens(self, pool: Pool) -> None:
        prefix = fresh_prefix(1)
        forged = SCHEMA.prefix(prefix.tokens, namespace=prefix.namespace)
        forged._chain.chunks[0] = bytes(len(forged._chain.chunks[0]))
        assert forged.keys == prefix.keys
        assert pool.client.put(forged, payloads_of(forged)).complete
        for verify in ("always", "sampled", "off"):
            with pool.client.get(prefix, verify=verify) as blocks:
                assert (len(blocks), blocks.reason) == (0, "corrupt")
        with pool.client.get(forged) as blocks:
            assert blocks.complete


class TestEndsAndLeases:
    def test_a_closed_client_says_so(self, pool: Pool) -> None:
        prefix = pool.put(fresh_prefix(1))
        client = pool.open()
        client.close()
        client.close()
        verbs: list[Callable[[], Any]] = [
            lambda: client.get(prefix),
            lambda: client.put(prefix, payloads_of(prefix)),
            lambda: client.reserve(prefix),
            lambda: client.match(prefix),
            lambda: client.exists(prefix),
            lambda: client.pin(prefix),
            lambda: client.unpin(prefix),
            lambda: client.remove(prefix),
            client.statistics,
        ]
        for verb in verbs:
            with pytest.raises(ClientClosed):
                verb()

    def test_what_a_client_held_can_be_let_go_after_it_closed(self, pool: Pool) -> None:
        prefix = pool.put(fresh_prefix(1))
        client = pool.open()
        blocks, slots = client.get(prefix), client.reserve(fresh_prefix(1))
        late = client.reserve(fresh_prefix(1))
        late[0].view[:] = 0
        client.close()
        blocks.release()
        slots.abort()
        with pytest.raises(ClientClosed):
            late.commit()

    @leasing_ways
    def test_leases_of_others_are_none_of_mine(self, pool: Pool) -> None:
        prefix, other = pool.put(fresh_prefix(1)), pool.open()
        blocks, slots = pool.client.get(prefix), pool.client.reserve(fresh_prefix(1))
        for request in (
            messages.Release(0, blocks._lease),
            messages.Release(0, slots._lease),
            messages.Commit(0, slots._lease),
            messages.Abort(0, slots._lease),
            messages.Commit(0, blocks._lease),
            messages.Release(0, 1 << 62),
            messages.Commit(0, 0),
        ):
            with pytest.raises(StaleLease):
                other.call(request)
        assert_right(blocks, prefix)
        blocks.release()
        slots.abort()

    @leasing_ways
    def test_a_lease_ends_once(self, pool: Pool) -> None:
        blocks = pool.client.get(pool.put(fresh_prefix(1)))
        lease = blocks._lease
        blocks.release()
        with pytest.raises(StaleLease):
            pool.client.call(messages.Release(0, lease))

    @in_place_ways
    def test_a_reservation_that_expired_cannot_be_committed(self, hasty_pool: Pool) -> None:
        pool, prefix, late = hasty_pool, fresh_prefix(1), hasty_pool.open("late")
        slots = late.reserve(prefix)
        wait_until(
            lambda: pool.client.statistics()["tiers"]["dram"]["quarantined_bytes"] == EXTENT,
            "the reservation expires",
        )
        # The other writer's reservation may expire as well if this process is stopped that long.
        wait_until(lambda: stored(pool, prefix), "another writer has stored it")
        slots[0].view[:] = 99  # the late writer writes on; its extent is in quarantine
        with pytest.raises(StaleLease, match="expired"):
            slots.commit()
        assert slots.stored == ()
        assert pool.quiet()["tiers"]["dram"]["quarantined_bytes"] == 0
        with pool.client.get(prefix) as blocks:
            assert blocks.complete
            assert_right(blocks, prefix)

    def test_one_client_may_be_used_from_several_threads(self, pool: Pool) -> None:
        mine = [singles(3) for _ in range(4)]

        def work(prefixes: list[Prefix]) -> int:
            for prefix in prefixes * 5:
                assert pool.client.put(prefix, payloads_of(prefix)).complete
                with pool.client.get(prefix) as blocks:
                    assert_right(blocks, prefix)
                pool.client.remove(prefix)
            return 1

        threads = [Background(lambda prefixes=prefixes: work(prefixes)) for prefixes in mine]
        assert sum(thread.result() for thread in threads) == 4

    def test_a_thread_that_waits_does_not_keep_another_from_releasing(self, pool: Pool) -> None:
        held = [pool.hold(one) for one in singles(DRAM_BLOCKS)]
        more = fresh_prefix(1)
        waiting = Background(lambda: pool.client.put(more, payloads_of(more), timeout_s=40))
        watcher = pool.open()
        wait_until(lambda: watcher.statistics()["waiting_requests"], "the writer waits")
        with within(0, "releasing while another thread of this client waits"):
            for blocks in held:
                blocks.release()
            assert waiting.result().complete

    def test_a_call_gives_up_in_time_though_another_thread_waits(self, pool: Pool) -> None:
        holder, watcher = pool.open_in_place("holder"), pool.open("watcher")
        held = [holder.get(pool.put(one)) for one in singles(DRAM_BLOCKS)]
        more = fresh_prefix(1)
        waiting = Background(lambda: pool.client.put(more, payloads_of(more), timeout_s=30))
        wait_until(lambda: watcher.statistics()["waiting_requests"], "the writer waits")
        with within(0.1, "a call of another thread"), contextlib.suppress(DeadlineExceeded):
            pool.client.match(fresh_prefix(1), timeout_s=0.1)
        for blocks in held:
            blocks.release()
        assert waiting.result(60).complete


class TestDeadlines:
    @daemon_ways
    def test_a_node_that_stopped_costs_the_deadline_and_no_more(self, pool: Pool) -> None:
        prefix, missing = pool.put(fresh_prefix(2)), fresh_prefix(1)
        watcher = pool.open("watcher")
        buffer = np.zeros(2 * SCHEMA.block_bytes, np.uint8)
        calls: list[Callable[[], Any]] = [
            lambda: pool.client.get(prefix, timeout_s=0.1),
            lambda: pool.client.get(prefix, into=buffer, timeout_s=0.1),
            lambda: pool.client.put(missing, payloads_of(missing), timeout_s=0.1),
            lambda: pool.client.reserve(missing, timeout_s=0.1),
            lambda: pool.client.match(prefix, timeout_s=0.1),
            lambda: pool.client.statistics(timeout_s=0.1),
        ]
        with pool.daemon.stopped():
            for call in calls:
                with within(0.1, "a call of a stopped node"), pytest.raises(DeadlineExceeded):
                    call()
        # Calls that the node grants now were given up. Replies are read with the next call.
        assert pool.client.match(prefix).blocks == 2
        wait_until(lambda: is_quiet(watcher.statistics()), "late leases are given back")
        with pool.client.get(prefix) as blocks:
            assert_right(blocks, prefix)
        assert pool.client.put(missing, payloads_of(missing)).complete

    @embedded_ways
    def test_a_promotion_that_began_late_does_not_outlast_the_deadline(
        self, deep_pool: Pool, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A reader waits for room, gets it shortly before its deadline, and the disk is slow."""
        pool, node = deep_pool, deep_pool.host
        assert isinstance(node, Node)
        assert node.nvme is not None
        stored = [pool.put(one) for one in singles(2 * DRAM_BLOCKS)]
        pool.quiet()
        demoted = [one for one in stored if str(pool.client.match(one).tiers[0]) == "nvme"]
        others = [one for one in stored if str(pool.client.match(one).tiers[0]) == "dram"]
        held = [pool.client.get(one) for one in others]
        held += [pool.client.get(one) for one in demoted[1 : 1 + DRAM_BLOCKS - len(others)]]
        disk, begun, read = threading.Event(), threading.Event(), node.nvme.read
        monkeypatch.setattr(node.nvme, "read", lambda *a: (begun.set(), disk.wait(30), read(*a)))
        reader = pool.open("reader")
        waiting = Background(lambda: reader.get(demoted[0], timeout_s=30.0))
        wait_until(lambda: pool.client.statistics()["waiting_requests"], "the reader waits")
        for blocks in held:
            blocks.release()
        assert begun.wait(30)
        skip_time(monkeypatch, 31.0)
        blocks = waiting.result()
        assert (len(blocks), blocks.reason) == (0, "deadline")
        disk.set()

    @embedded_ways
    def test_a_grant_that_came_too_late_is_given_back(
        self, pool: Pool, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        node = pool.host
        assert isinstance(node, Node)
        held = [pool.client.get(pool.put(one)) for one in singles(DRAM_BLOCKS)]
        client = pool.open("late")
        stop_time(monkeypatch)  # the node does not notice that the caller has given up
        waiting = Background(lambda: client.reserve(fresh_prefix(1), timeout_s=0.2))
        wait_until(lambda: pool.client.statistics()["waiting_requests"], "the writer waits")
        with node._lock:  # the node is busy for longer than the caller waits
            with pytest.raises(DeadlineExceeded):
                waiting.result()
            # While the lock is held, room is freed, so the late grant is made.
            for blocks in held:
                node.core.release(node.core.sessions[_session_of(node, "main")], blocks._lease)
        for blocks in held:
            blocks._lease = 0
            blocks.release()
        wait_until(lambda: is_quiet(pool.client.statistics()), "the late grant is given back")


def _session_of(node: Node, name: str) -> int:
    return next(s.id for s in node.core.sessions.values() if s.name == name)


class TestOpening:
    @daemon_ways
    def test_no_node_is_an_error_that_says_how_to_start_one(
        self, way: str, tmp_path: Path, loop_thread: Any
    ) -> None:
        url = f"unix:{tmp_path}/none.sock"
        with pytest.raises(NodeUnavailable, match="tiffin node --socket"):
            Client.open(url) if way == "sync-daemon" else loop_thread.run(AsyncClient.open(url))

    @daemon_ways
    def test_a_node_that_died_is_unavailable_to_every_call(
        self, way: str, own_daemon: Callable[..., Daemon], loop_thread: Any
    ) -> None:
        daemon = own_daemon()
        pool = Pool(way, daemon, PoolOptions(), loop_thread)
        prefix = pool.put(fresh_prefix(1))
        blocks = pool.client.get(prefix)
        daemon.kill()
        for why in ("lost the node|no node answers", "tiffin node --socket", "--socket"):
            with pytest.raises(NodeUnavailable, match=why):
                pool.client.match(prefix)
        assert_right(blocks, prefix)  # the memory is there as long as it is mapped
        blocks.release()
        pool.client.close()
        with pytest.raises(ClientClosed):
            pool.client.match(prefix)

    def test_an_embedded_node_opens_from_a_url_and_closes_with_its_client(
        self, tmp_path: Path
    ) -> None:
        prefix = fresh_prefix(2)
        url = f"embedded:?dram=1MiB&nvme={tmp_path}:1MiB&policy=lfu&prefault=no"
        with Client.open(url, name="mine") as client:
            assert client.put(prefix, payloads_of(prefix)).complete
            assert client.statistics()["policy"] == "lfu"
            with client.get(prefix) as blocks:
                assert_right(blocks, prefix)
        with Client.open(url) as client:  # the directory is unlocked again
            assert client.match(prefix).blocks in (0, 1, 2)

    def test_an_embedded_node_opens_in_asyncio(self, tmp_path: Path) -> None:
        async def use() -> None:
            prefix = fresh_prefix(2)
            async with AsyncClient.open(f"embedded:?dram=1MiB&nvme={tmp_path}:1MiB") as client:
                assert (await client.put(prefix, payloads_of(prefix))).complete
                async with client.get(prefix) as blocks:
                    assert_right(blocks, prefix)
                async with client.reserve(fresh_prefix(1)) as slots:
                    slots[0].view[:] = 0
                assert slots.stored == (0,)

        asyncio.run(use())

    def test_a_node_that_could_not_open_leaves_nothing_open(self, tmp_path: Path) -> None:
        with Client.open(f"embedded:?dram=1MiB&nvme={tmp_path}:1MiB"):
            before = open_descriptors()
            for _ in range(3):
                with pytest.raises(Exception, match="in use by another node"):
                    Client.open(f"embedded:?dram=1MiB&nvme={tmp_path}:1MiB")
            assert open_descriptors() <= before

    @pytest.mark.slow
    @daemon_ways
    def test_a_client_of_a_dead_node_leaves_nothing_open(
        self, way: str, own_daemon: Callable[..., Daemon], loop_thread: Any
    ) -> None:
        daemon = own_daemon()
        # A loop has its own descriptor, by which threads wake it.
        Pool(way, daemon, PoolOptions(), loop_thread).client.close()
        before = open_descriptors()
        pool = Pool(way, daemon, PoolOptions(), loop_thread)
        daemon.kill()
        with pytest.raises(NodeUnavailable):
            pool.client.statistics()
        pool.client.close()
        # A mapping's descriptor is closed with its last view, which a traceback may hold.
        wait_until(
            lambda: gc.collect() >= 0 and open_descriptors() <= before, "its descriptors are closed"
        )

    @pytest.mark.slow
    @daemon_ways
    def test_restarts_of_the_node_cost_a_client_no_descriptors(
        self,
        way: str,
        own_daemon: Callable[..., Daemon],
        loop_thread: Any,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        daemon = own_daemon()
        pool = Pool(way, daemon, PoolOptions(), loop_thread)
        monkeypatch.setattr(connections, "IDLE_S", 0.1)

        def restart() -> None:
            daemon.kill()
            daemon.start()
            with contextlib.suppress(NodeUnavailable):
                pool.client.match(fresh_prefix(1))
            pool.put(fresh_prefix(1))
            gc.collect()  # tracebacks hold views

        def open_after_a_call() -> int:
            pool.client.match(fresh_prefix(1))  # gives back a connection that nothing needs
            return open_descriptors()

        restart()
        before = open_after_a_call()
        for _ in range(3):
            restart()
        wait_until(lambda: open_after_a_call() <= before, f"as few as before: {before}")
        pool.client.close()

    def test_verify_is_one_of_three(self) -> None:
        with pytest.raises(InvalidInput, match="always, sampled, off"):
            Client.open("embedded:?dram=1MiB", verify="maybe")  # type: ignore[arg-type]


def open_descriptors() -> int:
    """Sockets, regions and files of this process."""
    return len(os.listdir("/proc/self/fd"))


# -- asyncio only ----------------------------------------------------------------------------------


@pytest.fixture
def node() -> Iterator[Node]:
    node = PoolOptions().start_node(Path())
    yield node
    node.check()
    node.close()


class TestCancellation:
    """A task that is cancelled holds nothing afterwards, at whatever step it was."""

    def test_while_it_waits_for_room(self, node: Node) -> None:
        async def use() -> dict[str, Any]:
            client = await AsyncClient.attach(node)
            held = await self._fill(client, singles(DRAM_BLOCKS))
            task = asyncio.ensure_future(_await(client.reserve(fresh_prefix(1), timeout_s=30)))
            await asyncio.sleep(0.05)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            for blocks in held:
                blocks.release()
            numbers = await self._at_rest(client)
            await client.close()
            return numbers

        assert is_quiet(asyncio.run(use()))

    def test_in_the_moment_its_answer_arrives(
        self, node: Node, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        async def use() -> dict[str, Any]:
            client = await AsyncClient.attach(node)
            prefix = fresh_prefix(1)
            await client.put(prefix, payloads_of(prefix))
            settle = loop_threads.settle

            def settle_and_cancel(future: asyncio.Future[Any], outcome: Any) -> None:
                settle(future, outcome)
                task.cancel()

            monkeypatch.setattr(loop_threads, "settle", settle_and_cancel)
            task = asyncio.ensure_future(_await(client.get(prefix)))
            with pytest.raises(asyncio.CancelledError):
                await task
            monkeypatch.undo()
            numbers = await self._at_rest(client)
            await client.close()
            return numbers

        assert is_quiet(asyncio.run(use()))

    async def _fill(self, client: AsyncClient, prefixes: Sequence[Prefix]) -> list[Any]:
        for one in prefixes:
            await client.put(one, payloads_of(one))
        return [await client.get(one) for one in prefixes]

    async def _at_rest(self, client: AsyncClient) -> dict[str, Any]:
        deadline = asyncio.get_running_loop().time() + SLACK_S
        while not is_quiet(numbers := await client.statistics()):
            if asyncio.get_running_loop().time() > deadline:
                break
            await asyncio.sleep(0.005)
        return numbers


async def _await(opening: Any) -> Any:
    return await opening
