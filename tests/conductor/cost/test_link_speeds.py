"""Speeds of links from transfers whose times hold more than the network's."""

from __future__ import annotations

import numpy as np
import pytest

from tiffin.conductor.cost import link_speeds
from tiffin.conductor.cost.link_speeds import SAMPLES, LinkSpeeds

GB = 10**9
BYTE_S = 1 / 3e9


def test_a_constant_delay_is_not_slowness() -> None:
    for late_s in (0.0, 0.1, 2.0):
        speeds, dice = LinkSpeeds(), np.random.default_rng(1)
        for nbytes in dice.integers(GB // 10, 6 * GB, SAMPLES).tolist():
            jitter_s = float(dice.uniform(0, 0.05))
            found, general = speeds.observe(0, 1, nbytes, nbytes * BYTE_S + late_s + jitter_s)
        assert found == general == pytest.approx(BYTE_S, rel=0.03)


def test_a_few_wild_times_do_not_matter() -> None:
    """Four of sixteen had hidden company."""
    speeds, dice = LinkSpeeds(), np.random.default_rng(2)
    for number, nbytes in enumerate(dice.integers(GB, 6 * GB, SAMPLES).tolist()):
        hidden_s = 5.0 if number % 4 == 0 else 0.0
        found, _ = speeds.observe(0, 1, nbytes, nbytes * BYTE_S + hidden_s)
    assert found == pytest.approx(BYTE_S, rel=0.1)


def test_of_one_size_nothing_is_learnt() -> None:
    speeds = LinkSpeeds()
    for number in range(2 * SAMPLES):
        assert speeds.observe(0, 1, GB + number, 0.5 + number % 3) == (None, None)


def test_what_no_network_does_is_not_believed() -> None:
    speeds = LinkSpeeds()
    for size in range(1, 9):
        found = speeds.observe(0, 1, size * GB, 9.0 - size)
    assert found == (None, None), "the larger, the sooner"


def test_links_differ_and_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    speeds = LinkSpeeds()
    for size in range(1, 7):
        slow, _ = speeds.observe(0, 1, size * GB, size * 2.0)
        fast, _ = speeds.observe(0, 2, size * GB, size * 1.0)
    assert (slow, fast) == (pytest.approx(2e-9), pytest.approx(1e-9))
    speeds.forget({1})
    assert speeds.observe(0, 1, GB, 2.0)[0] is None
    assert speeds.observe(0, 2, 7 * GB, 7.0)[0] == pytest.approx(1e-9)
    monkeypatch.setattr(link_speeds, "LINKS_MAX", 1)
    speeds.observe(4, 5, GB, 1.0)
    assert speeds.observe(0, 2, GB, 1.0)[0] is None, "the one used last is kept"
