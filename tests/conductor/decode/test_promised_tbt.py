"""The tightest promise of each row, against a list of all of them."""

from __future__ import annotations

from math import inf

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from tiffin.conductor.decode.promised_tbt import PromisedTbt

ROWS = np.array([0, 1, 100])
PROMISES = st.lists(st.tuples(st.sampled_from(ROWS.tolist()), st.sampled_from([0.03, 0.1, inf])))


@given(PROMISES, st.randoms())
def test_the_tightest_of_those_who_are_there(
    promises: list[tuple[int, float]], dice: object
) -> None:
    it, there = PromisedTbt(), list(promises)
    for row, tbt_s in promises:
        it.add(row, tbt_s)
    dice.shuffle(there)  # type: ignore[attr-defined]
    while True:
        tightest = [min((s for at, s in there if at == row), default=inf) for row in ROWS]
        assert it.tightest_s(ROWS).tolist() == tightest
        assert [it.tightest_of(row) for row in ROWS.tolist()] == tightest
        if not there:
            return
        it.remove(*there.pop())
