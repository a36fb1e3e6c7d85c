"""The regrouper of an engine's blocks against a simple reference: pool blocks whose parts are all
held."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tiffin.conductor.errors import InvalidRequest
from tiffin.conductor.events import block_regrouper
from tiffin.conductor.events.block_regrouper import (
    Change,
    EngineChain,
    EngineRemoved,
    EngineStored,
    Folder,
)
from tiffin.conductor.events.prompt_starts import PromptStarts
from tiffin.conductor.state.part_keys import part_keys
from tiffin.kvstore import KVSchema

PART = 16
SCHEMA = KVSchema.gqa(
    model="folded", layers=1, kv_heads=1, head_dim=8, dtype="bfloat16", block_tokens=64
)
CHAIN = EngineChain.of(SCHEMA, b"secret")
PARTS = SCHEMA.block_tokens // PART


def tokens_of(prompt: list[int]) -> bytes:
    return np.array(prompt, "<u4").tobytes()


def prompt_of(*seeds: int) -> list[int]:
    """A part of tokens per seed."""
    return [1000 * seed + n for seed in seeds for n in range(PART)]


def hashes_of(prompt: list[int], salt: str = "") -> list[int]:
    """The engine's hashes of the parts: opaque, chained."""
    names, before = [], hash(salt)
    for at in range(0, len(prompt) - PART + 1, PART):
        before = hash((before, *prompt[at : at + PART])) & (1 << 64) - 1
        names.append(before)
    return names


def keys_of(prompt: list[int], namespace: str = "") -> list[bytes]:
    return list(SCHEMA.prefix(prompt, namespace=namespace, secret=b"secret").keys)


def part_keys_of(prompt: list[int], block: int = 0) -> list[bytes]:
    prefix = SCHEMA.prefix(prompt, secret=b"secret")
    return list(part_keys(prefix, b"secret", min(block, len(prefix))))


class BlockFolder(Folder):
    """Tells the changes of blocks, without those of parts."""

    def stored(self, event: EngineStored, now: float) -> list[Change]:
        return [change for change in super().stored(event, now) if not change.parts]

    def removed(self, event: EngineRemoved) -> list[Change]:
        return [change for change in super().removed(event) if not change.parts]


def stored(
    prompt: list[int], start: int = 0, stop: int | None = None, **fields: object
) -> EngineStored:
    """The event for parts [start, stop) of a prompt."""
    names = hashes_of(prompt)
    stop = len(names) if stop is None else stop
    return EngineStored(
        names[start:stop],
        names[start - 1] if start else None,
        tokens_of(prompt[start * PART : stop * PART]),
        PART,
        **fields,  # type: ignore[arg-type]
    )


def test_a_key_is_held_when_its_last_part_comes() -> None:
    folder, prompt = BlockFolder(CHAIN), prompt_of(*range(9))
    keys = keys_of(prompt)
    assert folder.stored(stored(prompt, 0, 3), 0.0) == []
    assert folder.stored(stored(prompt, 3, 7), 0.0) == [Change("hbm", True, keys[:1])]
    assert folder.stored(stored(prompt, 7), 0.0) == [Change("hbm", True, keys[1:2])]
    assert folder.keys("hbm") == keys
    assert folder.keys("dram") == []


def test_a_key_is_lost_with_any_of_its_parts_and_can_come_back() -> None:
    folder, prompt = BlockFolder(CHAIN), prompt_of(*range(8))
    keys, names = keys_of(prompt), hashes_of(prompt)
    folder.stored(stored(prompt), 0.0)
    assert folder.removed(EngineRemoved(names[5:6])) == [Change("hbm", False, keys[1:])]
    assert folder.removed(EngineRemoved(names[6:7])) == []
    assert folder.stored(stored(prompt, 5, 6), 0.0) == []
    assert folder.stored(stored(prompt, 6, 7), 0.0) == [Change("hbm", True, keys[1:])]
    folder.removed(EngineRemoved(names))
    assert (len(folder), folder.keys("hbm")) == (0, [])
    # The same blocks again, from an empty state.
    assert folder.stored(stored(prompt), 0.0) == [Change("hbm", True, keys)]


def test_prompts_that_part_inside_a_block_share_parts_and_not_keys() -> None:
    folder = BlockFolder(CHAIN)
    one, other = prompt_of(1, 2, 3, 4), prompt_of(1, 2, 5, 6)
    folder.stored(stored(one), 0.0)
    assert folder.stored(stored(other, 2), 0.0) == [Change("hbm", True, keys_of(other))]
    lost = folder.removed(EngineRemoved(hashes_of(one)[1:2]))
    assert [change.added for change in lost] == [False]
    assert sorted(lost[0].keys) == sorted(keys_of(one) + keys_of(other))
    back = folder.stored(stored(one, 1, 2), 0.0)
    assert sorted(back[0].keys) == sorted(keys_of(one) + keys_of(other))
    folder.removed(EngineRemoved(hashes_of(one)[2:]))
    assert folder.keys("hbm") == keys_of(other)


def test_what_comes_before_its_parent_waits_for_it() -> None:
    folder, prompt = BlockFolder(CHAIN), prompt_of(*range(12))
    keys = keys_of(prompt)
    assert folder.stored(stored(prompt, 8), 0.0) == []
    assert folder.stored(stored(prompt, 3, 8), 0.0) == []
    assert folder.waiting_parts == 9
    folder.removed(EngineRemoved(hashes_of(prompt)[11:]))  # the last part is evicted while waiting
    assert folder.stored(stored(prompt, 0, 3), 0.0)[0] == Change("hbm", True, keys)
    assert folder.keys("hbm") == keys[:2]
    assert (folder.waiting_parts, folder.counts.unknown_parents) == (0, 9)


def test_who_listens_late_hears_of_no_roots_and_waits_within_bounds(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(block_regrouper, "WAITING_MAX", 100)
    folder = BlockFolder(CHAIN)
    for seed in range(100):
        prompt = prompt_of(seed, 1, 2, 3)
        assert folder.stored(stored(prompt, 1), float(seed)) == []
        assert folder.waiting_parts <= 100
    # Repetitions do not accumulate memory either.
    for _ in range(100):
        folder.stored(stored(prompt, 1), 100.0)
        assert folder.waiting_parts <= 100
    folder.stored(stored(prompt_of(7)), 100.0 + block_regrouper.WAITING_S)
    assert (folder.waiting_parts, len(folder._waiting_for)) == (0, 0)
    assert folder.counts.expired_parts == folder.counts.unknown_parents


def test_copies_are_counted_unless_told_otherwise() -> None:
    """An engine may hold the same block several times, and reports every eviction."""
    prompt = prompt_of(*range(4))
    lost = [Change("hbm", False, keys_of(prompt))]
    event, removal = stored(prompt), EngineRemoved(hashes_of(prompt)[3:])
    folder = BlockFolder(CHAIN)
    folder.stored(event, 0.0)
    folder.stored(event, 0.0)
    folder.stored(event, 0.0)
    assert folder.removed(removal) == folder.removed(removal) == []
    assert folder.removed(removal) == lost
    folder.stored(stored(prompt, 3), 0.0)
    folder.stored(stored(prompt, 3), 0.0)
    # An event that says how many copies are left overrides the count.
    assert folder.removed(EngineRemoved(hashes_of(prompt)[3:], copies=[0])) == lost
    folder = BlockFolder(CHAIN, counts_copies=False)
    folder.stored(event, 0.0)
    folder.stored(event, 0.0)
    assert folder.removed(removal) == lost


def test_tiers_are_apart_and_may_be_named_without_tokens() -> None:
    folder, prompt = BlockFolder(CHAIN), prompt_of(*range(8))
    keys, names = keys_of(prompt), hashes_of(prompt)
    folder.stored(stored(prompt), 0.0)
    offloaded = EngineStored(names[:4], None, b"", 0, "dram")
    assert folder.stored(offloaded, 0.0) == [Change("dram", True, keys[:1])]
    folder.removed(EngineRemoved(names))
    assert (folder.keys("hbm"), folder.keys("dram")) == ([], keys[:1])
    assert folder.stored(EngineStored([1, 2], None, b"", 0, "dram"), 0.0) == []
    assert folder.counts.unknown_parts == 2


def test_namespaces_and_what_has_no_key() -> None:
    folder, prompt = BlockFolder(CHAIN), prompt_of(*range(8))
    assert folder.stored(stored(prompt, namespace="lora:x"), 0.0) == [
        Change("hbm", True, keys_of(prompt, "lora:x"))
    ]
    other = prompt_of(*range(20, 28))
    folder.stored(stored(other, 4), 0.0)  # waits
    assert folder.stored(stored(other, 0, 4, namespace=None), 0.0) == []
    assert folder.stored(stored(prompt_of(*range(20, 30)), 8), 0.0) == []
    assert (folder.waiting_parts, folder.counts.foreign_parts) == (0, 10)
    assert folder.removed(EngineRemoved(hashes_of(other))) == []


def test_what_makes_no_sense_is_refused() -> None:
    folder, prompt = BlockFolder(CHAIN), prompt_of(*range(4))
    with pytest.raises(InvalidRequest, match="all tokens of all blocks"):
        folder.stored(EngineStored([1, 2], None, tokens_of(prompt), PART), 0.0)
    with pytest.raises(InvalidRequest, match="no tier"):
        folder.stored(EngineStored([1], None, b"", 0, "tape"), 0.0)
    # Blocks of 24 tokens do not divide blocks of 64, and sizes cannot be mixed.
    assert folder.stored(EngineStored([1], None, tokens_of(list(range(24))), 24), 0.0) == []
    folder.stored(stored(prompt), 0.0)
    assert folder.stored(EngineStored([5], None, tokens_of(list(range(32))), 32), 0.0) == []
    assert folder.counts.refused_parts == 2
    assert folder.refused_sizes == {
        "blocks of 24 tokens, in a pool of 64,": 1,
        "blocks of 32 tokens, in a pool of 64,": 1,
    }
    assert folder.stored(EngineStored([], None, b"", 0), 0.0) == []


def test_memory_is_bounded_and_the_oldest_pages_leave() -> None:
    folder = BlockFolder(CHAIN, parts_max=40)
    for seed in range(50):
        prompt = prompt_of(*range(4 * seed, 4 * seed + 4))
        changes = folder.stored(stored(prompt), 0.0)
        assert changes[0] == Change("hbm", True, keys_of(prompt))
        assert len(folder) <= 40
    assert changes[1] == Change("hbm", False, keys_of(prompt_of(*range(156, 160))))
    assert len(folder.keys("hbm")) == 10


def test_a_block_of_the_engine_may_be_as_large_as_ours() -> None:
    folder, prompt = BlockFolder(CHAIN), list(range(128))
    event = EngineStored([1, 2], None, tokens_of(prompt), 64)
    assert folder.stored(event, 0.0) == [Change("hbm", True, keys_of(prompt))]


@dataclass
class Reference:
    """The reference: all prompts ever seen, and the number of held copies of each part."""

    copies: dict[int, int] = field(default_factory=dict)

    def keys(self, prompts: list[list[int]]) -> set[bytes]:
        found = set()
        for prompt in prompts:
            names = hashes_of(prompt)
            for at, key in enumerate(keys_of(prompt)):
                parts = names[at * PARTS : (at + 1) * PARTS]
                if all(self.copies.get(part, 0) for part in parts):
                    found.add(key)
        return found

    def part_keys(self, prompts: list[list[int]], block: int) -> set[bytes]:
        """Of the leading parts of a block that are held; of a later block than the first only if
        not all are."""
        found = set()
        for prompt in prompts:
            names = hashes_of(prompt)[block * PARTS : (block + 1) * PARTS]
            held = next((n for n, p in enumerate(names) if not self.copies.get(p)), len(names))
            if held < PARTS or not block:
                found |= set(part_keys_of(prompt, block)[:held])
        return found


@given(st.integers(0, 2**32), st.integers(1, 60))
def test_any_history_of_an_engine_gives_the_keys_whose_parts_are_all_held(
    seed: int, events: int
) -> None:
    """An engine stores blocks after those that it has, evicts any, and may repeat both."""
    dice = random.Random(seed)
    prompts = [
        prompt_of(*(dice.choice((0, 1, 2 + at)) for at in range(dice.randrange(1, 11))))
        for _ in range(4)
    ]
    folder, reference = Folder(CHAIN), Reference()
    seen: dict[bool, set[bytes]] = {False: set(), True: set()}  # of blocks, and of parts
    for _ in range(events):
        prompt = dice.choice(prompts)
        names = hashes_of(prompt)
        if dice.random() < 0.6:
            known = next((n for n, p in enumerate(names) if not reference.copies.get(p)), 0)
            start, stop = dice.randrange(known + 1), dice.randrange(len(names)) + 1
            if start >= stop:
                continue
            changes = folder.stored(stored(prompt, start, stop), 0.0)
            for part in names[start:stop]:
                reference.copies[part] = reference.copies.get(part, 0) + 1
        else:
            gone = [part for part in set(names) if dice.random() < 0.3]
            changes = folder.removed(EngineRemoved(gone))
            for part in gone:
                reference.copies[part] = max(0, reference.copies.get(part, 0) - 1)
        for change in changes:
            known_keys = seen[change.parts]
            (known_keys.update if change.added else known_keys.difference_update)(change.keys)
        assert set(folder.keys("hbm")) == seen[False] == reference.keys(prompts)
        assert set(folder.starts.keys()) == seen[True]
        first = reference.part_keys(prompts, 0)
        # A prompt that goes on elsewhere than a full block may not have been stored itself.
        behind = set[bytes]().union(*(reference.part_keys(prompts, n) for n in (1, 2)))
        assert first <= seen[True] <= first | behind
        assert folder.waiting_parts == 0
    folder.removed(EngineRemoved([part for part, n in reference.copies.items() for _ in range(n)]))
    assert (len(folder), folder._pages, folder._copies) == (0, {}, {})
    assert (len(folder.starts), folder.starts._starts) == (0, {})


def test_the_first_parts_have_keys_before_their_block_is_full() -> None:
    """Two prompts that share two parts of four: both parts leave when neither needs them."""
    folder, prompt, other = Folder(CHAIN), prompt_of(0, 1, 2), prompt_of(0, 1, 7)
    one, two = part_keys_of(prompt), part_keys_of(other)
    assert (len(one), one[:2]) == (3, two[:2])
    assert folder.stored(stored(prompt), 0.0) == [Change("hbm", True, one, parts=True)]
    assert folder.stored(stored(other, 2), 0.0) == [Change("hbm", True, two[2:], parts=True)]
    tail, other_tail, shared = hashes_of(prompt)[2:], hashes_of(other)[2:], hashes_of(prompt)[:2]
    assert folder.removed(EngineRemoved(tail)) == [Change("hbm", False, one[2:], parts=True)]
    assert folder.removed(EngineRemoved(other_tail)) == [Change("hbm", False, two[2:], parts=True)]
    assert folder.removed(EngineRemoved(shared[1:])) == [Change("hbm", False, one[1:2], parts=True)]
    assert folder.removed(EngineRemoved(shared[:1])) == [Change("hbm", False, one[:1], parts=True)]


def test_a_later_block_has_parts_until_it_is_full() -> None:
    """As a conversation goes on: its last block is full with the next prompt."""
    folder, prompt = Folder(CHAIN), prompt_of(*range(8))
    folder.stored(stored(prompt, 0, 4), 0.0)
    first, second = part_keys_of(prompt), part_keys_of(prompt, 1)
    assert set(folder.starts.keys()) == set(first)
    folder.stored(stored(prompt, 4, 6), 0.0)
    assert set(folder.starts.keys()) == {*first, *second[:2]}
    changes = folder.stored(stored(prompt, 6, 8), 0.0)
    assert Change("hbm", False, second[:2], parts=True) in changes
    assert set(folder.starts.keys()) == set(first)
    folder.removed(EngineRemoved(hashes_of(prompt)[7:]))
    assert set(folder.starts.keys()) == {*first, *second}
    folder.reset()
    assert folder.starts.keys() == []


def test_parts_behind_a_gap_and_parts_in_other_tiers_have_no_keys() -> None:
    folder, prompt = Folder(CHAIN), prompt_of(0, 1, 2)
    folder.stored(stored(prompt), 0.0)
    folder.removed(EngineRemoved(hashes_of(prompt)[:1]))
    assert folder.starts.keys() == []
    (back,) = folder.stored(stored(prompt, 0, 1), 0.0)
    assert back.keys == part_keys_of(prompt)
    assert Folder(CHAIN).stored(stored(prompt, tier="dram"), 0.0) == []


@pytest.mark.parametrize("part_tokens", [8, 32, 48])
def test_engines_with_other_block_sizes_have_the_same_keys(part_tokens: int) -> None:
    schema = KVSchema.gqa(
        model="folded", layers=1, kv_heads=1, head_dim=8, dtype="bfloat16", block_tokens=96
    )
    folder, prompt = Folder(EngineChain.of(schema)), list(range(144))
    count = len(prompt) // part_tokens
    tokens = tokens_of(prompt[: count * part_tokens])
    event = EngineStored(list(range(1, count + 1)), None, tokens, part_tokens)
    folder.stored(event, 0.0)
    keys = list(part_keys(schema.prefix(prompt)))
    assert len(keys) == 5  # those of 96 tokens, less the block's own end
    behind = part_keys(schema.prefix(prompt), after=1)[: count * part_tokens // 16 - 6]
    assert folder.starts.keys() == [*keys, *behind]
    folder.removed(EngineRemoved([2]))
    assert set(folder.starts.keys()) == {*keys[: part_tokens // 16], *behind}


def test_an_engines_part_keys_are_bounded_and_a_shared_start_stays() -> None:
    starts: PromptStarts[int] = PromptStarts(SCHEMA.block_tokens, CHAIN.follow, keys_max=10)
    known: set[bytes] = set()
    root, system = CHAIN.root(""), part_keys_of(prompt_of(0))
    for number in range(100):
        prompt = prompt_of(0, 2 * number + 1, 2 * number + 2)
        fresh, gone = starts.hold(number, root, tokens_of(prompt), len(prompt))
        known |= set(fresh)
        known -= {*gone, *starts.evict()}
        assert len(starts) == len(known) <= 10
        assert set(starts.keys()) == known >= {*system, *part_keys_of(prompt)}
    assert part_keys_of(prompt_of(0, 191, 192))[1] not in known
