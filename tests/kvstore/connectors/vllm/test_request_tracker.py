"""The tracker's decisions, one at a time: blocks of 8 tokens in pages of 4."""

from __future__ import annotations

import pickle
from typing import TYPE_CHECKING, Any

import pytest
from fakepool import BLOCK, PAGE, SCHEMA

from tiffin.kvstore.connectors.vllm.orders import LoadOrder, SaveOrder, StepOrders, StepReport
from tiffin.kvstore.connectors.vllm.request_tracker import RequestTracker, TrackerOptions

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tiffin.kvstore.connectors.vllm.request_tracker import Tier

PROMPT = list(range(40))  # five blocks, ten pages


class Engine:
    """What the tracker asks: the pages and tokens of each request."""

    def __init__(self) -> None:
        self.pages: dict[str, list[int]] = {}
        self.tokens: dict[str, list[int]] = {}

    def pages_of(self, request_id: str) -> Sequence[int]:
        return self.pages[request_id]

    def tokens_of(self, request_id: str) -> Sequence[int]:
        return self.tokens[request_id]


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

    def match(
        self, local: int = 0, name: str = "r", *, now: float = 0.0
    ) -> tuple[int | None, bool]:
        return self.tracker.matched(name, local, len(self.engine.tokens[name]), now)

    def allocate(self, pages: Sequence[int], external: int = 0, name: str = "r") -> None:
        self.engine.pages[name] = list(pages)
        self.tracker.allocated(name, pages, external, 0)

    def plan(self, tokens: int = 0, name: str = "r", **more: Any) -> StepOrders:
        confirmed = [(name, tokens)] if tokens else []
        return self.tracker.plan(confirmed, self.engine, **more)

    def finish(self, tokens: int, name: str = "r") -> bool:
        return self.tracker.finished(name, tokens, self.engine)

    def begin(self, pages: Sequence[int] = range(10), name: str = "r", local: int = 0) -> None:
        """A request that the pool does not have, and that is computed from `local` on."""
        self.add(name)
        self.answer(0, name)
        assert self.match(local, name) == (0, False)
        self.allocate(pages, name=name)


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
    assert order == LoadOrder("r", SCHEMA.prefix(PROMPT)[:3], 0, tuple(range(100, 106)), False)
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
    assert case.match() == (36, True)  # whole pages
    case.allocate(range(10), 36)
    (order,) = case.plan().loads
    assert (len(order.prefix), order.pages) == (5, tuple(range(9)))


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


@pytest.mark.parametrize(
    ("loading", "tier", "decoding", "asynchronous"),
    [
        ("auto", "dram", False, False),
        ("auto", "dram", True, True),
        ("auto", "nvme", False, True),
        ("auto", "peer", False, True),
        ("synchronous", "peer", True, False),
        ("asynchronous", "dram", False, True),
    ],
)
def test_a_load_is_synchronous_if_it_is_fast_and_delays_no_decoding(
    loading: str, tier: Tier, decoding: bool, asynchronous: bool
) -> None:
    case = Case(loading=loading)
    case.add()
    case.answer(2, tier=tier)
    case.tracker.decoding = decoding
    assert case.match() == (16, asynchronous)
    case.allocate(range(10), 16)
    (order,) = case.plan().loads
    assert order.synchronous is not asynchronous


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
    case.begin(range(100, 110), local=12)
    (order,) = case.plan(16).saves
    assert (order.prefix.start, order.pages) == (1, (102, 103))


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
        case.tracker.reported(StepReport(ended_saves={order.number: ranks}))
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


# -- failed loads ----------------------------------------------------------------------------------


def loaded_badly(**options: Any) -> Case:
    """A request whose synchronous load of pages 100 to 105 failed from page 102 on, while another
    request in the same step computed with them."""
    case = Case(loading="synchronous", **options)
    case.add()
    case.answer(3)
    case.match()
    case.allocate(range(100, 110), 24)
    case.begin([100, 101, 102, 103, 104, 105, 206, 207, 208, 209], "shares", local=24)
    case.plan()
    case.tracker.reported(StepReport(failed={"r": 1}, tainted_pages={102, 103, 104, 105}))
    return case


@pytest.mark.parametrize("name", ["r", "shares"])
def test_nothing_behind_a_tainted_page_is_saved(name: str) -> None:
    case = loaded_badly()
    assert case.plan(40, name).saves == []
    assert not case.finish(40, name)


def test_a_last_save_is_dropped_if_its_pages_turn_out_to_be_tainted() -> None:
    case = Case()
    case.begin()
    assert case.finish(40)
    case.tracker.reported(StepReport(tainted_pages={3}))
    orders = case.plan()
    assert (orders.saves, orders.finished) == ([], ["r"])


def test_a_tainted_page_is_clean_when_a_running_request_gets_it_to_compute() -> None:
    case = loaded_badly()
    case.begin([300, 301, 302, 303, 304, 305, 306, 307], "next")
    case.engine.pages["next"] += [102, 103]
    case.plan(32, "next", new_pages=[102, 103])
    assert blocks_of(case.plan(40, "next")) == [(4, 1)]


@pytest.mark.parametrize("external", [0, 8])
def test_a_tainted_page_is_clean_when_a_new_request_gets_it(external: int) -> None:
    case = loaded_badly()
    case.add("next")
    case.answer(external // BLOCK, "next")
    case.match(name="next")
    case.allocate([102, 103, 104, 105, *range(300, 306)], external, "next")
    case.plan()
    assert blocks_of(case.plan(40, "next")) == [(external // BLOCK, 5 - external // BLOCK)]


def test_a_tainted_page_stays_tainted_for_a_request_that_shares_it() -> None:
    case = loaded_badly()
    case.begin([100, 101, 102, 103, *range(300, 306)], "next", local=16)
    assert case.plan(40, "next").saves == []


# -- reports of several ranks ----------------------------------------------------------------------


def test_a_load_failed_if_it_failed_in_any_rank() -> None:
    one = StepReport({"a": 3, "b": 1}, {5}, {1: 1})
    other = StepReport({"a": 2, "c": 0}, {6}, {1: 1, 2: 1})
    joined = StepReport({"a": 2, "b": 1, "c": 0}, {5, 6}, {1: 2, 2: 1})
    assert one.joined(other) == other.joined(one) == joined


def test_orders_arrive_in_another_process_as_they_were() -> None:
    prefix = SCHEMA.prefix(PROMPT)
    load = LoadOrder("a", prefix[1:3], 1, (1, 2, 3), synchronous=True)
    saves = [SaveOrder(1, "b", prefix[:2], (1, 2, 3, 4))]
    orders = StepOrders(7, True, [load], saves, ["c"], ["d"])
    assert pickle.loads(pickle.dumps(orders)) == orders


def test_an_empty_report_is_false() -> None:
    assert not StepReport()
    assert StepReport(failed={"a": 0})
    assert StepReport(tainted_pages={0})
    assert StepReport(ended_saves={0: 1})
