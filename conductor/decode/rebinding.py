"""Which member of a spread context runs everything but attention, while it runs. Pure.

At placement the binding is the member with the smallest batch (`context_parallel.py`). Then answers
end, and batches come to differ: where instances step together, each step takes as long as that of
the fullest. A binding can move to another member without any KV (NanoCP, arXiv 2605.21100); what it
costs is a change of routes between two steps, `rebind_s`.

    step of a row    d0 + d1 · batch + d2 · context
    gain             (highest step before - after) · steps until the next look, or of a moved one
    cost             rebind_s for each that moves

Bindings move from the row with the highest step to the member with the lowest, as long as that one
stays below. One move alone gains nothing where two rows are equally full, so moves are tried in a
row, and as many are proposed as are worth most. A move has to repay itself until the next look:
ends and arrivals change the balance soon after, and moves that were to pay off over the rest of an
answer cost more than they gained.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from ..cost.latency_model import decode_step_s

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from numpy.typing import NDArray

    from ..core.inflight_requests import InflightRequest
    from ..state.instance_table import Cluster


class BoundRequest(NamedTuple):
    """A request that decodes, spread over the rows `members`, of which `binding` is one."""

    request_id: str
    binding: int
    members: tuple[int, ...]
    steps_left: int


class Rebinding(NamedTuple):
    """A request's binding moves from the row `source` to the row `target`."""

    request_id: str
    source: int
    target: int


def rebindings(
    bound: Sequence[BoundRequest],
    steps_s: NDArray[np.float64],
    request_s: NDArray[np.float64],
    rebind_s: float,
) -> list[Rebinding]:
    """The moves that are worth their cost, in order.

    By row of a group that steps together, [rows]: `steps_s`, the time of a step now, and
    `request_s`, by how much one request in the batch prolongs it.
    """
    steps_s, left = steps_s.copy(), {one.request_id: one for one in bound}
    highest_s, moves, worth, best = float(steps_s.max(initial=0.0)), list[Rebinding](), 0.0, 0
    steps_left = np.inf
    while True:
        row = int(steps_s.argmax())
        found = _best_move(row, left.values(), steps_s, request_s)
        if found is None:
            return moves[:best]
        one, target = found
        del left[one.request_id]
        steps_s[row] -= request_s[row]
        steps_s[target] += request_s[target]
        moves.append(Rebinding(one.request_id, row, target))
        steps_left = min(steps_left, one.steps_left)
        gain_s = (highest_s - float(steps_s.max())) * steps_left - rebind_s * len(moves)
        if gain_s > worth:
            worth, best = gain_s, len(moves)


def _best_move(
    row: int,
    bound: Iterable[BoundRequest],
    steps_s: NDArray[np.float64],
    request_s: NDArray[np.float64],
) -> tuple[BoundRequest, int] | None:
    """The request bound to `row` that would be least in the way elsewhere, and where; None if each
    other member would then be as full as `row` is."""
    best: tuple[float, int, BoundRequest, int] | None = None
    for one in bound:
        if one.binding != row or one.steps_left < 1:
            continue
        target = min(one.members, key=lambda member: steps_s[member])
        after_s = float(steps_s[target] + request_s[target])
        if target == row or after_s >= steps_s[row]:
            continue
        if best is None or (after_s, -one.steps_left) < best[:2]:
            best = after_s, -one.steps_left, one, target
    return None if best is None else best[2:]


def proposed(
    cluster: Cluster, flights: Iterable[InflightRequest], rebind_s: float, every_s: float
) -> list[Rebinding]:
    """The moves for these spread requests, model by model. `rebind_s` as in the settings of
    spreads; `every_s`: until the next look."""
    steps_s = decode_step_s(
        cluster.d0, cluster.d1, cluster.d2, cluster.batch, cluster.context_tokens
    )
    bound: dict[str, list[BoundRequest]] = {}
    for flight in flights:
        if flight.first_token_at is not None:
            left = flight.decision.output_tokens - flight.answered_tokens
            look = int(every_s / max(steps_s[flight.decode_row], 1e-6))
            one = BoundRequest(
                flight.request.id, flight.decode_row, tuple(flight.shares), min(left, look)
            )
            bound.setdefault(flight.request.model, []).append(one)
    moves: list[Rebinding] = []
    for model, requests in bound.items():
        group = np.zeros(len(steps_s))
        rows = cluster.rows_for(model, prefill=False)
        group[rows] = steps_s[rows]
        moves += rebindings(requests, group, cluster.d1, rebind_s)
    return moves
