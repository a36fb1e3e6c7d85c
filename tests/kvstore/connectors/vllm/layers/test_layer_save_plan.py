"""Which blocks are saved by layer, and what becomes of them: blocks of 8 tokens in pages of 4."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from test_request_tracker import PROMPT, Case, blocks_of

if TYPE_CHECKING:
    from tiffin.kvstore.connectors.vllm.orders import StepOrders


def layered(orders: StepOrders) -> list[tuple[int, int]]:
    """The blocks of each save by layer: where they begin in their prompt, and how many they are."""
    return [(order.prefix.start, len(order.prefix)) for order in orders.layer_saves]


class Chunks(Case):
    """A request whose prompt of five blocks is computed in chunks."""

    def __init__(self, **options: Any) -> None:
        super().__init__(layerwise=True, **options)
        self.add()
        self.answer(0)
        self.match()
        self.allocate(range(10))

    def step(self, begin: int, end: int, confirmed: int = 0, **more: Any) -> StepOrders:
        """A step that computes the tokens from `begin` up to `end`."""
        return self.plan(confirmed, computing=[("r", begin, end)], **more)


def test_a_step_saves_the_blocks_that_it_completes() -> None:
    case = Chunks()
    steps = [case.step(*chunk) for chunk in ((0, 20), (20, 23), (23, 40))]
    assert [layered(orders) for orders in steps] == [[(0, 2)], [], [(2, 3)]]
    assert [order.pages for orders in steps for order in orders.layer_saves] == [
        (0, 1, 2, 3),
        (4, 5, 6, 7, 8, 9),
    ]
    assert not any(orders.saves or orders.confirmed or orders.given_up for orders in steps)


def test_what_is_confirmed_is_stored_and_not_saved_once_more() -> None:
    case = Chunks()
    (first,) = case.step(0, 20).layer_saves
    (second,) = case.step(20, 40).layer_saves
    orders = case.step(40, 41, confirmed=20)
    assert (orders.confirmed, orders.saves) == ([first.number], [])
    orders = case.step(41, 42, confirmed=40)
    assert (orders.confirmed, orders.saves) == ([second.number], [])
    assert case.finish(41), "the engine keeps the pages until a worker reports the ends"


def test_blocks_that_the_engine_had_are_saved_whole() -> None:
    """Of its own cache: no step computes them."""
    case = Chunks()
    (order,) = case.step(20, 40).layer_saves
    assert (order.prefix.start, len(order.prefix)) == (2, 3)
    orders = case.step(40, 41, confirmed=40)
    assert blocks_of(orders) == [(0, 2)]
    assert orders.confirmed == [order.number]


def test_what_is_said_is_saved_whole() -> None:
    case = Chunks()
    case.step(0, 40)
    case.engine.tokens["r"] += range(8)
    assert case.step(40, 48).layer_saves == []
    assert blocks_of(case.step(48, 49, confirmed=48)) == [(5, 1)]


def test_tokens_that_are_taken_back_give_their_saves_up() -> None:
    case = Chunks()
    (first,) = case.step(0, 20).layer_saves
    (second,) = case.step(20, 40).layer_saves
    orders = case.step(17, 40)  # the engine computes anew from there on
    assert orders.given_up == [second.number]
    (again,) = orders.layer_saves
    assert (again.prefix.start, len(again.prefix)) == (2, 3)
    assert case.step(40, 41, confirmed=40).confirmed == [first.number, again.number]


@pytest.mark.parametrize("confirmed", [0, 20, 39])
def test_a_request_that_ends_unconfirmed_gives_its_saves_up(confirmed: int) -> None:
    case = Chunks()
    (order,) = case.step(0, 40).layer_saves
    assert case.finish(confirmed), "a worker may still read the pages"
    orders = case.plan()
    assert (orders.given_up, orders.confirmed) == ([order.number], [])
    assert orders.finished == ["r"]


def test_a_preempted_request_gives_its_saves_up() -> None:
    case = Chunks()
    (order,) = case.step(0, 40).layer_saves
    orders = case.tracker.plan([], case.engine, preempted=["r"])
    assert (orders.given_up, orders.preempted) == ([order.number], ["r"])
    case.allocate(range(10))
    assert layered(case.step(0, 40)) == [(0, 5)]


def test_tokens_before_the_first_step_need_one_behind_them() -> None:
    """They are confirmed with the first token that the request computes."""
    case = Chunks()
    (order,) = case.step(36, 40, confirmed=36).layer_saves
    assert case.step(40, 41, confirmed=36).confirmed == []
    orders = case.step(40, 41, confirmed=40)
    assert orders.confirmed == [order.number]
    assert blocks_of(orders) == [(0, 4)]


@pytest.mark.parametrize("options", [{"save_tokens_min": 41}, {"saves": False}])
def test_what_is_not_saved_is_not_saved_by_layer(options: dict[str, Any]) -> None:
    assert Chunks(**options).step(0, len(PROMPT)).layer_saves == []


def test_other_engines_save_nothing_by_layer() -> None:
    case = Case()
    case.begin()
    assert case.plan(computing=[("r", 0, 40)]).layer_saves == []
