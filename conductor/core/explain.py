"""Why an instance was chosen: the best candidates and every term of their costs. Pure.

A decision keeps the costs of its best candidates as arrays; `Candidate` objects are built lazily,
when a caller reads them. With a thousand instances that costs ten microseconds per decision instead
of a millisecond.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, overload

import numpy as np

from ..records import Candidate

if TYPE_CHECKING:
    from collections.abc import Mapping

    from numpy.typing import NDArray

    from ..records import InstanceSpec
    from ..state.instance_table import Cluster

    Numbers = NDArray[np.float64] | list[float]


class Candidates(Sequence[Candidate]):
    """The best candidates of one choice, the chosen one first, then by cost."""

    __slots__ = ("_cost", "_specs", "_terms")

    def __init__(
        self, specs: list[InstanceSpec | None], cost: Numbers, terms: Mapping[str, Numbers]
    ) -> None:
        self._specs = specs
        self._cost = cost
        self._terms = terms

    def __len__(self) -> int:
        return len(self._specs)

    @overload
    def __getitem__(self, index: int) -> Candidate: ...
    @overload
    def __getitem__(self, index: slice) -> list[Candidate]: ...
    def __getitem__(self, index: int | slice) -> Candidate | list[Candidate]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        terms = {name: float(values[index]) for name, values in self._terms.items()}
        spec = self._specs[index]
        assert spec is not None  # only rows in use are candidates
        return Candidate(spec.id, float(self._cost[index]), terms)


def best_of(
    cluster: Cluster,
    rows: NDArray[np.int64],
    at: int,
    cost: Numbers,
    terms: Mapping[str, Numbers],
    most: int,
) -> Candidates:
    """The `most` cheapest of `rows`, first of them the chosen one, at index `at`."""
    if len(rows) == 1:
        return Candidates([cluster.specs[rows[0]]], cost, terms)
    cost = np.asarray(cost)
    if len(rows) > most:
        best = cost.argpartition(most - 1)[:most]
        best = best[cost.take(best).argsort(kind="stable")]
    else:
        best = cost.argsort(kind="stable")
    if best[0] != at:
        best = np.concatenate(([at], best[best != at]))[:most]
    specs = cluster.specs
    named = [specs[row] for row in rows.take(best).tolist()]
    some = {name: np.asarray(values).take(best) for name, values in terms.items()}
    return Candidates(named, cost.take(best), some)
