"""One block written by several tensor-parallel ranks, and read by ranks of another degree.

Contents are derived from keys, so every test knows which bytes are right in every head of every
layer, whichever rank wrote them.
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import shardworker
from kvsupport import (
    Worker,
    assert_conserved,
    assert_right,
    fresh_prefix,
    is_quiet,
    payload_of,
    payloads_of,
    skip_time,
    wait_until,
)
from shardworker import SHARDED

from tiffin.kvstore import AsyncClient, Client, KVSchema
from tiffin.kvstore.client.blocks.block_views import select, select_shard
from tiffin.kvstore.client.blocks.selection_copy import slice_schema
from tiffin.kvstore.client.pool.remote.block_read import ArrivedSegments
from tiffin.kvstore.client.pool.remote.peer import Peer
from tiffin.kvstore.client.pool.replica_choice import shard_node
from tiffin.kvstore.client.verbs.block_verbs import Access, reserve_request
from tiffin.kvstore.credentials import Credentials
from tiffin.kvstore.errors import InvalidInput, NoRoom, SchemaError, StaleLease
from tiffin.kvstore.format.header_writer import shard_blocks_max
from tiffin.kvstore.format.schema import LayerSpec
from tiffin.kvstore.node.core import messages
from tiffin.kvstore.node.core.node_core import CoreOptions
from tiffin.kvstore.node.node import Node, NodeOptions
from tiffin.kvstore.node.server.tcp_server import RemoteService
from tiffin.messenger.wire.framing import FRAME_BYTES_MAX

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from tiffin.kvstore.format.keys import Prefix

WHOLE = KVSchema.gqa(
    model="sharded", layers=3, kv_heads=8, head_dim=16, dtype="float16", block_tokens=16
)
# Two layers that eight ranks split, one whose heads they can't, and two without heads.
MIXED = KVSchema.of(
    "mixed",
    [
        LayerSpec.gqa(kv_heads=8, head_dim=8, dtype="float16"),
        LayerSpec.mla(latent_dim=24, dtype="float16"),
        LayerSpec.window(kv_heads=16, head_dim=4, dtype="float16", window_tokens=8),
        LayerSpec.gqa(kv_heads=2, head_dim=8, dtype="float16"),
        LayerSpec.state(nbytes=40),
    ],
    block_tokens=16,
    shards=8,
)
BLOCKS = 16


@pytest.fixture
def node() -> Iterator[Node]:
    core = CoreOptions(write_lease_s=60.0)
    node = Node(NodeOptions(BLOCKS * SHARDED.extent_bytes, prefault=False, core=core))
    yield node
    node.check()
    numbers = node.statistics()
    assert_conserved(numbers)
    assert numbers["tiers"]["dram"]["reserved_bytes"] == 0
    assert numbers["tiers"]["dram"]["quarantined_bytes"] == 0
    node.close()


@pytest.fixture
def client(node: Node) -> Iterator[Client]:
    with Client.attach(node) as client:
        yield client


@pytest.fixture
def far(node: Node) -> Iterator[Client]:
    """A client of the same node over the network."""
    service = RemoteService(node, ("127.0.0.1", 0))
    try:
        with Client.open(f"tiffin://127.0.0.1:{service.address[1]}") as client:
            yield client
    finally:
        service.close()


@pytest.fixture(params=["local", "remote"])
def any_client(request: pytest.FixtureRequest) -> Client:
    client: Client = request.getfixturevalue({"local": "client", "remote": "far"}[request.param])
    return client


def slices_of(prefix: Prefix, shard: tuple[int, int]) -> list[np.ndarray]:
    """One rank's packed slices of the right payloads."""
    runs = select_shard(prefix.schema, shard).ranges
    return [np.concatenate([p[r.offset : r.end] for r in runs]) for p in payloads_of(prefix)]


def write(client: Client, prefix: Prefix, ranks: int) -> None:
    for rank in range(ranks):
        client.put(prefix, slices_of(prefix, (rank, ranks)), shard=(rank, ranks))
    assert client.match(prefix).blocks == len(prefix)


# -- the schema ------------------------------------------------------------------------------------


def test_segments_tile_the_payload_and_each_is_one_group_of_heads_of_one_part() -> None:
    assert len(SHARDED.segments) == 3 * 2 * 8
    assert sum(segment.length for segment in SHARDED.segments) == SHARDED.block_bytes
    assert SHARDED.segment_bytes.tolist() == [s.length for s in SHARDED.segments]
    for layer in range(3):
        indices = SHARDED.layer_segments(layer)
        expected = [
            SHARDED.range(layer, part, (head, head + 1)) for part in "kv" for head in range(8)
        ]
        assert [SHARDED.segments[i] for i in indices] == expected
        assert {SHARDED.layer_of(i) for i in indices} == {layer}


def test_the_payload_is_the_same_with_and_without_shards() -> None:
    assert SHARDED.block_bytes == WHOLE.block_bytes
    assert SHARDED.range(1, "v", (2, 5)) == WHOLE.range(1, "v", (2, 5))
    assert SHARDED.ranges(layers=(0, 2), heads=(1, 3)) == WHOLE.ranges(layers=(0, 2), heads=(1, 3))


def test_shards_are_part_of_the_fingerprint_and_one_shard_changes_nothing() -> None:
    one = KVSchema.gqa(
        model="sharded",
        layers=3,
        kv_heads=8,
        head_dim=16,
        dtype="float16",
        block_tokens=16,
        shards=1,
    )
    assert one == WHOLE
    assert one.fingerprint == WHOLE.fingerprint
    assert one.segments == one.spans
    assert SHARDED != WHOLE
    assert SHARDED.fingerprint != WHOLE.fingerprint
    assert SHARDED.canonical_bytes() == WHOLE.canonical_bytes()[:-1] + b",8]"


def test_layers_that_ranks_cannot_split_are_one_segment_which_rank_0_writes() -> None:
    assert [MIXED.splits(layer) for layer in range(5)] == [True, False, True, False, False]
    counts = [len(MIXED.layer_segments(layer)) for layer in range(5)]
    assert counts == [16, 1, 16, 1, 1]
    assert [len(MIXED.shard_segments(layer, (0, 4))) for layer in range(5)] == [4, 1, 4, 1, 1]
    assert [len(MIXED.shard_segments(layer, (3, 4))) for layer in range(5)] == [4, 0, 4, 0, 0]


@pytest.mark.parametrize("schema", [SHARDED, MIXED])
@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_the_ranks_slices_make_up_the_block(schema: KVSchema, ranks: int) -> None:
    count = np.zeros(schema.block_bytes, np.uint8)
    segments: list[int] = []
    for rank in range(ranks):
        chosen = select_shard(schema, (rank, ranks))
        assert chosen.aligned
        assert chosen.nbytes == slice_schema(schema, (rank, ranks)).block_bytes
        segments += chosen.segments.tolist()
        for run in chosen.ranges:
            count[run.offset : run.end] += 1
    assert (count == 1).all()
    assert sorted(segments) == list(range(len(schema.segments)))


@pytest.mark.parametrize(("shards", "match"), [(3, "divides the heads of no"), (0, "shards is 0")])
def test_shards_that_split_nothing_are_a_schema_error(shards: int, match: str) -> None:
    with pytest.raises(SchemaError, match=match):
        KVSchema.gqa(model="m", layers=1, kv_heads=8, head_dim=8, dtype="int8", shards=shards)


def test_more_segments_than_a_header_holds_are_a_schema_error() -> None:
    with pytest.raises(SchemaError, match="make 4160 segments"):
        KVSchema.gqa(model="m", layers=65, kv_heads=32, head_dim=8, dtype="int8", shards=32)


@pytest.mark.parametrize(
    ("shard", "match"),
    [
        ((0, 3), "with shards=3, or a multiple"),
        ((0, 16), "with shards=16"),
        ((2, 2), "rank is 2"),
        ((-1, 2), "rank is -1"),
        ((0, 0), "ranks is 0"),
        ((0.0, 2), "rank is an int"),
        ((0, 1, 2), "shard is"),
        (1, "shard is"),
    ],
)
def test_a_shard_that_cannot_be_is_a_schema_error(client: Client, shard: Any, match: str) -> None:
    prefix = fresh_prefix(1, SHARDED)
    with pytest.raises(SchemaError, match=match):
        client.put(prefix, payloads_of(prefix), shard=shard)
    with pytest.raises(SchemaError, match=match):
        client.reserve(prefix, shard=shard)


# -- selections ------------------------------------------------------------------------------------


@pytest.mark.parametrize("layers", [None, 1, (0, 2)])
@pytest.mark.parametrize("heads", [None, (0, 8), (2, 4), (3, 4), (0, 5)])
@pytest.mark.parametrize("schema", [SHARDED, WHOLE])
def test_a_selection_knows_which_segments_it_touches(
    schema: KVSchema, layers: Any, heads: Any
) -> None:
    chosen = select(schema, layers, heads)
    touched = [
        index
        for index, segment in enumerate(schema.segments)
        if any(r.offset < segment.end and segment.offset < r.end for r in chosen.ranges)
    ]
    assert chosen.segments.tolist() == touched
    assert chosen.aligned == (chosen.spans_bytes == chosen.nbytes)
    assert chosen.aligned or schema is WHOLE, "every head is a segment of its own"
    pieces = [(piece.offset, piece.length) for piece in chosen.pieces]
    assert sum(length for _, length in pieces) == chosen.spans_bytes
    assert sum(len(piece.spans) for piece in chosen.pieces) == len(touched)
    whole = np.arange(schema.block_bytes)
    packed = np.concatenate([whole[o : o + n] for o, n in pieces])
    cut = np.concatenate([packed[o : o + n] for o, n in chosen.cuts()])
    assert np.array_equal(cut, np.concatenate([whole[r.offset : r.end] for r in chosen.ranges]))


def test_two_heads_of_a_group_of_four_are_not_aligned() -> None:
    coarse = KVSchema.gqa(
        model="m", layers=2, kv_heads=8, head_dim=16, dtype="int8", block_tokens=16, shards=2
    )
    assert select(coarse, heads=(4, 8)).aligned
    chosen = select(coarse, heads=(4, 6))
    assert not chosen.aligned
    assert chosen.spans_bytes == 2 * chosen.nbytes


# -- writing ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("ranks", [2, 4, 8])
@pytest.mark.parametrize("schema", [SHARDED, MIXED])
@pytest.mark.parametrize("kind", ["slices", "whole blocks"])
def test_the_last_rank_makes_the_blocks_visible(
    any_client: Client, schema: KVSchema, ranks: int, kind: str
) -> None:
    prefix = fresh_prefix(3, schema)
    for rank in reversed(range(ranks)):
        shard = (rank, ranks)
        payloads = slices_of(prefix, shard) if kind == "slices" else payloads_of(prefix)
        assert any_client.match(prefix).blocks == 0
        result = any_client.put(prefix, payloads, shard=shard)
        assert (result.stored if rank == 0 else result.pending) == (0, 1, 2)
        assert result.complete == (rank == 0)
    with any_client.get(prefix, verify="always") as blocks:
        assert blocks.complete
        assert_right(blocks, prefix)
    assert any_client.put(prefix, payloads_of(prefix), shard=(0, ranks)).resident == (0, 1, 2)


def test_a_ranks_slice_may_come_as_typed_arrays_of_its_own_heads(client: Client) -> None:
    prefix = fresh_prefix(1, SHARDED)
    heads = np.frombuffer(payload_of(prefix.keys[0], SHARDED), np.float16).reshape(3, 2, 8, 16, 16)
    for rank in range(4):
        own = np.ascontiguousarray(heads[:, :, 2 * rank : 2 * rank + 2])
        client.put(prefix, [own], shard=(rank, 4))
    with client.get(prefix) as blocks:
        assert_right(blocks, prefix)


@pytest.mark.parametrize("size", [0, 100, SHARDED.block_bytes // 2 + 1])
def test_a_slice_of_another_size_is_refused_before_anything_is_reserved(
    any_client: Client, size: int
) -> None:
    with pytest.raises(SchemaError, match="payload 0 has"):
        any_client.put(fresh_prefix(1, SHARDED), [np.zeros(size, np.uint8)], shard=(0, 2))
    with pytest.raises(InvalidInput):
        any_client.put(fresh_prefix(1, SHARDED), [], shard=(0, 2))


def test_ranks_write_their_heads_in_place(any_client: Client) -> None:
    prefix = fresh_prefix(2, MIXED)
    wrote = []
    for rank in range(4):
        slots = any_client.reserve(prefix, shard=(rank, 4))
        for slot in slots:
            right = payload_of(prefix.keys[slot.index], MIXED)
            for layer in slot.selection.layers:
                for part in MIXED.layers[layer].parts:
                    where = slot.selection.where(layer, part.name)
                    target = slot.layer(layer).part(part.name)
                    wanted = right[where.offset : where.end].view(target.dtype)
                    target[:] = wanted.reshape(target.shape)
        slots.commit()
        wrote.append((slots.stored, slots.pending))
    assert wrote == [((), (0, 1))] * 3 + [((0, 1), ())]
    with any_client.get(prefix) as blocks:
        assert_right(blocks, prefix)


def test_a_rank_has_only_its_own_heads(client: Client) -> None:
    prefix = fresh_prefix(1, MIXED)
    with contextlib.ExitStack() as stack:
        first = client.reserve(prefix, shard=(0, 4))
        stack.callback(first.abort)
        second = client.reserve(prefix, shard=(1, 4))
        stack.callback(second.abort)
        assert first[0].layer(0).k.shape == (2, 16, 8)
        assert second[0].layer(2).v.shape == (4, 8, 4)
        assert first[0].layer(1).latent.shape == (1, 16, 24)
        with pytest.raises(SchemaError, match="rank 0 writes it"):
            second[0].layer(1)
        assert not np.shares_memory(first[0].layer(0).k, second[0].layer(0).k)
        assert np.shares_memory(first[0].view, second[0].view)


def test_the_asyncio_client_writes_ranks_side_by_side(node: Node) -> None:
    prefix = fresh_prefix(3, SHARDED)

    async def run() -> None:
        async with await AsyncClient.attach(node) as client:
            results = await asyncio.gather(
                *(client.put(prefix, slices_of(prefix, (r, 4)), shard=(r, 4)) for r in range(4))
            )
            assert sorted(len(result.stored) for result in results) == [0, 0, 0, 3]
            other = fresh_prefix(1, SHARDED)
            for rank in range(2):
                async with client.reserve(other, shard=(rank, 2)) as slots:
                    slots[0].view[:] = payload_of(other.keys[0], SHARDED)
            assert slots.stored == (0,)
            async with client.get(prefix) as blocks:
                assert_right(blocks, prefix)

    asyncio.run(run())


def test_a_rank_that_skips_a_block_takes_only_that_one_from_the_others(client: Client) -> None:
    prefix = fresh_prefix(2, SHARDED)
    slots = client.reserve(prefix, shard=(0, 2))
    for slot in slots:
        slot.view[:] = payload_of(prefix.keys[slot.index], SHARDED)
    slots[1].skip()
    slots.commit()
    assert slots.pending == (0,)
    result = client.put(prefix, payloads_of(prefix), shard=(1, 2))
    # The second block was cancelled, so this rank has begun it anew, and lacks the other rank.
    assert (result.stored, result.pending) == ((0,), (1,))
    assert client.put(prefix[1:], payloads_of(prefix)[1:], shard=(0, 2)).stored == (0,)
    with client.get(prefix) as blocks:
        assert_right(blocks, prefix)


def test_a_rank_that_aborts_has_the_others_blocks_refused(any_client: Client, node: Node) -> None:
    prefix = fresh_prefix(2, SHARDED)
    with Client.attach(node, name="other") as other:
        theirs = other.reserve(prefix, shard=(0, 2))
        mine = other.reserve(prefix, shard=(1, 2))
        mine.abort()
        for slot in theirs:
            slot.view[:] = payload_of(prefix.keys[slot.index], SHARDED)
        theirs.commit()
        assert theirs.stored == theirs.pending == ()
    assert any_client.match(prefix).blocks == 0
    write(any_client, prefix, 2)


def test_other_parties_are_busy_to_each_other(any_client: Client, node: Node) -> None:
    prefix = fresh_prefix(1, SHARDED)
    with Client.attach(node, name="other") as other:
        slots = other.reserve(prefix, shard=(0, 2))
        for shard in [(1, 4), (0, 2), None]:
            assert any_client.put(prefix, payloads_of(prefix), shard=shard).busy == (0,)
        slots.abort()
        whole = other.reserve(prefix)
        assert any_client.put(prefix, payloads_of(prefix), shard=(0, 2)).busy == (0,)
        whole.abort()


def test_a_rank_that_writes_anothers_part_is_not_believed(node: Node, client: Client) -> None:
    prefix = fresh_prefix(1, SHARDED)
    session = node.connect("liar", 1)
    replies: list[Any] = []
    size = SHARDED.extent_bytes
    for rank, owned in enumerate([b"\xff" * 6, b"\1" + bytes(5)]):
        request = messages.Reserve(1, prefix.key_bytes, prefix.parent, 0, size, 0.0, rank, 2, owned)
        node.submit(session, request, replies.append)
    assert replies[0].lease
    assert (replies[1].error, node.core.sessions[session.id]) == ("InvalidInput", session)
    for headers in ([], [b""] * 2):
        commit = messages.Commit(2, replies[0].lease, [], headers)
        node.submit(session, commit, replies.append)
        assert replies[-1].error == "InvalidInput"
    node.submit(session, messages.Commit(3, replies[0].lease, [], [b"junk"]), replies.append)
    assert replies[-1].flags == b"\0"
    node.disconnect(session, fenced=True)
    write(client, prefix, 2)


def test_a_rank_that_skips_every_block_gives_them_all_back(any_client: Client) -> None:
    prefix = fresh_prefix(2, SHARDED)
    slots = any_client.reserve(prefix, shard=(0, 2))
    for slot in slots:
        slot.skip()
    slots.commit()
    assert slots.stored == slots.pending == ()
    write(any_client, prefix, 2)


def test_a_waiting_rank_that_turns_out_to_be_wrong_is_refused_alone(
    node: Node, client: Client
) -> None:
    """Its claim is checked when there is room for it, in another client's call."""
    held = client.reserve(fresh_prefix(BLOCKS, SHARDED))
    prefix = fresh_prefix(1, SHARDED)
    session = node.connect("two ranks", 1)
    replies: dict[int, Any] = {}
    for number, owned in ((1, b"\1"), (2, b"\1")):
        request = messages.Reserve(
            number,
            prefix.key_bytes,
            prefix.parent,
            0,
            SHARDED.extent_bytes,
            30.0,
            number - 1,
            2,
            owned,
        )
        node.submit(session, request, lambda reply: replies.update({reply.id: reply}))
    assert not replies, "there was room, so nobody waits"
    held.abort()
    wait_until(lambda: len(replies) == 2, "both are answered")
    assert replies[1].lease
    assert replies[2].error == "InvalidInput"
    assert client.match(prefix).blocks == 0, "the node answers no more"
    node.disconnect(session, fenced=True)


def test_a_remote_rank_whose_connection_breaks_takes_the_block_with_it(
    node: Node, client: Client
) -> None:
    prefix = fresh_prefix(1, SHARDED)
    service = RemoteService(node, ("127.0.0.1", 0))
    try:
        peer = Peer(service.address, Credentials())
        request = reserve_request(prefix, select_shard(SHARDED, (0, 2)), 30.0)
        assert peer.call(request, 30.0).lease
        slots = client.reserve(prefix, shard=(1, 2))
        peer.close()
        wait_until(lambda: not node.core.residency.shared, "the node notices")
        slots[0].view[:] = payload_of(prefix.keys[0], SHARDED)
        slots.commit()
        assert slots.stored == slots.pending == ()
        write(client, prefix, 2)
    finally:
        service.close()


def test_ranks_of_a_pool_write_at_home_and_from_afar_to_one_node(
    node: Node, client: Client
) -> None:
    """Two ranks on the node's host, and two on another host that name the node by its number."""
    service = RemoteService(node, ("127.0.0.1", 0))
    url = f"tiffin://127.0.0.1:{service.address[1]}"
    prefix = fresh_prefix(2, SHARDED)
    try:
        with Client.open(url) as far:
            outcomes = [
                one.put(prefix, slices_of(prefix, (rank, 4)), shard=(rank, 4))
                for rank, one in enumerate([client, far, client, far])
            ]
        assert [result.pending for result in outcomes] == [(0, 1)] * 3 + [()]
        assert outcomes[3].stored == (0, 1)
        with client.get(prefix) as blocks:
            assert_right(blocks, prefix)
    finally:
        service.close()


def test_the_asyncio_client_of_a_pool_writes_ranks_too(node: Node) -> None:
    service = RemoteService(node, ("127.0.0.1", 0))
    prefix, other = fresh_prefix(2, SHARDED), fresh_prefix(1, SHARDED)

    async def run() -> None:
        url = f"tiffin://127.0.0.1:{service.address[1]}"
        async with AsyncClient.open(url) as client:
            results = await asyncio.gather(
                *(client.put(prefix, slices_of(prefix, (r, 4)), shard=(r, 4)) for r in range(4))
            )
            assert sorted(len(result.stored) for result in results) == [0, 0, 0, 2]
            for rank in range(2):
                async with client.reserve(other, shard=(rank, 2)) as slots:
                    slots[0].view[:] = payload_of(other.keys[0], SHARDED)
                assert (slots.stored, slots.pending) == (((), (0,)) if rank == 0 else ((0,), ()))
            async with client.get(prefix) as blocks:
                assert_right(blocks, prefix)

    try:
        asyncio.run(run())
    finally:
        service.close()


def test_the_headers_of_one_commit_fit_one_frame(client: Client) -> None:
    most = shard_blocks_max(SHARDED)
    used = SHARDED.header.used_bytes
    headers = [bytes(used)] * most
    body = messages.encoder.encode(messages.Commit(1 << 62, 1 << 62, [], headers))
    assert len(body) <= FRAME_BYTES_MAX
    tokens = np.zeros((most + 1) * SHARDED.block_tokens, np.uint32)
    with pytest.raises(InvalidInput, match="reserve slices of the prefix"):
        client.reserve(SHARDED.prefix(tokens), shard=(0, 2))


def test_no_room_for_a_rank_is_what_it_is_for_everybody(client: Client) -> None:
    held = fresh_prefix(BLOCKS, SHARDED)
    slots = client.reserve(held)
    with pytest.raises(NoRoom):
        client.reserve(fresh_prefix(1, SHARDED), shard=(0, 2), timeout_s=0)
    slots.abort()


# -- reading ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(("writers", "readers"), [(2, 4), (4, 1), (1, 8), (8, 2)])
@pytest.mark.parametrize("copies", [False, True])
def test_readers_of_another_degree_read_their_own_heads(
    any_client: Client, writers: int, readers: int, copies: bool
) -> None:
    prefix = fresh_prefix(2, SHARDED)
    write(any_client, prefix, writers)
    for reader in range(readers):
        heads = (reader * 8 // readers, (reader + 1) * 8 // readers)
        chosen = select(SHARDED, heads=heads)
        into = np.zeros((2, chosen.nbytes), np.uint8) if copies else None
        with any_client.get(prefix, into=into, heads=heads, verify="always") as blocks:
            assert blocks.complete
            for block, key in zip(blocks, prefix.keys, strict=True):
                right = payload_of(key, SHARDED)
                wanted = np.concatenate([right[r.offset : r.end] for r in chosen.ranges])
                assert np.array_equal(block.bytes, wanted)
                k = block.layer(2).k
                where = SHARDED.range(2, "k", heads)
                assert k.shape == (heads[1] - heads[0], 16, 16)
                assert np.array_equal(k.reshape(-1).view(np.uint8), right[where.offset : where.end])


def test_a_slice_is_verified_by_moving_nothing_but_the_slice(node: Node, far: Client) -> None:
    """Over the network, with `verify="always"`, only the heads and the headers arrive."""
    moved: dict[str, int] = {}
    for name, schema in (("sharded", SHARDED), ("whole", WHOLE)):
        prefix = fresh_prefix(2, schema)
        with Client.attach(node) as near:
            near.put(prefix, payloads_of(prefix))
        chosen = select(schema, heads=(2, 4))
        into = np.zeros((2, chosen.nbytes), np.uint8)
        before = far.statistics()["links"]
        with far.get(prefix, into=into, heads=(2, 4), verify="always") as blocks:
            assert blocks.complete
        after = far.statistics()["links"]
        moved[name] = total(after) - total(before) - 2 * schema.header_bytes
    assert moved["sharded"] == 2 * SHARDED.block_bytes // 4
    assert moved["whole"] == 2 * WHOLE.block_bytes, "a whole segment is needed for its checksum"


def total(links: dict[str, Any]) -> int:
    return sum(int(link["bytes"]) for link in links.values())


def test_what_is_planned_for_a_slice_is_the_slice() -> None:
    prefix = fresh_prefix(3, SHARDED)
    chosen = select(SHARDED, heads=(0, 2))
    targets = [np.zeros(chosen.nbytes, np.uint8) for _ in prefix.keys]
    arrivals = ArrivedSegments(
        prefix,
        chosen,
        Access("always", None),  # type: ignore[arg-type]
        targets,
    )
    payload = sum(r.length for r in arrivals.ranges) - 3 * SHARDED.header_bytes
    assert payload == 3 * SHARDED.block_bytes // 4
    assert len(arrivals.ranges) == 3 * (1 + 2 * 3), "neighbouring segments are one range"


@pytest.mark.parametrize("head", [0, 7])
def test_damage_in_a_slice_is_found_and_damage_beside_it_is_not_looked_at(
    node: Node, any_client: Client, head: int
) -> None:
    prefix = fresh_prefix(1, SHARDED)
    write(any_client, prefix, 4)
    replica = node.core.index[prefix.keys[0]].dram
    assert replica is not None
    where = SHARDED.range(1, "v", (head, head + 1))
    node.dram.region.array[replica.offset + SHARDED.header_bytes + where.offset + 3] ^= 1
    into = np.zeros((1, SHARDED.block_bytes // 4), np.uint8)
    with any_client.get(prefix, into=into, heads=(2, 4), verify="always") as blocks:
        assert blocks.complete, "another rank's damage was looked at"
    mine = (0, 2) if head == 0 else (6, 8)
    with any_client.get(prefix, into=into, heads=mine, verify="always") as blocks:
        assert blocks.reason == "corrupt"


def test_sharded_blocks_go_to_nvme_and_come_back(tmp_path: Path) -> None:
    """The mover knows no schema: it verifies segments by their lengths in the united header."""
    options = NodeOptions(
        4 * SHARDED.extent_bytes, tmp_path, 16 * SHARDED.extent_bytes, prefault=False
    )
    node = Node(options)
    prefixes = [fresh_prefix(2, SHARDED) for _ in range(4)]
    with Client.attach(node) as client:
        for prefix in prefixes:
            write(client, prefix, 4)
        for prefix in prefixes:
            with client.get(prefix) as blocks:
                assert blocks.complete
                assert_right(blocks, prefix)
        wait_until(lambda: is_quiet(client.statistics()), "the node comes to rest")
        assert client.statistics()["counters"]["corrupt"] == 0
    node.close()


# -- a pool ----------------------------------------------------------------------------------------


class Record:
    def __init__(self, address: str, draining: bool = False) -> None:
        self.address, self.draining = address, draining


def test_ranks_agree_on_a_node_without_talking() -> None:
    nodes: dict[int, Any] = {n: Record(f"10.0.0.{n}:7700") for n in range(1, 9)}
    prefixes = [fresh_prefix(1, SHARDED) for _ in range(64)]
    chosen = [shard_node(nodes, prefix) for prefix in prefixes]
    assert len(set(chosen)) > 4, "all prefixes went to few nodes"
    renumbered = {9 - n: record for n, record in nodes.items()}
    assert [9 - shard_node(renumbered, prefix) for prefix in prefixes] == chosen
    without = {n: record for n, record in nodes.items() if n != 3}
    moved = [
        a != b for a, b in zip(chosen, [shard_node(without, p) for p in prefixes], strict=True)
    ]
    assert moved == [n == 3 for n in chosen], "a node that left moved others' prefixes"
    nodes[chosen[0]].draining = True
    assert shard_node(nodes, prefixes[0]) != chosen[0]
    with pytest.raises(NoRoom):
        shard_node({1: Record("a:1", draining=True)}, prefixes[0])  # type: ignore[dict-item]


def test_a_slice_is_put_once_and_where_it_is_told(far: Client) -> None:
    prefix = fresh_prefix(1, SHARDED)
    with pytest.raises(InvalidInput, match="put once"):
        far.put(prefix, payloads_of(prefix), shard=(0, 2), replicas=2)  # type: ignore[call-arg]
    for rank in range(2):
        result = far.put(prefix, payloads_of(prefix), shard=(rank, 2), node=1)  # type: ignore[call-arg]
    assert result.stored == (0,)


# -- processes -------------------------------------------------------------------------------------


@pytest.fixture
def party(
    own_daemon: Callable[..., Any], commands_folder: Path
) -> Iterator[tuple[Any, list[Worker]]]:
    """A daemon, and four ranks that have written half of three blocks each."""
    daemon = own_daemon(dram=BLOCKS * SHARDED.extent_bytes)
    with contextlib.ExitStack() as stack:
        ranks = []
        for rank in range(4):
            worker = Worker("shardworker.py", commands_folder, daemon.url, "party", 3, rank, 4)
            ranks.append(stack.enter_context(worker))
        assert [rank.says() for rank in ranks] == ["ready"] * 4
        yield daemon, ranks


@pytest.mark.slow
def test_four_processes_write_one_block_each_its_own_part(party: tuple[Any, list[Worker]]) -> None:
    daemon, ranks = party
    prefix = shardworker.prefix_of("party", 3)
    with Client.open(daemon.url) as client:
        used = client.statistics()["tiers"]["dram"]
        assert used["reserved_bytes"] == 3 * SHARDED.extent_bytes, "not one extent for all ranks"
        assert [rank.ask("go") for rank in ranks] == ["pending"] * 3 + ["stored"]
        with client.get(prefix, verify="always") as blocks:
            assert blocks.complete
            assert_right(blocks, prefix)


@pytest.mark.slow
@pytest.mark.parametrize("committed", [0, 2])
def test_a_rank_that_is_killed_takes_the_blocks_with_it_and_leaves_nothing(
    party: tuple[Any, list[Worker]], committed: int
) -> None:
    daemon, ranks = party
    prefix = shardworker.prefix_of("party", 3)
    with Client.open(daemon.url) as client:
        assert [ranks[i].ask("go") for i in range(committed)] == ["pending"] * committed
        ranks[3].kill()

        def cancelled() -> bool:
            return bool(client.statistics()["tiers"]["dram"]["reserved_bytes"] == 0)

        wait_until(cancelled, "the node notices")
        held = client.statistics()["tiers"]["dram"]["quarantined_bytes"]
        assert held == 3 * SHARDED.extent_bytes, "memory that a live rank may write to was freed"
        assert client.match(prefix).blocks == 0
        assert [rank.ask("go") for rank in ranks[committed:3]] == ["refused"] * (3 - committed)
        wait_until(lambda: is_quiet(client.statistics()), "all is free")
        free = client.statistics()["tiers"]["dram"]
        assert free["free_bytes"] == free["capacity_bytes"]
        write(client, prefix, 4)
        with client.get(prefix) as blocks:
            assert_right(blocks, prefix)


def test_a_rank_that_is_late_is_told_that_its_blocks_were_not_stored(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    prefix = fresh_prefix(1, SHARDED)
    with Client.attach(node) as slow, Client.attach(node) as quick:
        slots = slow.reserve(prefix, shard=(0, 2))
        assert quick.put(prefix, payloads_of(prefix), shard=(1, 2)).pending == (0,)
        skip_time(monkeypatch, 100.0)
        wait_until(lambda: quick.statistics()["counters"]["expired"], "the reservation has expired")
        with pytest.raises(StaleLease, match="were not stored"):
            slots.commit()
        wait_until(lambda: is_quiet(quick.statistics()), "all is free")
