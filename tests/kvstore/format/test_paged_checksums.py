"""A schema of `xxh3_64_pages`, for every way to reach a pool and every path of the bytes.

Segments are a little more than four pages, so that each has two levels and a padded page. Damage
must lead to the same as with plain checksums: a miss and a counter, never the bytes.
"""

from __future__ import annotations

import json
import subprocess
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from kvsupport import (
    SCHEMA,
    TIFFIN,
    PoolOptions,
    assert_right,
    command_environment,
    damage_on_disk,
    fresh_prefix,
    payloads_of,
    wait_until,
)
from poolsupport import Cluster

from tiffin.kernels.checksum import page_hash
from tiffin.kvstore import Client, KVSchema, Prefix
from tiffin.kvstore.client.blocks.selection_copy import slice_schema
from tiffin.kvstore.errors import CorruptBlock, SchemaError
from tiffin.kvstore.format.header import pack_header, read_header
from tiffin.kvstore.node.node import Node, NodeOptions
from tiffin.kvstore.tiers.slab import inspect_slab
from tiffin.messenger.shm.host_copy import XXH3_64_PAGES, Algorithm, hash_segments

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from waysupport import Pool

PAGES: Algorithm = XXH3_64_PAGES
SHAPE: dict[str, Any] = {
    "model": "paged",
    "layers": 2,
    "kv_heads": 2,
    "head_dim": 130,
    "dtype": "bfloat16",
    "block_tokens": 16,
}
PAGED = KVSchema.gqa(**SHAPE, checksum=PAGES)
PLAIN = KVSchema.gqa(**SHAPE)
SHARDED = KVSchema.gqa(**SHAPE, checksum=PAGES, shards=2)
UNITS = -(-PAGED.extent_bytes // SCHEMA.extent_bytes)  # what PoolOptions counts
BLOCKS = 8
OPTIONS = PoolOptions(dram_blocks=BLOCKS * UNITS)
DEEP = PoolOptions(dram_blocks=BLOCKS * UNITS, nvme_blocks=4 * BLOCKS * UNITS)


@pytest.fixture
def paged(way: str, make_pool: Callable[[str, PoolOptions], Pool]) -> Pool:
    return make_pool(way, OPTIONS)


@pytest.fixture
def deep(way: str, make_pool: Callable[[str, PoolOptions], Pool]) -> Pool:
    return make_pool(way, DEEP)


def prompt(blocks: int = 3, schema: KVSchema = PAGED) -> Prefix:
    return fresh_prefix(blocks, schema)


def flip(pool: Pool, prefix: Prefix, at: int) -> None:
    """Damage one bit of the payload of a prefix of one block in DRAM."""
    pool.client.memory[pool.payload_offset(prefix) + at] ^= 1


class TestSchema:
    def test_segments_have_several_pages_and_the_last_is_not_whole(self) -> None:
        lengths = {segment.length for segment in PAGED.segments}
        assert all(n > 4 * 4096 and n % 4096 for n in lengths)

    def test_the_algorithm_is_part_of_the_fingerprint_and_the_default_is_not(self) -> None:
        assert (PLAIN.checksum, PAGED.checksum) == ("xxh3_64", PAGES)
        assert KVSchema.gqa(**SHAPE, checksum="xxh3_64") == PLAIN
        assert b"xxh3_64" not in PLAIN.canonical_bytes()
        assert json.loads(PAGED.canonical_bytes()) == [*json.loads(PLAIN.canonical_bytes()), PAGES]
        assert json.loads(SHARDED.canonical_bytes())[-2:] == [2, PAGES]
        assert len({s.fingerprint for s in (PLAIN, PAGED, SHARDED)}) == 3
        assert not {*prompt(2, PLAIN).keys} & {*prompt(2).keys}

    def test_every_constructor_takes_it(self) -> None:
        specs = PAGED.layers
        mla = KVSchema.mla(model="m", layers=1, latent_dim=8, dtype="int8", checksum=PAGES)
        made = [KVSchema.of("m", specs, checksum=PAGES), KVSchema("m", specs, checksum=PAGES), mla]
        assert all(schema.checksum == PAGES for schema in made)
        assert slice_schema(SHARDED, (1, 2)).checksum == PAGES

    @pytest.mark.parametrize("name", ["", "crc32", "XXH3_64", None, 2, ["xxh3_64"]])
    def test_another_name_is_refused(self, name: Any) -> None:
        with pytest.raises(SchemaError, match="xxh3_64, xxh3_64_pages"):
            KVSchema.gqa(**SHAPE, checksum=name)


class TestReadingAndWriting:
    def test_every_form_of_a_get(self, paged: Pool) -> None:
        prefix = paged.scatter(prompt())
        with paged.client.get(prefix) as blocks:
            assert blocks.complete
            assert_right(blocks, prefix)
            whole = [block.bytes.copy() for block in blocks]
        target = np.zeros(3 * PAGED.block_bytes, np.uint8)
        with paged.client.get(prefix, into=target) as blocks:
            assert blocks.complete
            assert_right(blocks, prefix)
        for chosen in ({"layers": 1}, {"heads": (1, 2)}, {"layers": 0, "heads": (0, 1)}):
            ranges = PAGED.ranges(**chosen)  # type: ignore[arg-type]
            with paged.client.get(prefix, **chosen) as blocks:
                assert blocks.complete
                for block, all_of_it in zip(blocks, whole, strict=True):
                    parts = [all_of_it[r.offset : r.end] for r in ranges]
                    assert np.array_equal(block.bytes, np.concatenate(parts))

    def test_slots_that_are_written_in_place(self, paged: Pool) -> None:
        prefix = prompt()
        with paged.client.reserve(prefix) as slots:
            for slot, payload in zip(slots, payloads_of(prefix), strict=True):
                slot.view[:] = payload
        with paged.client.get(prefix) as blocks:
            assert blocks.complete
            assert_right(blocks, prefix)

    def test_ranks_write_and_read_their_slices(self, paged: Pool) -> None:
        prefix = prompt(2, SHARDED)
        for rank in range(2):
            result = paged.client.put(prefix, payloads_of(prefix), shard=(rank, 2))
            assert not result.refused
        with paged.client.get(prefix) as blocks:
            assert blocks.complete
            assert_right(blocks, prefix)
        with paged.client.get(prefix, heads=(1, 2)) as blocks:
            assert blocks.complete

    def test_blocks_go_to_disk_and_come_back(self, deep: Pool) -> None:
        stored = [deep.put(prompt(1)) for _ in range(2 * BLOCKS)]
        deep.quiet()
        for one in stored:
            with deep.client.get(one) as blocks:
                assert blocks.complete
                assert_right(blocks, one)
        assert deep.quiet()["counters"]["promotions"] > 0


class TestDamage:
    @pytest.mark.parametrize("into", [False, True], ids=["view", "copy"])
    @pytest.mark.parametrize("at", [0, 4096 + 7, PAGED.block_bytes - 1])
    def test_a_flipped_bit_in_dram(self, paged: Pool, into: bool, at: int) -> None:
        prefix = paged.scatter(prompt())
        flip(paged, prefix[1:2], at)
        target = np.zeros(3 * PAGED.block_bytes, np.uint8) if into else None
        with paged.client.get(prefix, into=target) as blocks:
            assert [(m.index, m.reason) for m in blocks.missing] == [(1, "corrupt"), (2, "behind")]
            assert_right(blocks, prefix)
        wait_until(lambda: paged.client.exists(prefix) == [True, False, True], "it is dropped")

    def test_damage_is_of_its_segment(self, paged: Pool) -> None:
        prefix = paged.scatter(prompt(1))
        flip(paged, prefix, PAGED.segments[1].offset + 5000)
        with paged.client.get(prefix, layers=0) as blocks:
            assert blocks.complete
        with paged.client.get(prefix, layers=1, heads=(1, 2)) as blocks:
            assert blocks.reason == "corrupt"

    def test_two_pages_that_changed_places(self, paged: Pool) -> None:
        prefix = paged.scatter(prompt(1))
        begin = paged.payload_offset(prefix)
        pages = paged.client.memory[begin : begin + 8192].reshape(2, 4096)
        pages[:] = pages[::-1].copy()
        with paged.client.get(prefix) as blocks:
            assert blocks.reason == "corrupt"

    def test_damage_on_disk(self, deep: Pool) -> None:
        stored = [deep.put(prompt(1)) for _ in range(2 * BLOCKS)]
        deep.quiet()
        victim = next(one for one in stored if str(deep.client.match(one).tiers[0]) == "nvme")
        node = deep.node
        folder = deep.daemon.nvme if node is None else node.options.nvme_path
        assert folder is not None
        damage_on_disk(folder, victim, PAGED.header_bytes + 4096 + 9)
        with deep.client.get(victim, verify="off") as blocks:
            assert (len(blocks), blocks.reason) == (0, "corrupt")
        assert deep.client.match(victim).blocks == 0


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Node]:
    nbytes = BLOCKS * PAGED.extent_bytes
    node = Node(NodeOptions(nbytes, tmp_path / "nvme", 4 * nbytes, prefault=False))
    yield node
    node.close()


class TestHeaders:
    def test_a_header_has_the_page_checksums_of_its_segments(self, node: Node) -> None:
        prefix, plain = prompt(1), prompt(1, PLAIN)
        with Client.attach(node) as client:
            for one in (prefix, plain):
                client.put(one, payloads_of(one))
            for one, algorithm in ((prefix, PAGES), (plain, "xxh3_64")):
                replica = node.core.index[one.keys[0]].dram
                assert replica is not None
                extent = node.dram.region.array[replica.offset : replica.offset + replica.length]
                header = read_header(extent, offset_expected=replica.offset)
                payload = payloads_of(one)[0]
                spans = [(s.offset, s.length) for s in PAGED.segments]
                paged = page_hash.checksums(payload, spans).tolist()
                assert header.algorithm == algorithm
                assert (header.checksums.tolist() == paged) == (algorithm == PAGES)

    @pytest.mark.parametrize("schema", [PAGED, PLAIN], ids=["paged", "plain"])
    @pytest.mark.parametrize("verify", ["always", "off"])
    def test_a_block_of_one_algorithm_is_not_read_as_one_of_the_other(
        self, node: Node, schema: KVSchema, verify: Any
    ) -> None:
        """A forged block: a header of this schema with valid checksums of the other algorithm."""
        other: Algorithm = "xxh3_64" if schema is PAGED else PAGES
        prefix = prompt(1, schema)
        with Client.attach(node, verify=verify) as client:
            client.put(prefix, payloads_of(prefix))
            replica = node.core.index[prefix.keys[0]].dram
            assert replica is not None
            extent = node.dram.region.array[replica.offset : replica.offset + replica.length]
            spans = [(s.offset, s.length) for s in schema.segments]
            fields = asdict(read_header(extent, offset_expected=replica.offset))
            fields["checksums"] = hash_segments(extent[schema.header_bytes :], spans, other)
            fields["algorithm"] = other
            del fields["header_bytes"]
            pack_header(extent, **fields)
            assert read_header(extent).algorithm == other
            with client.get(prefix) as blocks:
                assert (len(blocks), blocks.reason) == (0, "corrupt")

    @pytest.mark.slow
    def test_a_restart_finds_them_on_disk_and_the_inspection_names_them(
        self, tmp_path: Path, commands_folder: Path
    ) -> None:
        options = NodeOptions(
            BLOCKS * PAGED.extent_bytes,
            tmp_path,
            4 * BLOCKS * PAGED.extent_bytes,
            prefault=False,
        )
        first = Node(options)
        stored = [prompt(1) for _ in range(2 * BLOCKS)] + [prompt(1, PLAIN)]
        with Client.attach(first) as client:
            for one in stored:
                client.put(one, payloads_of(one))
            on_disk = [o for o in stored if "nvme" in map(str, client.match(o).tiers)]
        first.close()
        assert on_disk
        again = Node(options)
        with Client.attach(again) as client:
            for one in on_disk:
                with client.get(one) as blocks:
                    assert blocks.complete
                    assert_right(blocks, one)
        again.close()
        report = inspect_slab(tmp_path, verify_payload=True)
        assert not report.damaged_blocks
        assert PAGES in {block.algorithm for block in report.blocks} <= {PAGES, "xxh3_64"}
        victim = next(o for o in on_disk if o.schema is PAGED and named(report, o))
        damage_on_disk(tmp_path, victim, PAGED.header_bytes + PAGED.segments[1].offset + 4096)
        damaged = [b for b in inspect_slab(tmp_path, verify_payload=True).blocks if b.damage]
        assert [(b.key, b.algorithm) for b in damaged] == [(victim.keys[0].hex(), PAGES)]
        assert "segments [1]" in damaged[0].damage
        done = inspected(tmp_path, commands_folder)
        assert {block["algorithm"] for block in done["blocks"]} >= {PAGES}


def named(report: Any, prefix: Prefix) -> bool:
    return prefix.keys[0].hex() in {block.key for block in report.blocks}


def inspected(folder: Path, commands_folder: Path) -> dict[str, Any]:
    """The JSON output of `tiffin inspect`."""
    command = [*TIFFIN, "inspect", str(folder), "--json"]
    environment = command_environment(commands_folder)
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1, done.stderr
    report: dict[str, Any] = json.loads(done.stdout)
    return report


class TestStreams:
    def test_layers_are_published_and_verified_as_they_come(self, node: Node) -> None:
        prefix = prompt(2)
        payloads = payloads_of(prefix)
        with (
            Client.attach(node) as writer,
            Client.attach(node) as reader,
            writer.reserve(prefix) as slots,
            reader.stream(prefix) as layers,
        ):
            for index, span in enumerate(PAGED.spans):
                for slot, payload in zip(slots, payloads, strict=True):
                    slot.view[span.offset : span.end] = payload[span.offset : span.end]
                slots.publish(index)
                layer = layers.step()
                assert layer is not None
                assert layer.index == index
                found = [block.k.tobytes() for block in layer.blocks]
                k = PAGED.range(index, "k")
                assert found == [payload[k.offset : k.end].tobytes() for payload in payloads]
            slots.commit()
            assert layers.step() is None

    def test_damage_after_it_was_published(self, node: Node) -> None:
        prefix = prompt(1)
        with (
            Client.attach(node) as writer,
            Client.attach(node) as reader,
            writer.reserve(prefix) as slots,
        ):
            slots[0].view[:] = payloads_of(prefix)[0]
            slots.publish(0)
            slots[0].view[5000] ^= 1
            with (
                reader.stream(prefix) as layers,
                pytest.raises(CorruptBlock, match="checksum of layer 0 differs"),
            ):
                layers.step()
            slots.abort()


class TestSeveralNodes:
    @pytest.fixture
    def cluster(self) -> Iterator[Cluster]:
        cluster = Cluster()
        try:
            yield cluster
            cluster.quiet()
        finally:
            cluster.close()

    def test_copies_between_nodes(self, cluster: Cluster) -> None:
        one, two = cluster.start("one"), cluster.start("two")
        prefix = one.put(prompt())
        cluster.settle()
        assert cluster.open().replicate(prefix, [two.number]) == {two.number: 3}
        with Client.attach(two.node) as client, client.get(prefix) as blocks:
            assert blocks.complete
            assert_right(blocks, prefix)

    def test_damage_is_not_copied(self, cluster: Cluster) -> None:
        one, two = cluster.start("one"), cluster.start("two")
        prefix = one.put(prompt())
        one.flip(prefix[1:], 4100)
        cluster.settle()
        assert cluster.open().replicate(prefix, [two.number]) == {two.number: 1}
        assert two.has(prefix)[1] is False
        wait_until(lambda: one.has(prefix) == [True, False, True], "the source is told")

    def test_damage_is_found_after_the_network(self, cluster: Cluster) -> None:
        one = cluster.start("one")
        prefix = one.put(prompt())
        one.flip(prefix[1:], 4100)
        cluster.settle()
        with cluster.open().get(prefix) as blocks:
            assert (len(blocks), blocks.reason) == (1, "corrupt")
            assert_right(blocks, prefix)
