"""One block written by pipeline stages, each its layers, and by tensor-parallel ranks of each."""

from __future__ import annotations

import contextlib
from itertools import permutations
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
    wait_until,
)
from shardworker import SHARDED

from tiffin.kvstore import Client, KVSchema, Shard
from tiffin.kvstore.client.blocks.block_views import select, select_shard
from tiffin.kvstore.client.blocks.selection_copy import slice_schema
from tiffin.kvstore.errors import InvalidInput, SchemaError
from tiffin.kvstore.format.schema import LayerSpec
from tiffin.kvstore.node.node import Node, NodeOptions
from tiffin.kvstore.node.server.tcp_server import RemoteService

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

WHOLE = KVSchema.gqa(
    model="staged", layers=3, kv_heads=8, head_dim=16, dtype="float16", block_tokens=16
)
# The last of two layers is not split, so that of a stage with this layer only rank 0 writes.
MIXED = KVSchema.of(
    "mixed",
    [LayerSpec.gqa(kv_heads=2, head_dim=8, dtype="float16"), LayerSpec.state(nbytes=40)],
    block_tokens=16,
    shards=2,
)
UNEVEN = (1, 2)
TWO_BY_TWO = tuple(Shard(rank, 2, stage, UNEVEN) for stage in range(2) for rank in range(2))
BLOCKS = 16


@pytest.fixture
def node() -> Iterator[Node]:
    node = Node(NodeOptions(BLOCKS * SHARDED.extent_bytes, prefault=False))
    yield node
    node.check()
    assert_conserved(node.statistics())
    node.close()


@pytest.fixture(params=["local", "remote"])
def open_client(request: pytest.FixtureRequest, node: Node) -> Iterator[Callable[[], Client]]:
    """A function that makes one more client of the node, over shared memory or the network."""
    with contextlib.ExitStack() as stack:
        if request.param == "local":
            yield lambda: stack.enter_context(Client.attach(node))
            return
        service = RemoteService(node, ("127.0.0.1", 0))
        stack.callback(service.close)
        url = f"tiffin://127.0.0.1:{service.address[1]}"
        yield lambda: stack.enter_context(Client.open(url))


@pytest.fixture
def client(node: Node) -> Iterator[Client]:
    with Client.attach(node) as client:
        yield client


# -- which part ------------------------------------------------------------------------------------


@pytest.mark.parametrize("schema", [SHARDED, WHOLE])
@pytest.mark.parametrize("stages", [(3,), (1, 2), (2, 1), (1, 1, 1)])
def test_the_writers_slices_make_up_the_block(schema: KVSchema, stages: tuple[int, ...]) -> None:
    ranks = 4 if schema is SHARDED else 1
    shards = [Shard(rank, ranks, s, stages) for s in range(len(stages)) for rank in range(ranks)]
    assert [shard.writer for shard in shards] == list(range(ranks * len(stages)))
    assert {shard.writers for shard in shards} == {ranks * len(stages)}
    written = np.zeros(schema.block_bytes, int)
    for shard in shards:
        chosen = select_shard(schema, shard)
        assert chosen.nbytes == slice_schema(schema, shard).block_bytes
        for part in chosen.ranges:
            written[part.offset : part.end] += 1
    assert (written == 1).all()


@pytest.mark.parametrize(
    ("shard", "match"),
    [
        (Shard(0, 2, 2, (1, 2)), "stage is 2"),
        (Shard(0, 2, -1, (1, 2)), "stage is -1"),
        (Shard(0, 2, 1), "stage is 1"),
        (Shard(0, 2, 0, (1, 1)), "stages of 2 layers; the schema has 3"),
        (Shard(0, 2, 0, (0, 3)), "the layers of a stage is 0"),
        (Shard(0, 2, 0, (2, 2)), "stages of 4 layers; the schema has 3"),
        (Shard(0, 2, 0, [1, 2]), "stages is a tuple"),  # type: ignore[arg-type]
        (Shard(0, 2, 0.0, (1, 2)), "stage is an int"),  # type: ignore[arg-type]
        (Shard(0, 3, 0, (1, 2)), "with shards=3, or a multiple"),
    ],
)
def test_a_stage_that_cannot_be_is_a_schema_error(client: Client, shard: Any, match: str) -> None:
    prefix = fresh_prefix(1, SHARDED)
    with pytest.raises(SchemaError, match=match):
        client.put(prefix, payloads_of(prefix), shard=shard)
    with pytest.raises(SchemaError, match=match):
        client.reserve(prefix, shard=shard)


def test_a_rank_that_would_write_nothing_of_its_stage_is_a_schema_error(client: Client) -> None:
    prefix = fresh_prefix(1, MIXED)
    with pytest.raises(SchemaError, match=r"stage 1 has no layer .* rank 1 would write nothing"):
        client.reserve(prefix, shard=Shard(1, 2, 1, (1, 1)))


# -- writing ---------------------------------------------------------------------------------------


def test_two_by_two_writers_may_come_in_any_order(open_client: Callable[[], Client]) -> None:
    clients = [open_client() for _ in TWO_BY_TWO]
    for order in permutations(range(4)):
        prefix = fresh_prefix(2, SHARDED)
        for turn, writer in enumerate(order):
            assert clients[0].match(prefix).blocks == 0, "a part of a block was visible"
            result = clients[writer].put(prefix, payloads_of(prefix), shard=TWO_BY_TWO[writer])
            assert (result.stored if turn == 3 else result.pending) == (0, 1)
        with clients[0].get(prefix, verify="always") as blocks:
            assert blocks.complete
            assert_right(blocks, prefix)
        clients[0].remove(prefix)


def test_a_stage_may_write_packed_slices_or_in_place(open_client: Callable[[], Client]) -> None:
    client, prefix = open_client(), fresh_prefix(2, SHARDED)
    for shard in TWO_BY_TWO[:2]:
        runs = select_shard(SHARDED, shard).ranges
        right = [np.concatenate([p[r.offset : r.end] for r in runs]) for p in payloads_of(prefix)]
        assert client.put(prefix, right, shard=shard).pending == (0, 1)
    for shard in TWO_BY_TWO[2:]:
        slots = client.reserve(prefix, shard=shard)
        for slot in slots:
            whole = payload_of(prefix.keys[slot.index], SHARDED)
            assert slot.selection.layers == (1, 2)
            with pytest.raises(SchemaError, match="layer 0"):
                slot.layer(0)
            for run in slot.selection.ranges:
                slot.view[run.offset : run.end] = whole[run.offset : run.end]
        slots.commit()
    with client.get(prefix, verify="always") as blocks:
        assert_right(blocks, prefix)


def test_stages_of_a_schema_without_shards_can_write(client: Client) -> None:
    prefix = fresh_prefix(1, WHOLE)
    assert client.put(prefix, payloads_of(prefix), shard=Shard(0, 1, 1, UNEVEN)).pending == (0,)
    assert client.put(prefix, payloads_of(prefix), shard=Shard(0, 1, 0, UNEVEN)).stored == (0,)
    with client.get(prefix, verify="always") as blocks:
        assert_right(blocks, prefix)


def test_a_stage_publishes_its_own_layers(client: Client) -> None:
    prefix = fresh_prefix(1, SHARDED)
    slots = client.reserve(prefix, shard=TWO_BY_TWO[2], by_layer=True)
    slots[0].view[:] = payload_of(prefix.keys[0], SHARDED)
    slots.publish(1)
    with pytest.raises(InvalidInput, match=r"layers \[2\] were not published"):
        slots.commit()
    slots.publish(0)  # another stage's: nothing to do
    slots.publish(2)
    slots.commit()
    assert slots.pending == (0,)


def test_a_writer_that_comes_twice_is_busy(client: Client) -> None:
    prefix = fresh_prefix(1, SHARDED)
    for _ in range(2):
        result = client.put(prefix, payloads_of(prefix), shard=TWO_BY_TWO[1])
    assert result.busy == (0,)
    assert client.match(prefix).blocks == 0


@pytest.mark.parametrize(
    "other", [Shard(0, 1, 1, (1, 2)), Shard(0, 1, 1, (2, 1))], ids=["one layer", "a whole stage"]
)
def test_overlapping_parts_are_refused(open_client: Callable[[], Client], other: Shard) -> None:
    """Layers 0 and 1 or heads 0 to 3 of all layers, and then other layers."""
    client, prefix = open_client(), fresh_prefix(1, SHARDED)
    mine = (0, 2) if other.stages == (2, 1) else Shard(0, 1, 0, (2, 1))
    assert client.put(prefix, payloads_of(prefix), shard=mine).pending == (0,)
    with pytest.raises(InvalidInput, match=r"claims segments of another rank.*same stages"):
        client.put(prefix, payloads_of(prefix), shard=other)
    assert client.match(prefix).blocks == 0


def test_stages_that_leave_out_a_layer_are_refused(open_client: Callable[[], Client]) -> None:
    """One writer has layer 0 of stages (1, 2), the other layer 2 of stages (2, 1)."""
    client, prefix = open_client(), fresh_prefix(1, SHARDED)
    assert client.put(prefix, payloads_of(prefix), shard=Shard(0, 1, 0, (1, 2))).pending == (0,)
    assert client.put(prefix, payloads_of(prefix), shard=Shard(0, 1, 1, (2, 1))).refused == (0,)
    assert client.match(prefix).blocks == 0
    for stage in range(2):
        client.put(prefix, payloads_of(prefix), shard=Shard(0, 1, stage, UNEVEN))
    with client.get(prefix, verify="always") as blocks:
        assert_right(blocks, prefix)


# -- reading ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("copies", [False, True])
def test_readers_of_other_stages_read_their_layers(
    open_client: Callable[[], Client], copies: bool
) -> None:
    client, prefix = open_client(), fresh_prefix(2, SHARDED)
    for shard in TWO_BY_TWO:
        client.put(prefix, payloads_of(prefix), shard=shard)
    for layers, heads in (((0, 2), (0, 8)), ((2, 3), (4, 8)), ((1, 3), (0, 2))):
        chosen = select(SHARDED, layers, heads)
        into = np.zeros((2, chosen.nbytes), np.uint8) if copies else None
        with client.get(prefix, into=into, layers=layers, heads=heads, verify="always") as blocks:
            assert blocks.complete
            for block, key in zip(blocks, prefix.keys, strict=True):
                right = payload_of(key, SHARDED)
                wanted = np.concatenate([right[r.offset : r.end] for r in chosen.ranges])
                assert np.array_equal(block.bytes, wanted)


def test_a_stages_reader_moves_nothing_but_its_layers(node: Node, client: Client) -> None:
    """Over the network, with `verify="always"`, only the layers and the headers arrive."""
    prefix = fresh_prefix(2, SHARDED)
    client.put(prefix, payloads_of(prefix))
    service = RemoteService(node, ("127.0.0.1", 0))
    try:
        with Client.open(f"tiffin://127.0.0.1:{service.address[1]}") as far:
            chosen = select(SHARDED, (1, 2), (4, 8))
            into = np.zeros((2, chosen.nbytes), np.uint8)
            options: dict[str, Any] = {"layers": (1, 2), "heads": (4, 8), "verify": "always"}
            with far.get(prefix, into=into, **options) as blocks:
                assert blocks.complete
            moved = sum(int(link["bytes"]) for link in far.statistics()["links"].values())
    finally:
        service.close()
    assert moved - 2 * SHARDED.header_bytes == 2 * SHARDED.block_bytes // 6


# -- processes -------------------------------------------------------------------------------------


@pytest.fixture
def party(
    own_daemon: Callable[..., Any], commands_folder: Path
) -> Iterator[tuple[Any, list[Worker]]]:
    """A daemon, and two ranks of each of two stages that have written half of three blocks."""
    daemon = own_daemon(dram=BLOCKS * SHARDED.extent_bytes)
    with contextlib.ExitStack() as stack:
        workers = []
        for shard in TWO_BY_TWO:
            place = (shard.rank, shard.ranks, shard.stage, *shard.stages)
            worker = Worker("shardworker.py", commands_folder, daemon.url, "party", 3, *place)
            workers.append(stack.enter_context(worker))
        assert [worker.says() for worker in workers] == ["ready"] * 4
        yield daemon, workers


@pytest.mark.slow
def test_four_processes_write_one_block_each_its_own_part(party: tuple[Any, list[Worker]]) -> None:
    daemon, workers = party
    with Client.open(daemon.url) as client:
        assert [worker.ask("go") for worker in workers] == ["pending"] * 3 + ["stored"]
        prefix = shardworker.prefix_of("party", 3)
        with client.get(prefix, verify="always") as blocks:
            assert blocks.complete
            assert_right(blocks, prefix)


@pytest.mark.slow
@pytest.mark.parametrize("killed", range(4))
def test_a_killed_writers_blocks_are_never_there(
    party: tuple[Any, list[Worker]], killed: int
) -> None:
    daemon, workers = party
    prefix = shardworker.prefix_of("party", 3)
    first, *others = [worker for index, worker in enumerate(workers) if index != killed]
    with Client.open(daemon.url) as client:
        assert first.ask("go") == "pending"
        workers[killed].kill()

        def cancelled() -> bool:
            return bool(client.statistics()["tiers"]["dram"]["reserved_bytes"] == 0)

        wait_until(cancelled, "the node notices")
        assert client.match(prefix).blocks == 0
        assert [worker.ask("go") for worker in others] == ["refused"] * 2
        assert client.match(prefix).blocks == 0
        wait_until(lambda: is_quiet(client.statistics()), "all is free")
        for shard in TWO_BY_TWO:
            client.put(prefix, payloads_of(prefix), shard=shard)
        with client.get(prefix, verify="always") as blocks:
            assert_right(blocks, prefix)
