"""Why an instance was chosen: the best candidates and every term of their costs. Pure.

A decision keeps the costs of its best candidates as numbers; `Candidate` objects are built lazily,
when a caller reads them. With a thousand instances that costs ten microseconds per decision instead
of a millisecond.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, overload

import numpy as np

from ..records import Candidate

if TYPE_CHECKING:
    from collections.abc import Mapping

    from numpy.typing import NDArray

    from ..state.instance_table import Cluster

    Numbers = NDArray[np.float64] | list[float]


# Up to so many cheapest candidates are looked for one by one.
_FEW = 32


class Candidates(Sequence[Candidate]):
    """The best candidates of one choice, the chosen one first, then by cost. In one piece of bytes,
    as the log of decisions has two of these in each entry: arrays would take three times as much.

    `values` are doubles: the costs of all candidates, then for each of the `terms` those of all.
    """

    __slots__ = ("_instances", "_terms", "_values")

    def __init__(self, instances: tuple[str, ...], terms: tuple[str, ...], values: bytes) -> None:
        self._instances = instances
        self._terms = terms
        self._values = values

    def __len__(self) -> int:
        return len(self._instances)

    @overload
    def __getitem__(self, index: int) -> Candidate: ...
    @overload
    def __getitem__(self, index: slice) -> list[Candidate]: ...
    def __getitem__(self, index: int | slice) -> Candidate | list[Candidate]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        instance = self._instances[index]
        values = memoryview(self._values).cast("d")
        cost, *terms = values[index % len(self) :: len(self)].tolist()
        return Candidate(instance, cost, dict(zip(self._terms, terms, strict=True)))


@lru_cache(maxsize=64)
def _once(names: tuple[str, ...]) -> tuple[str, ...]:
    """These names as one object for all decisions: there are a few for each policy."""
    return names


def best_of(
    cluster: Cluster,
    rows: NDArray[np.int64],
    at: int,
    cost: Numbers,
    terms: Mapping[str, Numbers],
    most: int,
) -> Candidates:
    """The `most` cheapest of `rows`, first of them the chosen one, at index `at`."""
    names = _once(tuple(terms))
    if len(rows) == 1:
        values = array("d", [cost[0], *[of[0] for of in terms.values()]])
        return Candidates((cluster.name(rows[0]),), names, values.tobytes())
    cost = np.asarray(cost)
    best = _cheapest(cost, most)
    if best[0] != at:
        best = np.concatenate(([at], best[best != at]))[:most]
    some = [np.asarray(of).take(best) for of in (cost, *terms.values())]
    instances = tuple(map(cluster.name, rows.take(best).tolist()))
    return Candidates(instances, names, np.concatenate(some, dtype=np.float64).tobytes())


def _cheapest(cost: NDArray[np.float64], most: int) -> NDArray[np.int64]:
    """The indices of the `most` lowest costs, the lowest first; of equals the first.

    One minimum after the other: 8 us for sixteen of 1,000, 28 of 10,000. `argpartition` took 84 and
    1,133 us where nine in ten costs are equal, as those of idle instances are.
    """
    if most > _FEW or len(cost) <= most:
        return cost.argsort(kind="stable")[:most]
    left, found = cost.copy(), np.empty(most, np.int64)
    for number in range(most):
        at = found[number] = left.argmin()
        if left[at] == np.inf:  # of infinite costs it would be the same one again
            return cost.argsort(kind="stable")[:most]
        left[at] = np.inf
    return found
