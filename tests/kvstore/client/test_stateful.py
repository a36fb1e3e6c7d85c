"""The whole store against a dict, by Hypothesis: an embedded node over DRAM and NVMe.

The model remembers what was put under every key. The pool may forget (evictions, damage, restarts)
and say so; it may never return anything else. After every step the node's own invariants hold.
"""

from __future__ import annotations

import contextlib
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from kvsupport import assert_conserved, is_quiet, wait_until

from tiffin.kvstore import Client, KVSchema, Prefix, Shard
from tiffin.kvstore.errors import NoRoom
from tiffin.kvstore.node.core.event_log import EVENTS_KEPT
from tiffin.kvstore.node.core.node_core import CoreOptions, split_keys
from tiffin.kvstore.node.node import Node, NodeOptions
from tiffin.kvstore.testing import random_bytes
from tiffin.kvstore.tiers.slab import SLAB_NAME

if TYPE_CHECKING:
    from collections.abc import Iterator

SMALL = KVSchema.gqa(model="a", layers=2, kv_heads=2, head_dim=4, dtype="int8", block_tokens=4)
LARGE = KVSchema.gqa(
    model="b", layers=2, kv_heads=2, head_dim=256, dtype="bfloat16", block_tokens=4
)
SHARDED = KVSchema.gqa(
    model="c", layers=2, kv_heads=4, head_dim=32, dtype="bfloat16", block_tokens=4, shards=4
)
# All writers of a block: ranks, pipeline stages, and ranks of stages.
PARTIES = [
    [
        Shard(rank, ranks, stage, stages)
        for stage in range(max(1, len(stages)))
        for rank in range(ranks)
    ]
    for ranks, stages in ((2, ()), (4, ()), (1, (1, 1)), (2, (1, 1)))
]
PAGED = KVSchema.gqa(
    model="d",
    layers=2,
    kv_heads=2,
    head_dim=256,
    dtype="bfloat16",
    block_tokens=4,
    checksum="xxh3_64_pages",
)
DRAM_BYTES = 12 * LARGE.extent_bytes
NVME_BYTES = 24 * LARGE.extent_bytes
BLOCKS = 5  # of each prompt


def prompts() -> list[Prefix]:
    """Prompts of all schemas: some share their first blocks, some share nothing."""
    found = []
    for schema in (SMALL, LARGE, SHARDED, PAGED):
        base = np.arange(BLOCKS * schema.block_tokens)
        for shared in (0, 2, 4):
            tokens = base.copy()
            tokens[shared * schema.block_tokens :] += 100 * (len(found) + 1)
            found.append(schema.prefix(tokens))
    return found


PROMPTS = prompts()
SHARDED_PROMPTS = [prompt for prompt in PROMPTS if prompt.schema is SHARDED]


@st.composite
def _parts(draw: st.DrawFn, prompts: list[Prefix]) -> Prefix:
    prompt = draw(st.sampled_from(prompts))
    start = draw(st.sampled_from([0, 0, 0, 1, 2]))
    return prompt[start : draw(st.integers(start + 1, BLOCKS))]


PART = _parts(PROMPTS)
SHARDED_PART = _parts(SHARDED_PROMPTS)


class StoreAgainstDict(RuleBasedStateMachine):
    """The rules are the client's verbs, and failures."""

    def __init__(self) -> None:
        super().__init__()
        self._folder = tempfile.TemporaryDirectory(prefix="tiffin-stateful-")
        self.path = Path(self._folder.name)
        self.model: dict[bytes, np.ndarray] = {}
        self.held: list[tuple[Any, list[bytes]]] = []
        self.flushes = False
        self._open()

    def _open(self) -> None:
        options = NodeOptions(
            DRAM_BYTES,
            self.path,
            NVME_BYTES,
            prefault=False,
            core=CoreOptions(high_watermark=0.8, low_watermark=0.6),
            flush_s=5.0 if self.flushes else 0.0,
        )
        self.node = Node(options)
        self.client = Client.attach(self.node)

    def _close(self) -> None:
        self._release_all()
        self._come_to_rest()
        self.client.close()
        self.node.close()

    def _release_all(self) -> None:
        while self.held:
            self._release(0)

    def _come_to_rest(self) -> None:
        wait_until(lambda: is_quiet(self.client.statistics()), "the node comes to rest")
        assert_conserved(self.client.statistics())
        self.node.check()

    @contextlib.contextmanager
    def _still(self) -> Iterator[None]:
        """Hold the node's lock: else it finds damage, and makes room, at any time."""
        self.client.exists(PROMPTS[0])  # answered behind reports of damage, which need the lock
        with self.node.held():
            yield

    # -- verbs -------------------------------------------------------------------------------------

    def _payload(self, key: bytes, schema: KVSchema, version: int) -> np.ndarray:
        return random_bytes(schema.block_bytes, int.from_bytes(key, "little") + version)

    def _remember(self, prefix: Prefix, stored: Any, payloads: list[np.ndarray]) -> None:
        for index in stored:
            self.model[prefix.keys[index]] = payloads[index]

    @rule(part=PART, version=st.integers(0, 3))
    def put(self, part: Prefix, version: int) -> None:
        payloads = [self._payload(key, part.schema, version) for key in part.keys]
        result = self.client.put(part, payloads, timeout_s=0.05 if self.held else 2)
        self._remember(part, result.stored, payloads)
        assert not result.busy
        assert not result.refused
        covered = {*result.stored, *result.resident}
        assert covered == set(range(len(covered))), "a hole"
        assert result.complete == (len(covered) == len(part))
        for index in result.resident:
            assert part.keys[index] in self.model, "resident, and nobody put it"

    @rule(part=PART, version=st.integers(0, 3), ending=st.sampled_from(["commit", "abort", "skip"]))
    def reserve(self, part: Prefix, version: int, ending: str) -> None:
        payloads = [self._payload(key, part.schema, version) for key in part.keys]
        try:
            slots = self.client.reserve(part, timeout_s=0.05 if self.held else 2)
        except NoRoom:
            return
        for slot in slots:
            slot.view[:] = payloads[slot.index]
        if ending == "abort":
            slots.abort()
            return
        if ending == "skip" and len(slots):
            slots[0].skip()
        slots.commit()
        wanted = [s.index for s in slots][1 if ending == "skip" else 0 :]
        assert list(slots.stored) == wanted
        self._remember(part, slots.stored, payloads)

    @rule(
        part=SHARDED_PART,
        version=st.integers(0, 3),
        order=st.sampled_from(PARTIES).flatmap(st.permutations),
        coming=st.sampled_from([4, 4, 4, 1, 2, 3]),
    )
    def put_by_ranks(self, part: Prefix, version: int, order: list[Shard], coming: int) -> None:
        """Each writer puts its slice, in some order; sometimes not all of them come."""
        payloads = [self._payload(key, part.schema, version) for key in part.keys]
        for shard in order[:coming]:
            with self._still():
                before, seq = self.client.exists(part), self.node.inventory()[0]
            result = self.client.put(
                part, payloads, shard=shard, timeout_s=0.05 if self.held else 2
            )
            assert not result.refused
            again = {part.keys[i] for i in result.stored if before[i]}
            assert again <= self._forgotten_since(seq), "a visible block was written again"
            assert not result.stored or shard == order[-1], "stored before all ranks were in"
            self._remember(part, result.stored, payloads)
        self._give_up(part, order)

    def _forgotten_since(self, seq: int) -> set[bytes]:
        """The blocks that were forgotten after an event."""
        events = self.node.events_since(seq, EVENTS_KEPT)
        assert events is not None
        keys = split_keys(events.keys)
        return {key for key, tier in zip(keys, events.tiers, strict=True) if not tier}

    def _give_up(self, part: Prefix, party: list[Shard]) -> None:
        """Every writer reserves and cancels: else blocks would wait a minute for a missing one."""
        for index in range(len(part)):
            for shard in party:
                with contextlib.suppress(NoRoom):
                    one = part[index : index + 1]
                    self.client.reserve(one, shard=shard, timeout_s=0).abort()

    @rule(part=PART)
    def get(self, part: Prefix) -> None:
        with self.client.get(part, timeout_s=2) as blocks:
            for block in blocks:
                assert np.array_equal(block.bytes, self.model[block.key])

    @rule(part=PART, layer=st.integers(0, 1), head=st.integers(0, 1))
    def get_a_range(self, part: Prefix, layer: int, head: int) -> None:
        schema = part.schema
        spans = schema.ranges(layers=layer, heads=(head, head + 1))
        target = np.zeros((len(part), sum(s.length for s in spans)), np.uint8)
        with self.client.get(
            part, into=target, layers=layer, heads=(head, head + 1), timeout_s=2
        ) as blocks:
            for row, key in zip(target[: len(blocks)], part.keys, strict=False):
                payload = self.model[key]
                wanted = np.concatenate([payload[s.offset : s.end] for s in spans])
                assert np.array_equal(row, wanted)

    @rule(part=PART)
    def match(self, part: Prefix) -> None:
        with self._still():
            there, hit = self.client.exists(part), self.client.match(part)
        assert hit.blocks == (there.index(False) if False in there else len(there))
        assert all(key in self.model for key in part.keys[: hit.blocks])

    @rule(part=PART, hard=st.booleans(), ttl_s=st.sampled_from([None, 0.001, 60.0]))
    def pin(self, part: Prefix, hard: bool, ttl_s: float | None) -> None:
        there = sum(self.client.exists(part))
        # A pool full of hard pins takes nothing, which is right and tests little.
        assert self.client.pin(part[:1], hard=hard, ttl_s=ttl_s) <= there

    @rule(part=PART)
    def unpin(self, part: Prefix) -> None:
        with self._still():
            assert self.client.unpin(part) == sum(self.client.exists(part))

    @rule(part=PART)
    def remove(self, part: Prefix) -> None:
        there = sum(self.client.exists(part))
        assert self.client.remove(part) <= there  # some may have left meanwhile
        assert self.client.exists(part) == [False] * len(part)
        for key in part.keys:
            self.model.pop(key, None)

    @precondition(lambda self: len(self.held) < 3)
    @rule(part=PART)
    def hold(self, part: Prefix) -> None:
        blocks = self.client.get(part[:3], timeout_s=0.2)
        for block in blocks:
            assert np.array_equal(block.bytes, self.model[block.key])
        self.held.append((blocks, [block.bytes.tobytes() for block in blocks]))

    @precondition(lambda self: self.held)
    @rule(which=st.integers(0, 2))
    def release(self, which: int) -> None:
        self._release(which % len(self.held))

    def _release(self, which: int) -> None:
        """Held blocks have not changed, whatever has happened in the meantime."""
        blocks, before = self.held.pop(which)
        assert [block.bytes.tobytes() for block in blocks] == before
        blocks.release()

    # -- failures ----------------------------------------------------------------------------------

    @precondition(lambda self: not self.held)
    @rule(choice=st.integers(0, 1 << 30), bit=st.integers(0, 7))
    def damage_dram(self, choice: int, bit: int) -> None:
        """Flip a bit inside a block that is in DRAM, in its header or its payload."""
        self._come_to_rest()
        replicas = [b.dram for b in self.node.core.index.values() if b.dram is not None]
        if replicas:
            replica = replicas[choice % len(replicas)]
            at = replica.offset + choice // 7 % replica.length
            self.node.dram.region.array[at] ^= np.uint8(1 << bit)

    @rule(choice=st.integers(0, 1 << 30), bit=st.integers(0, 7))
    def damage_nvme(self, choice: int, bit: int) -> None:
        """The same in the slab file, past the node."""
        self._flip_in_slab(choice, bit)

    def _flip_in_slab(self, choice: int, bit: int) -> None:
        assert self.node.nvme is not None
        replicas = [b.nvme for b in list(self.node.core.index.values()) if b.nvme is not None]
        if not replicas:
            return
        replica = replicas[choice % len(replicas)]
        at = self.node.nvme.layout.data_offset + replica.offset + choice // 7 % replica.length
        with open(self.path / SLAB_NAME, "r+b") as slab:
            slab.seek(at)
            byte = slab.read(1)[0]
            slab.seek(at)
            slab.write(bytes([byte ^ 1 << bit]))

    @rule(flushes=st.booleans(), choice=st.integers(0, 1 << 30), damaged=st.booleans())
    def restart(self, flushes: bool, choice: int, damaged: bool) -> None:
        """Blocks in DRAM are lost unless they were written back; no other block appears."""
        self._release_all()
        self._come_to_rest()
        before = set(self.node.core.index)
        if damaged:
            self._flip_in_slab(choice, choice % 8)
        self.flushes = flushes
        self.client.close()
        self.node.close()
        self._open()
        assert set(self.node.core.index) <= before

    @invariant()
    def node_is_sound(self) -> None:
        self.node.check()

    def teardown(self) -> None:
        try:
            self._close()
        finally:
            self.node.close()
            self._folder.cleanup()


@pytest.mark.slow
@pytest.mark.usefixtures("patient")
def test_the_store_never_returns_what_was_not_put() -> None:
    run_state_machine_as_test(
        StoreAgainstDict, settings=settings(max_examples=120, stateful_step_count=50)
    )


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.usefixtures("patient")
def test_the_store_never_returns_what_was_not_put_at_length() -> None:
    run_state_machine_as_test(
        StoreAgainstDict, settings=settings(max_examples=100, stateful_step_count=80)
    )
