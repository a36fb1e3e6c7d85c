"""The comparison of all policies, on traces that are small enough to run in a test."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tiffin.bench.reproduce.papers import ours_against_all
from tiffin.bench.reproduce.registry import Effort
from tiffin.bench.reproduce.setups.contest import ALL
from tiffin.bench.traces.generator import generate

if TYPE_CHECKING:
    from tiffin.bench.traces.trace import Trace

EFFORT = Effort(seeds=(0,))


def small(seed: int) -> Trace:
    return generate("multi-turn", 40, seed)


def told(text: str) -> None:
    pass


@pytest.mark.slow
def test_every_policy_has_a_row_at_each_rate(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ours_against_all, "_like_conversation", small)
    found = ours_against_all.conversations(EFFORT, told)
    assert len(found.grids) == len(ours_against_all.RATES)
    for table in found.grids:
        assert {row[0] for row in table.rows} == set(ALL)
    (plot,) = found.plots
    assert all(len(line.x) == len(ours_against_all.PLOTTED_RATES) for line in plot.lines)
    assert len(found.statements) == 2 * len(ours_against_all.RATES)


def test_slow_links_and_goodput_say_whether_ours_is_best(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ours_against_all, "_like_conversation", small)
    monkeypatch.setattr(ours_against_all, "DOCUMENT_REQUESTS", 30)
    slow = ours_against_all.slow_links(EFFORT, told)
    assert len(slow.statements) == 2
    monkeypatch.setattr(
        ours_against_all, "goodput", lambda trace, options, policy: 20 - len(policy)
    )
    served = ours_against_all.goodputs(EFFORT, told)
    assert not all(one.holds for one in served.statements), "the longest name is worst"
    assert served.grids[0].rows[0][0] == min(ALL, key=len)
