"""A decision's view of the index equals a look-up of each instance and block."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tiffin.conductor.core import Conductor
from tiffin.conductor.cost.latency_profiles import DEFAULT
from tiffin.conductor.errors import UnknownModel
from tiffin.conductor.events.index_updates import Added
from tiffin.conductor.records import InstanceSpec, Request, Role

BLOCKS, BLOCK_TOKENS = 12, 16
KEYS = tuple(bytes([number]) * 16 for number in range(BLOCKS))

# More instances than the view looks up one by one; two on each node.
INSTANCES = 40

held = st.sets(st.integers(0, BLOCKS - 1))
# A prefix that many instances have, and further blocks that some have.
SHARED = st.tuples(st.integers(0, BLOCKS), st.sets(st.integers(0, INSTANCES - 1)))
OWN = st.dictionaries(st.integers(0, INSTANCES - 1), held, max_size=6)
NODES = st.dictionaries(
    st.tuples(st.integers(0, INSTANCES // 2 - 1), st.sampled_from(["dram", "nvme"])),
    held,
    max_size=4,
)


def leading(blocks: set[int]) -> int:
    return next(at for at in range(BLOCKS + 1) if at not in blocks)


@settings(max_examples=60, deadline=None)
@given(st.lists(SHARED, max_size=2), OWN, st.one_of(st.just({}), NODES), st.booleans())
def test_leading_blocks_are_those_of_each_instance_and_its_node(
    shared: list[tuple[int, set[int]]],
    own: dict[int, set[int]],
    nodes: dict[tuple[int, str], set[int]],
    some: bool,
) -> None:
    core = Conductor(dice=random.Random(0))
    hbm: list[set[int]] = [set() for _ in range(INSTANCES)]
    for number in range(INSTANCES):
        spec = InstanceSpec(
            f"i{number}", "m", Role.MIXED, DEFAULT, node=f"n{number // 2}", block_tokens=16
        )
        core.register(spec, 0.0)
    for blocks, having in shared:
        for number in having:
            hbm[number] |= set(range(blocks))
    for number, blocks_of_it in own.items():
        hbm[number] |= blocks_of_it
    for number, blocks_of_it in enumerate(hbm):
        core.apply(Added(f"i{number}", "hbm", [KEYS[at] for at in sorted(blocks_of_it)]), 0.0)
    for (number, tier), blocks_of_it in nodes.items():
        core.apply(Added(f"n{number}", tier, [KEYS[at] for at in sorted(blocks_of_it)]), 0.0)
    parts = core._parts
    rows = parts.view.rows("m", prefill=True)
    if some:
        rows = rows[::3].copy()
    request = Request("r", "m", BLOCKS * BLOCK_TOKENS + 1, KEYS)
    question = parts.view.question(
        request, rows, core.transfers, core.computing, core.queues, core.settings, parts.dice, 0.0
    )
    dram = [hbm[row] | nodes.get((row // 2, "dram"), set()) for row in rows.tolist()]
    nvme = [nodes.get((row // 2, "nvme"), set()) for row in rows.tolist()]
    local = [one | other for one, other in zip(dram, nvme, strict=True)]
    assert question.hbm_blocks.tolist() == [leading(hbm[row]) for row in rows.tolist()]
    assert question.dram_blocks.tolist() == [leading(one) for one in dram]
    assert question.local_blocks.tolist() == [leading(one) for one in local]
    # A second time, now with cached sets of holders.
    again = parts.view.question(
        request, rows, core.transfers, core.computing, core.queues, core.settings, parts.dice, 0.0
    )
    assert np.array_equal(again.hbm_blocks, question.hbm_blocks)


def test_models_that_nobody_serves_are_not_remembered() -> None:
    """Clients choose the names, so their number is unbounded."""
    core = Conductor(dice=random.Random(0))
    core.register(InstanceSpec("i", "m", Role.MIXED, DEFAULT), 0.0)
    for number in range(20):
        with pytest.raises(UnknownModel):
            core.schedule(Request(f"r{number}", f"model-{number}", 100), 0.0)
    core.schedule(Request("r", "m", 100), 0.0)
    assert {model for model, *_ in core._parts.view._ready} == {"m"}
