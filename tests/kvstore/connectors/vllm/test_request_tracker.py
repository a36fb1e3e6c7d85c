"""The tracker's decisions, one at a time: blocks of 8 tokens in pages of 4."""

from __future__ import annotations

import pickle
from collections import Counter
from typing import TYPE_CHECKING, Any

import pytest
from fakepool import BLOCK, PAGE, SCHEMA

from tiffin.kvstore.client.blocks.block_places import BlockPlaces, RegionId
from tiffin.kvstore.connectors.vllm import request_tracker
from tiffin.kvstore.connectors.vllm.orders import LoadOrder, SaveOrder, StepOrders, StepReport
from tiffin.kvstore.connectors.vllm.request_tracker import RequestTracker, TrackerOptions

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tiffin.kvstore.connectors.vllm.request_tracker import Tier

PROMPT = list(range(40))  # five blocks, ten pages
REGION = RegionId(1, 2)


def places(first: int, stop: int) -> BlockPlaces:
    """Where a prompt's blocks lie: at the thousands."""
    return BlockPlaces(REGION, tuple(range(1000 * first, 1000 * stop, 1000)), 64)


class Engine:
    """What the tracker asks: the pages and tokens of each request."""

    def __init__(self) -> None:
        self.pages: dict[str, list[int]] = {}
        self.tokens: dict[str, list[int]] = {}
        self.changed: set[str] = set()

    def pages_of(self, request_id: str) -> Sequence[int]:
        return self.pages[request_id]

    def tokens_of(self, request_id: str) -> Sequence[int]:
        return self.tokens[request_id]

    def holds(self, request_id: str) -> bool:
        return request_id not in self.changed


class Case:
    """A tracker and its engine, with the calls that vLLM makes in their order."""

    def __init__(self, **options: Any) -> None:
        self.tracker = RequestTracker(TrackerOptions(BLOCK, PAGE, **options))
        self.engine = Engine()

    def add(self, name: str = "r", tokens: Sequence[int] = PROMPT, until: float = 10.0) -> None:
        self.engine.tokens[name] = list(tokens)
        self.tracker.add(name, SCHEMA.prefix(tokens), until)

    def answer(self, blocks: int, name: str = "r", *, tier: Tier = "peer") -> None:
        self.tracker.answered(name, blocks, (tier,) * blocks)

    def hold(self, found: int | None, local: int = 0, *, until: float = 20.0) -> None:
        """The blocks that are to be loaded are asked for; `found` of them are held."""
        prefix = self.tracker.to_hold("r", local, len(self.engine.tokens["r"]))
        assert prefix is not None
        self.tracker.hold_asked("r", prefix, until)
        if found is not None:
            self.tracker.held("r", places(prefix.start, prefix.start + found))

    def match(
        self, local: int = 0, name: str = "r", *, now: float = 0.0
    ) -> tuple[int | None, bool]:
        return self.tracker.matched(name, local, len(self.engine.tokens[name]), now)

    def allocate(self, pages: Sequence[int], external: int = 0, name: str = "r") -> None:
        self.engine.pages[name] = list(pages)
        self.tracker.allocated(name, pages, external, 0)

    def plan(self, tokens: int = 0, name: str = "r", **more: Any) -> StepOrders:
        confirmed = [(name, tokens)] if name in self.tracker else []
        return self.tracker.plan(confirmed, self.engine, **more)

    def finish(self, tokens: int, name: str = "r") -> bool:
        return self.tracker.finished(name, tokens, self.engine)

    def begin(self, pages: Sequence[int] = range(10), name: str = "r", local: int = 0) -> None:
        """A request that the pool does not have, in the step that computes it from `local` on."""
        self.add(name)
        self.answer(0, name)
        assert self.match(local, name) == (0, False)
        self.allocate(pages, name=name)
        self.plan(local, name)


def blocks_of(orders: StepOrders) -> list[tuple[int, int]]:
    """The blocks of each save: where they begin in their prompt, and how many they are."""
    return [(order.prefix.start, len(order.prefix)) for order in orders.saves]


# -- what to load ----------------------------------------------------------------------------------


def test_what_the_pool_has_is_loaded_into_the_requests_pages() -> None:
    case = Case()
    case.add()
    case.answer(3, tier="nvme")
    assert case.match() == (24, True)
    case.allocate(range(100, 110), 24)
    (order,) = case.plan().loads
    pages = tuple(range(100, 106))
    assert order == LoadOrder(order.number, "r", SCHEMA.prefix(PROMPT)[:3], 0, pages)
    assert case.plan().loads == []


def test_a_local_hit_inside_a_block_skips_the_pages_that_the_engine_has() -> None:
    case = Case()
    case.add()
    case.answer(3)
    assert case.match(local=12) == (12, True)
    case.allocate(range(100, 110), 12)
    (order,) = case.plan().loads
    assert (order.prefix.start, len(order.prefix)) == (1, 2)
    assert (order.skipped_pages, order.pages) == (1, (103, 104, 105))


def test_a_hit_that_the_engine_has_itself_loads_nothing() -> None:
    case = Case()
    case.add()
    case.answer(3)
    assert case.match(local=24) == (0, False)


def test_at_least_one_token_is_left_to_compute() -> None:
    case = Case()
    case.add()
    case.answer(5)
    assert case.match() == (39, True)
    case.allocate(range(10), 39)
    (order,) = case.plan().loads
    assert (len(order.prefix), order.pages) == (5, tuple(range(10))), (
        "the last page is loaded whole"
    )
    assert not case.plan(40).saves, "the pool has it"


def test_a_request_waits_for_its_lookup_until_the_deadline() -> None:
    case = Case()
    case.add(until=10.0)
    assert case.match(now=9.9) == (None, False)
    assert case.match(now=10.0) == (0, False)


def test_an_answer_after_the_deadline_comes_too_late() -> None:
    case = Case()
    case.add(until=10.0)
    case.match(now=10.0)
    case.answer(5)
    assert case.match(now=10.1) == (0, False)


def test_a_hit_below_the_minimum_is_computed() -> None:
    for load_tokens_min, loaded in ((16, 16), (17, 0)):
        case = Case(load_tokens_min=load_tokens_min)
        case.add()
        case.answer(3)
        assert case.match(local=8)[0] == loaded


def test_an_unknown_request_loads_and_saves_nothing() -> None:
    case = Case()
    case.engine.tokens["r"] = PROMPT
    case.answer(5)
    assert case.match() == (0, False)
    case.allocate(range(10))
    orders = case.plan(40)
    assert (orders.loads, orders.saves) == ([], [])
    assert not case.finish(40)


# -- what is held ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("loading", "decoding", "synchronous"),
    [
        ("auto", False, True),
        ("auto", True, False),
        ("synchronous", True, True),
        ("asynchronous", False, False),
    ],
)
def test_held_blocks_are_loaded_synchronously_if_that_delays_no_decoding(
    loading: str, decoding: bool, synchronous: bool
) -> None:
    case = Case(loading=loading)
    case.add()
    case.answer(2, tier="dram")
    case.hold(2)
    case.tracker.decoding = decoding
    assert case.match() == (16, not synchronous)
    case.allocate(range(10), 16)
    (order,) = case.plan().loads
    assert (order.synchronous, order.held) == (synchronous, places(0, 2))


@pytest.mark.parametrize("loading", ["auto", "synchronous"])
def test_what_is_not_held_is_never_loaded_synchronously(loading: str) -> None:
    case = Case(loading=loading)
    case.add()
    case.answer(2, tier="dram")
    assert case.match() == (16, True)
    case.allocate(range(10), 16)
    (order,) = case.plan().loads
    assert (order.synchronous, order.held) == (False, None)


def test_only_what_the_engine_lacks_is_held() -> None:
    case = Case()
    case.add()
    case.answer(4, tier="dram")
    prefix = case.tracker.to_hold("r", 12, 40)
    assert prefix is not None
    assert (prefix.start, len(prefix)) == (1, 3)
    assert case.tracker.to_hold("r", 32, 40) is None
    assert case.tracker.to_hold("unknown", 0, 40) is None


@pytest.mark.parametrize("tiers", [("dram", "nvme"), ("dram", "peer")])
def test_blocks_that_do_not_all_lie_in_this_hosts_memory_are_not_held(tiers: Any) -> None:
    case = Case()
    case.add()
    case.tracker.answered("r", 2, tiers)
    assert case.tracker.to_hold("r", 0, 40) is None
    assert case.match() == (16, True)


def test_what_lies_elsewhere_does_not_matter_if_the_engine_has_it_itself() -> None:
    case = Case()
    case.add()
    case.tracker.answered("r", 3, ("peer", "dram", "dram"))
    assert case.tracker.to_hold("r", 8, 40) is not None


def test_a_request_waits_for_its_lease_until_the_deadline() -> None:
    case = Case()
    case.add()
    case.answer(2, tier="dram")
    case.hold(None, until=20.0)
    assert case.match(now=19.9) == (None, False)
    assert case.tracker.to_hold("r", 0, 40) is None  # asked once
    assert case.match(now=20.0) == (16, True)


def test_blocks_that_are_gone_when_they_are_leased_are_computed() -> None:
    case = Case()
    case.add()
    case.answer(4, tier="dram")
    case.hold(3, local=8)  # blocks 1 to 3 of the four
    assert case.match(local=8) == (24, False)
    case.tracker.held("r", places(1, 3))
    assert case.match(local=8) == (16, False)
    case.tracker.held("r", places(1, 1))
    assert case.match(local=8) == (0, False)


def test_a_longer_local_hit_loads_the_rest_of_what_is_held() -> None:
    case = Case()
    case.add()
    case.answer(4, tier="dram")
    case.hold(4)
    assert case.match(local=12) == (20, False)
    case.allocate(range(10), 20)
    (order,) = case.plan().loads
    assert (order.prefix.start, order.held) == (1, places(1, 4))


def test_a_shorter_local_hit_needs_more_than_is_held() -> None:
    case = Case()
    case.add()
    case.answer(4, tier="dram")
    case.hold(2, local=16)
    assert case.match(local=0) == (32, True)
    case.allocate(range(10), 32)
    assert case.plan().loads[0].held is None


def test_without_its_lease_a_request_loads_asynchronously() -> None:
    case = Case()
    case.add()
    case.answer(2, tier="dram")
    case.hold(2)
    assert case.match() == (16, False)
    case.tracker.unheld("r")
    case.tracker.unheld("unknown")
    assert case.match() == (16, True)


def test_a_preempted_request_has_its_blocks_held_anew() -> None:
    case = Case()
    case.add()
    case.answer(2, tier="dram")
    case.hold(2)
    case.tracker.look_again("r", 20.0)
    case.answer(2, tier="dram")
    assert case.match() == (16, True)
    case.hold(2)
    assert case.match() == (16, False)


def test_a_block_that_could_not_be_loaded_is_not_held_again() -> None:
    case = Case()
    case.add()
    case.answer(4, tier="dram")
    case.tracker.reported(StepReport(failed={"r": 2}))
    assert case.tracker.to_hold("r", 0, 40) is None


# -- where it comes from ---------------------------------------------------------------------------


def test_a_load_is_remote_if_another_node_has_one_of_its_blocks() -> None:
    for tiers, remote in ((("dram", "peer"), True), (("dram", "nvme"), False)):
        case = Case()
        case.add()
        case.tracker.answered("r", 2, tiers)
        case.match()
        case.allocate(range(10), 16)
        (order,) = case.plan().loads
        assert order.remote is remote


def test_hit_tokens_are_counted_by_tier_without_what_the_engine_has() -> None:
    case = Case()
    case.add()
    case.tracker.answered("r", 3, ("dram", "nvme", "peer"))
    tokens, _ = case.match(local=PAGE)
    assert tokens == 3 * BLOCK - PAGE
    assert case.tracker.hit_tokens("r", tokens) == {
        "dram": BLOCK - PAGE,
        "nvme": BLOCK,
        "peer": BLOCK,
    }


def test_a_block_that_could_not_be_loaded_is_not_offered_again() -> None:
    case = Case()
    case.add()
    case.answer(4)
    case.match()
    case.allocate(range(10), 32)
    case.plan()
    case.tracker.reported(StepReport(failed={"r": 2}))
    assert case.match() == (16, True)
    case.tracker.reported(StepReport(failed={"r": 0}))
    assert case.match() == (0, False)


def test_an_engine_that_only_saves_loads_nothing() -> None:
    case = Case(loads=False)
    case.add()
    case.answer(5)
    assert case.match() == (0, False)


# -- what to save ----------------------------------------------------------------------------------


def test_a_block_is_saved_once_all_its_tokens_are_confirmed() -> None:
    case = Case()
    case.begin(range(100, 110))
    assert case.plan(7).saves == []
    (order,) = case.plan(17).saves
    assert (order.prefix, order.pages) == (SCHEMA.prefix(PROMPT)[:2], (100, 101, 102, 103))
    assert case.plan(23).saves == []
    (order,) = case.plan(24).saves
    assert (order.prefix.start, order.pages) == (2, (104, 105))


def test_what_was_loaded_is_not_saved_again() -> None:
    case = Case()
    case.add()
    case.answer(3)
    case.match()
    case.allocate(range(10), 24)
    case.plan()
    assert blocks_of(case.plan(40)) == [(3, 2)]


def test_a_block_that_was_computed_in_part_is_saved_as_a_whole() -> None:
    case = Case()
    case.add()
    case.answer(1)
    assert case.match(local=12) == (0, False)
    case.allocate(range(100, 110))
    case.plan(12)
    (order,) = case.plan(16).saves
    assert (order.prefix.start, order.pages) == (1, (102, 103))


def test_what_the_pool_lacks_of_the_engines_own_cache_is_saved_with_the_first_computed_token() -> (
    None
):
    case = Case()
    case.add()
    case.answer(1)
    assert case.match(local=24) == (0, False)
    case.allocate(range(10))
    assert case.plan(24).saves == []  # who computed these may be in a step that has not ended
    assert case.plan(24).saves == []
    (order,) = case.plan(25).saves
    assert (order.prefix.start, len(order.prefix), order.pages) == (1, 2, (2, 3, 4, 5))


def test_a_block_whose_load_failed_is_saved_once_it_is_computed() -> None:
    case = Case()
    case.add()
    case.answer(4)
    case.match()
    case.allocate(range(10), 32)
    case.plan()
    case.tracker.reported(StepReport(failed={"r": 2}))
    case.tracker.allocated("r", range(10), 0, 16)
    case.plan(16)
    assert blocks_of(case.plan(40)) == [(2, 3)]


def test_a_block_is_saved_at_its_second_use_if_that_is_asked_for() -> None:
    case = Case(save="second")
    case.begin(name="first")
    assert case.plan(40, "first").saves == []
    assert not case.finish(40, "first")
    case.add("second", [*PROMPT[:24], *range(100, 116)])
    case.answer(0, "second")
    assert case.match(16, "second") == (0, False)
    case.allocate(range(10), name="second")
    case.plan(16, "second")
    (order,) = case.plan(40, "second").saves
    assert (order.prefix.start, len(order.prefix), order.pages) == (0, 3, (0, 1, 2, 3, 4, 5))
    assert case.plan(40, "second").saves == []


def test_only_the_last_blocks_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(request_tracker, "_SEEN_KEYS", 4)
    case = Case(save="second")
    for name in ("first", "second"):
        case.begin(name=name)
        assert case.plan(40, name).saves == []  # its first block is forgotten each time


def test_blocks_of_generated_tokens_are_saved() -> None:
    case = Case()
    case.begin()
    case.plan(40)
    case.engine.tokens["r"] += [7] * 9
    case.engine.pages["r"] += [10, 11, 12]
    (order,) = case.plan(48).saves
    assert order.prefix.keys == SCHEMA.prefix(case.engine.tokens["r"])[5:6].keys
    assert order.pages == (10, 11)


def test_an_engine_that_only_loads_saves_nothing() -> None:
    case = Case(saves=False)
    case.begin()
    assert case.plan(40).saves == []
    assert not case.finish(40)


def test_a_short_prompt_is_not_saved() -> None:
    case = Case(save_tokens_min=20)
    case.begin()
    assert case.plan(19).saves == []
    assert blocks_of(case.plan(20)) == [(0, 2)]
    assert blocks_of(case.plan(24)) == [(2, 1)]


def test_pages_whose_content_has_changed_are_not_saved() -> None:
    """As with an adapter's weights: what was saved before the change was right."""
    case = Case()
    case.begin()
    assert blocks_of(case.plan(8)) == [(0, 1)]
    case.engine.changed.add("r")
    assert case.plan(24).saves == []
    case.engine.changed.clear()
    assert blocks_of(case.plan(32)) == [(3, 1)]


# -- ends ------------------------------------------------------------------------------------------


def test_pages_of_a_finished_request_are_kept_until_its_last_blocks_are_saved() -> None:
    case = Case()
    case.begin()
    assert case.finish(40)
    orders = case.plan()
    assert (blocks_of(orders), orders.finished) == ([(0, 5)], ["r"])
    assert case.plan().finished == []
    assert "r" not in case.tracker


def test_pages_are_kept_while_an_earlier_save_is_not_ended_by_every_rank() -> None:
    for ranks, kept in ((2, False), (1, True)):
        case = Case(ranks=2)
        case.begin()
        (order,) = case.plan(40).saves
        case.tracker.reported(StepReport(ended_saves=Counter({order.number: ranks})))
        assert case.finish(40) is kept


def test_pages_without_a_save_are_freed_at_once() -> None:
    case = Case()
    case.begin()
    assert not case.finish(7)
    assert case.plan().finished == []


def test_saves_of_a_preempted_request_are_drained_before_its_pages_are_overwritten() -> None:
    case = Case()
    case.begin()
    case.plan(40)
    assert case.plan(preempted=["r"]).preempted == ["r"]


def test_a_preempted_request_without_saves_needs_no_drain() -> None:
    case = Case()
    case.begin()
    assert case.plan(preempted=["r"]).preempted == []


def test_a_request_that_is_aborted_after_its_preemption_has_no_pages_to_keep() -> None:
    """vLLM frees what it was loading when the load ends; a second end of it would be an error."""
    case = Case()
    case.begin()
    case.plan(40)
    case.plan(preempted=["r"])
    assert not case.finish(0)
    assert case.plan().finished == []


def test_a_preempted_request_is_looked_up_again() -> None:
    case = Case()
    case.begin()
    case.plan(16, preempted=["r"])
    prefix = case.tracker.look_again("r", 20.0)
    assert prefix is not None
    assert prefix.keys == SCHEMA.prefix(PROMPT).keys
    assert case.match(now=11.0) == (None, False)
    case.answer(2)
    assert case.match(now=11.0) == (16, True)
    assert case.tracker.look_again("unknown", 20.0) is None


# -- reports of several ranks ----------------------------------------------------------------------


def test_a_load_failed_if_it_failed_in_any_rank() -> None:
    one = StepReport({"a": 3, "b": 1}, Counter([1]), Counter([5]), Counter([REGION]))
    other = StepReport({"a": 2, "c": 0}, Counter([1, 2]), Counter([5]), Counter([REGION]))
    both = Counter({1: 2, 2: 1}), Counter({5: 2}), Counter({REGION: 2})
    assert one.joined(other) == other.joined(one) == StepReport({"a": 2, "b": 1, "c": 0}, *both)


def test_a_save_failed_if_it_failed_in_any_rank() -> None:
    one = StepReport(ended_saves=Counter([1, 2]), failed_saves=frozenset({1}))
    other = StepReport(ended_saves=Counter([1, 2]), failed_saves=frozenset({2}))
    assert one.joined(other).failed_saves == {1, 2}


def test_orders_arrive_in_another_process_as_they_were() -> None:
    prefix = SCHEMA.prefix(PROMPT)
    load = LoadOrder(3, "a", prefix[1:3], 1, (1, 2, 3), places(1, 3), synchronous=True)
    saves = [SaveOrder(1, "b", prefix[:2], (1, 2, 3, 4))]
    orders = StepOrders(7, True, [load], saves, ["c"], ["d"], [REGION])
    assert pickle.loads(pickle.dumps(orders)) == orders


def test_an_empty_report_is_false() -> None:
    assert not StepReport()
    assert StepReport(failed={"a": 0})
    assert StepReport(ended_saves=Counter([0]))
    assert StepReport(ended_loads=Counter([0]))
    assert StepReport(mapped=Counter([REGION]))
