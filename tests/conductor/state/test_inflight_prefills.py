"""The request that computes the longest prefix is found, and never one that has ended."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from tiffin.conductor.errors import InvalidRequest
from tiffin.conductor.state import inflight_prefills
from tiffin.conductor.state.inflight_prefills import LATE_S_MIN, OWNERS_MAX, Computed, Computing

if TYPE_CHECKING:
    from collections.abc import Sequence


def chain(*tokens: int) -> tuple[bytes, ...]:
    """Chained keys: each stands for all blocks up to its own."""
    return tuple(bytes(tokens[: at + 1]).ljust(16, b"\xff") for at in range(len(tokens)))


def begin(
    work: Computing, name: str, keys: Sequence[bytes], start: int = 0, ready_at: float = 10.0
) -> None:
    work.begin(name, 0, 0, keys, start, ready_at, 0.0)


def test_the_longest_shared_prefix_is_found() -> None:
    work = Computing()
    work.begin("short", 1, 7, chain(1, 2), 0, 5.0, 0.0)
    work.begin("long", 2, 7, chain(1, 2, 3, 4), 0, 6.0, 0.0)
    assert work.match(chain(1, 2, 3, 9), 0.0) == Computed("long", 2, 3, 6.0)
    assert work.match(chain(1, 2, 3, 4, 5), 0.0) == ("long", 2, 4, 6.0)
    assert work.match(chain(1, 9), 0.0) == ("short", 1, 1, 5.0), "ready first"
    assert work.match(chain(9), 0.0) is None
    assert work.match((), 0.0) is None


def test_cached_blocks_are_not_computed_but_count_as_part_of_the_prefix() -> None:
    work = Computing()
    begin(work, "a", chain(1, 2, 3, 4), start=2)
    assert work.match(chain(1, 2), 0.0) is None, "these were there before"
    found = work.match(chain(1, 2, 3), 0.0)
    assert found is not None
    assert found.blocks == 3


def test_nobody_computes_what_is_all_cached() -> None:
    work = Computing()
    begin(work, "a", chain(1, 2), start=2)
    assert len(work) == work.blocks == 0
    for start in (-1, 3):
        with pytest.raises(InvalidRequest, match=f"block {start} of 2"):
            begin(work, "a", chain(1, 2), start=start)


def test_two_compute_the_same_until_both_have_ended() -> None:
    work = Computing()
    begin(work, "a", chain(1, 2), ready_at=3.0)
    begin(work, "b", chain(1, 2), ready_at=4.0)
    for name in ("a", "b"):
        found = work.match(chain(1, 2), 0.0)
        assert found is not None
        assert found.request_id == name
        work.end(name)
        work.end(name)
    assert work.match(chain(1, 2), 0.0) is None
    assert work.blocks == 0


def test_beginning_again_replaces() -> None:
    work = Computing()
    begin(work, "a", chain(1, 2, 3))
    begin(work, "a", chain(5))
    assert work.match(chain(1, 2, 3), 0.0) is None
    assert work.blocks == len(work) == 1


def test_the_late_are_not_waited_for() -> None:
    work = Computing()
    begin(work, "a", chain(1), ready_at=10.0)
    begin(work, "quick", chain(2), ready_at=0.01)
    assert work.match(chain(1), 15.0) == ("a", 0, 1, 15.0), "late, and never in the past"
    assert work.match(chain(1), 20.1) is None
    assert work.match(chain(2), 0.01 + LATE_S_MIN) is not None
    assert work.expire(5.0) == ["quick"]
    assert work.expire(20.1) == ["a"]
    assert len(work) == work.blocks == 0


def test_who_is_late_does_not_hide_who_is_not() -> None:
    work = Computing()
    begin(work, "late", chain(1, 2, 3), ready_at=1.0)
    work.begin("other", 3, 0, chain(1, 2), 0, 9.0, 0.0)
    assert work.match(chain(1, 2, 3), 5.0) == ("other", 3, 2, 9.0)


def test_instances_and_nodes_leave() -> None:
    work = Computing()
    for at in range(6):
        work.begin(f"r{at}", at % 3, at % 2, chain(at + 1), 0, 9.0, 0.0)
    assert work.leave(row=1) == ["r1", "r4"]
    assert work.leave(node=0) == ["r0", "r2"]
    assert work.leave() == []
    assert len(work) == 2


def test_a_herd_on_one_prompt_costs_little() -> None:
    work = Computing()
    for at in range(5 * OWNERS_MAX):
        begin(work, f"r{at}", chain(1, 2, 3), ready_at=10.0 + at)
    assert len(work._owners[chain(1)[0]]) == OWNERS_MAX
    for at in range(5 * OWNERS_MAX):
        work.end(f"r{at}")
    assert len(work) == work.blocks == 0


def test_blocks_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inflight_prefills, "KEYS_MAX", 4)
    work = Computing()
    begin(work, "a", chain(1, 2, 3))
    begin(work, "b", chain(4, 5, 6))
    assert work.blocks == 3
    begin(work, "c", chain(7))
    assert work.blocks == 4


class AgainstPlainLoops(RuleBasedStateMachine):
    """Few tokens, so that prompts share much; and few request ids, so that they are reused."""

    def __init__(self) -> None:
        super().__init__()
        self.work = Computing()
        self.now = 0.0
        self.model: dict[str, tuple[tuple[bytes, ...], int, float, float]] = {}

    @rule(
        name=st.sampled_from("abcdef"),
        tokens=st.lists(st.integers(0, 1), min_size=1, max_size=6),
        start=st.integers(0, 6),
        wait_s=st.floats(0, 20),
    )
    def begin(self, name: str, tokens: list[int], start: int, wait_s: float) -> None:
        keys, start = chain(*tokens), min(start, len(tokens))
        ready_at = self.now + wait_s
        self.work.begin(name, ord(name), 0, keys, start, ready_at, self.now)
        self.model[name] = keys, start, ready_at, ready_at + max(LATE_S_MIN, wait_s)
        if start == len(keys):
            del self.model[name]

    @rule(name=st.sampled_from("abcdef"))
    def end(self, name: str) -> None:
        self.work.end(name)
        self.model.pop(name, None)

    @rule(seconds=st.floats(0, 10))
    def wait(self, seconds: float) -> None:
        self.now += seconds

    @rule()
    def expire(self) -> None:
        late = {name for name, work in self.model.items() if self.now > work[3]}
        assert set(self.work.expire(self.now)) == late
        for name in late:
            del self.model[name]

    @rule(tokens=st.lists(st.integers(0, 1), max_size=7))
    def match(self, tokens: list[int]) -> None:
        prompt, best = chain(*tokens), 0
        ready_at = 0.0
        for keys, start, ready, believed_until in self.model.values():
            if self.now > believed_until:
                continue
            shared = 0
            while shared < min(len(keys), len(prompt)) and keys[shared] == prompt[shared]:
                shared += 1
            ready = max(ready, self.now)
            if shared > start and (shared > best or (shared == best and ready < ready_at)):
                best, ready_at = shared, ready
        found = self.work.match(prompt, self.now)
        if not best:
            assert found is None
        else:
            assert found is not None
            assert (found.blocks, found.ready_at) == (best, ready_at)
            assert found.row == ord(found.request_id)

    @invariant()
    def nothing_is_left_behind(self) -> None:
        assert len(self.work) == len(self.model)
        keys = {key for keys, start, _, _ in self.model.values() for key in keys[start:]}
        assert self.work.blocks == len(keys)


TestAgainstPlainLoops = AgainstPlainLoops.TestCase


@given(st.integers(0, 40), st.integers(1, 40))
def test_found_wherever_it_ends(shared: int, length: int) -> None:
    work = Computing()
    mine = chain(*range(1, length + 1))
    begin(work, "a", mine)
    found = work.match((*mine[:shared], *chain(*range(100, 110))), 0.0)
    assert (found.blocks if found else 0) == min(shared, length)
