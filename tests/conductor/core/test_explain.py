"""The candidates that a decision keeps."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from tiffin.conductor.core.explain import best_of

NAMED: Any = SimpleNamespace(name=str)
# Few values, so that there are equals.
COSTS = st.lists(st.sampled_from([0.0, 0.5, 1.0, 2.0, math.inf]), min_size=2, max_size=80)


@given(cost=COSTS, most=st.integers(1, 70), data=st.data())
def test_the_chosen_one_then_the_cheapest_of_equals_the_first(
    cost: list[float], most: int, data: st.DataObject
) -> None:
    at = data.draw(st.integers(0, len(cost) - 1))
    rows, terms = np.arange(len(cost)), {"place": np.arange(len(cost)) / 2.0}
    found = best_of(NAMED, rows, at, np.array(cost), terms, most)
    cheapest = sorted(range(len(cost)), key=lambda one: cost[one])[:most]
    expected = [at, *(one for one in cheapest if one != at)][:most]
    assert [one.instance for one in found] == [str(one) for one in expected]
    assert [one.cost for one in found] == [cost[one] for one in expected]
    assert [one.terms for one in found] == [{"place": one / 2.0} for one in expected]
