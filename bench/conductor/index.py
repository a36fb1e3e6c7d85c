"""Rows about the conductor's index: events applied, memory per block, resync, and one walk.

`python -m tiffin.bench.conductor.index index 1000000` prints one JSON object about the growth of a
fresh process (`floor` instead of `index`: a bare dict of the same keys; `folder`: parts of an
engine's blocks).
"""

from __future__ import annotations

import gc
import json
import os
import random
import subprocess
import sys
import time
from typing import TYPE_CHECKING

import numpy as np

from tiffin.conductor.events.block_regrouper import EngineChain, EngineStored, Folder
from tiffin.conductor.events.index_updates import HolderInventory, slices
from tiffin.conductor.events.routed_blocks import Holdings
from tiffin.conductor.state.prefix_index import PrefixIndex
from tiffin.kvstore.format.header import KEY_BYTES
from tiffin.kvstore.format.schema import KVSchema

from ..store.resident import resident_bytes
from ..store.rows import MICROSECONDS, Row, Side, Spread, Target, interleave, single, times

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from .setting import Setting

# A prompt of 131,072 tokens, a cluster of a thousand instances.
HOLDERS = 1_000
PROMPT_BLOCKS = 256
SHARED_BLOCKS = 16
EVENT_BLOCKS = 16
PART_TOKENS = 16
BLOCK_TOKENS = 512


def keys_of(count: int) -> list[bytes]:
    """`count` random keys, each an object of its own, as they come off the wire."""
    joined = os.urandom(KEY_BYTES * count)
    return [joined[at : at + KEY_BYTES] for at in range(0, len(joined), KEY_BYTES)]


def _instances(index: PrefixIndex, count: int) -> list[int]:
    return [index.holder(f"instance-{number}", "hbm") for number in range(count)]


def _seconds(action: Callable[[], object]) -> float:
    gc.collect()
    start_s = time.perf_counter()
    action()
    return time.perf_counter() - start_s


# -- rows ------------------------------------------------------------------------------------------


def events(setting: Setting) -> list[Row]:
    """Events of 16 new blocks each that the index applies per second, from many instances."""
    blocks, rounds = setting.sizes.index_blocks, setting.sizes.index_rounds
    dice = random.Random(0)
    rates: list[float] = []
    floors: list[float] = []
    for _ in range(rounds):
        index = PrefixIndex()
        numbers = _instances(index, setting.sizes.instances)
        count = blocks // EVENT_BLOCKS
        batches = [(dice.choice(numbers), keys_of(EVENT_BLOCKS)) for _ in range(count)]
        rates.append(count / _seconds(lambda: _add_all(index, batches)))  # noqa: B023
        bare: dict[bytes, int] = {}
        floors.append(count / _seconds(lambda: _store_all(bare, batches)))  # noqa: B023
    return [
        Row(
            name="index-events",
            what=f"events of {EVENT_BLOCKS} new blocks into the index, {blocks} blocks in all",
            unit="events/s",
            value=Spread.of(rates, lower_is_better=False),
            limit_what="the same keys into a bare dict",
            limit=Spread.of(floors, lower_is_better=False),
            targets=(Target("p50", ">=", 60_000),),
        )
    ]


def _add_all(index: PrefixIndex, batches: Sequence[tuple[int, list[bytes]]]) -> None:
    for number, keys in batches:
        index.add(number, keys, 0.0)


def _store_all(bare: dict[bytes, int], batches: Sequence[tuple[int, list[bytes]]]) -> None:
    for number, keys in batches:
        for key in keys:
            bare[key] = number


def memory(setting: Setting) -> list[Row]:
    """Memory growth of a fresh process per block of the index."""
    blocks = setting.sizes.index_blocks
    index, floor, folder = (_resident(what, blocks) for what in ("index", "floor", "folder"))
    return [
        Row(
            name="index-memory",
            what=f"memory of the index per block, at {blocks} blocks of {HOLDERS} instances",
            unit="B",
            value=single(index),
            limit_what="a bare dict of as many 16-byte keys",
            limit=single(floor),
            targets=(Target("p50", "<=", 250),),
        ),
        Row(
            name="folding-memory",
            what=f"memory per part of {PART_TOKENS} tokens that an engine has, at {blocks} parts",
            unit="B",
            value=single(folder),
            limit_what="a bare dict of as many 16-byte keys",
            limit=single(floor),
        ),
    ]


def _resident(what: str, blocks: int) -> float:
    command = [sys.executable, "-m", "tiffin.bench.conductor.index", what, str(blocks)]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    return float(json.loads(done.stdout)["per_block"])


def resync(setting: Setting) -> list[Row]:
    """Replacing a node's blocks in the index by its inventory; half of the blocks are new."""
    blocks, rounds = setting.sizes.index_blocks, setting.sizes.index_rounds
    seconds: list[float] = []
    longest: list[float] = []
    floors: list[float] = []
    for _ in range(rounds):
        holdings = Holdings(PrefixIndex())
        old, new = keys_of(blocks // 2), keys_of(blocks // 2)
        number = holdings.index.holder("node-0", "dram")
        holdings.index.add(number, old + keys_of(blocks // 2), 0.0)
        parts = list(slices(old + new))
        taken = _take_inventory(holdings, parts)
        assert holdings.index.blocks_of(number) == 2 * (blocks // 2)
        seconds.append(sum(taken))
        longest.append(1e3 * max(taken))
        floors.append(_seconds(lambda: dict.fromkeys(old + new)))  # noqa: B023
    return [
        Row(
            name="index-resync",
            what=f"an inventory of {blocks} blocks, half of them new",
            unit="s",
            value=Spread.of(seconds, lower_is_better=True),
            limit_what="as many keys into a bare dict",
            limit=Spread.of(floors, lower_is_better=True),
            targets=(Target("p50", "<=", 3.0),),
            note=f"decisions wait for {Spread.of(longest, lower_is_better=True).p50:.1f} ms of it "
            "at a time, at most (when the table of all keys grows)",
        )
    ]


def _take_inventory(holdings: Holdings, parts: Sequence[Sequence[bytes]]) -> list[float]:
    gc.collect()
    taken = []
    for at, part in enumerate(parts):
        update = HolderInventory("node-0", "dram", part, at == 0, at == len(parts) - 1)
        start_s = time.perf_counter()
        holdings.apply(update, 0.0)
        taken.append(time.perf_counter() - start_s)
    return taken


def walk(setting: Setting) -> list[Row]:
    """The look-up of one decision: per instance, the leading blocks of a prompt in its HBM."""
    holders, rounds = setting.sizes.instances, setting.sizes.rounds
    rows = []
    for name, private in (("private", True), ("hot", False)):
        index = PrefixIndex()
        numbers = _instances(index, holders)
        shared = keys_of(SHARED_BLOCKS if private else PROMPT_BLOCKS)
        prompt = shared
        for number in numbers:
            index.add(number, shared, 0.0)
            if private:
                prompt = shared + keys_of(PROMPT_BLOCKS - SHARED_BLOCKS)
                index.add(number, prompt[SHARED_BLOCKS:], 0.0)
        # As they come with a request: the same bytes in new objects, without a cached hash.
        asked = [bytes(bytearray(key)) for key in prompt]
        bare = dict.fromkeys(prompt, 0)
        columns = np.array([numbers, [-1] * holders])
        sides = [
            Side(lambda: index.match(asked).leading(columns)),  # noqa: B023
            Side(lambda: [bare.get(key) for key in asked]),  # noqa: B023
        ]
        taken, floor = interleave(sides, rounds=rounds)
        rows.append(
            Row(
                name=f"index-walk-{name}",
                what=f"leading blocks of {PROMPT_BLOCKS} on each of {holders} instances, "
                + (f"all but {SHARED_BLOCKS} private" if private else "all on all"),
                unit="us",
                value=times(taken, MICROSECONDS),
                limit_what=f"{PROMPT_BLOCKS} lookups in a bare dict",
                limit=times(floor, MICROSECONDS),
                targets=(Target("p50", "<=", 100),),
            )
        )
    return rows


def folding(setting: Setting) -> list[Row]:
    """Events of an engine, each with a whole pool block in 32 parts: laid out in pages, hashed, and
    made a key."""
    blocks, rounds = setting.sizes.folded_blocks, setting.sizes.index_rounds
    rates: list[float] = []
    floors: list[float] = []
    for _ in range(rounds):
        chain, batch = _parts(blocks)
        folder = Folder(chain, parts_max=64 * blocks)
        rates.append(blocks / _seconds(lambda: [folder.stored(e, 0.0) for e in batch]))  # noqa: B023
        bare: dict[int, int] = {}
        floors.append(
            blocks / _seconds(lambda: [bare.update(dict.fromkeys(e.hashes, 0)) for e in batch])  # noqa: B023
        )
    return [
        Row(
            name="folding-events",
            what=f"events of {BLOCK_TOKENS // PART_TOKENS} parts of {PART_TOKENS} tokens into keys",
            unit="events/s",
            value=Spread.of(rates, lower_is_better=False),
            limit_what="the parts' hashes into a bare dict",
            limit=Spread.of(floors, lower_is_better=False),
        )
    ]


def _parts(blocks: int) -> tuple[EngineChain, list[EngineStored]]:
    """Events of prompts of 8 blocks each."""
    schema = KVSchema.gqa(
        model="bench",
        layers=1,
        kv_heads=1,
        head_dim=8,
        dtype="bfloat16",
        block_tokens=BLOCK_TOKENS,
    )
    dice, each = random.Random(0), BLOCK_TOKENS // PART_TOKENS
    batch: list[EngineStored] = []
    parent: int | None = None
    for number in range(blocks):
        parent = None if number % 8 == 0 else parent
        hashes = [dice.getrandbits(64) for _ in range(each)]
        batch.append(EngineStored(hashes, parent, os.urandom(4 * BLOCK_TOKENS), PART_TOKENS))
        parent = hashes[-1]
    return EngineChain.of(schema), batch


# -- in a process of its own -----------------------------------------------------------------------


def _fill_index(blocks: int) -> object:
    index, dice = PrefixIndex(), random.Random(0)
    numbers = _instances(index, HOLDERS)
    for _ in range(0, blocks, EVENT_BLOCKS):
        index.add(dice.choice(numbers), keys_of(EVENT_BLOCKS), 0.0)
    return index


def _fill_floor(blocks: int) -> object:
    bare: dict[bytes, None] = {}
    for _ in range(0, blocks, EVENT_BLOCKS):
        bare.update(dict.fromkeys(keys_of(EVENT_BLOCKS)))
    return bare


def _fill_folder(blocks: int) -> object:
    each = BLOCK_TOKENS // PART_TOKENS
    chain, _ = _parts(0)
    folder, dice = Folder(chain, parts_max=2 * blocks), random.Random(0)
    for _ in range(0, blocks, each):
        hashes = [dice.getrandbits(64) for _ in range(each)]
        folder.stored(EngineStored(hashes, None, os.urandom(4 * BLOCK_TOKENS), PART_TOKENS), 0.0)
    return folder


def resident(what: str, blocks: int) -> float:
    """Growth of this process in bytes per block."""
    fill = {"index": _fill_index, "floor": _fill_floor, "folder": _fill_folder}[what]
    fill(1000)
    gc.collect()
    before = resident_bytes()
    filled = fill(blocks)
    gc.collect()
    grown = resident_bytes() - before
    del filled
    return grown / blocks


if __name__ == "__main__":
    print(json.dumps({"per_block": resident(sys.argv[1], int(sys.argv[2]))}))
