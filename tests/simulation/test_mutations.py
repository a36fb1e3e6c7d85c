"""The simulation detects each planted bug within 200 seeds, by the invariant that it breaks."""

from __future__ import annotations

import pytest

from .cluster import INVARIANTS
from .mutations import MUTATIONS, hunt

SEEDS_MAX = 200


@pytest.mark.slow
@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.name)
def test_a_planted_bug_is_caught(mutation):
    assert set(mutation.caught_by) <= set(INVARIANTS)
    catch = hunt(mutation, range(mutation.first_seed, mutation.first_seed + SEEDS_MAX))
    assert catch is not None, f"{SEEDS_MAX} seeds did not notice: {mutation.patches.__doc__}"
    assert catch.kind in mutation.caught_by, catch
