"""A new trace that is like another one, from a seed.

Each new request has a *template*, drawn from the original's requests around the same place in the
trace: from there come both lengths, the gap before it, and how it joined what was there before. A
join is a depth (full blocks in common with earlier requests), a distance (requests since the latest
of these), a kind (it went on after that one's last full block, it branched off where that one had,
or elsewhere) and a turn (how many requests had gone on after each other there). The new request
joins a new one of the same kind, turn and nearly the same depth, as near to that distance as there
is one. What it adds are new blocks.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass
from itertools import count
from random import Random
from typing import TYPE_CHECKING, Literal

from .trace import Trace, TraceRequest

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

NEIGHBOURHOOD = 0.05  # templates come from this share of the trace, so that slow changes stay
SMALLEST_NEIGHBOURHOOD = 16  # requests
DEPTH_TOLERANCE = 0.25  # of a join's depth, to find a request of the same kind and turn
INSIDE_REACH = 64  # requests to both sides of the wanted one

Kind = Literal["after", "beside", "inside"]


@dataclass(frozen=True, slots=True)
class Join:
    """How a request shares its prefix with an earlier one."""

    kind: Kind
    depth: int  # full blocks, at least 1
    distance: int  # requests, at least 1
    turn: int  # of the request that it joins, from 0; 0 unless it goes on after that


@dataclass(frozen=True, slots=True)
class Template:
    """What is taken from one request of the original."""

    gap_s: float  # since the arrival before
    prompt_tokens: int
    output_tokens: int
    join: Join | None  # None: it shared nothing


def look_alike(trace: Trace, seed: int) -> Trace:
    """As many requests as the trace has; the same for the same seed."""
    templates = _templates(trace)
    growing = _Growing(trace)
    chance = Random(seed)
    reach = max(SMALLEST_NEIGHBOURHOOD, round(len(templates) * NEIGHBOURHOOD))
    for number in range(len(templates)):
        low, high = max(0, number - reach), min(len(templates), number + reach + 1)
        growing.add(templates[chance.randrange(low, high)])
    return Trace(f"like {trace.name}", tuple(growing.requests), trace.block_tokens)


# -- the original ----------------------------------------------------------------------------------


def _templates(trace: Trace) -> list[Template]:
    found: list[Template] = []
    latest: dict[int, int] = {}  # the last request that had this block
    depths: list[int] = []  # at which each request joined
    turns: list[int] = []
    before_s = trace.requests[0].arrival_s if trace.requests else 0.0
    for number, request in enumerate(trace.requests):
        chain = trace.full_blocks(request)
        depth = next((i for i, block in enumerate(chain) if block not in latest), len(chain))
        join = None
        if depth:
            donor = latest[chain[depth - 1]]
            kind = _kind(
                depth, trace.requests[donor].full_blocks(trace.block_tokens), depths[donor]
            )
            join = Join(kind, depth, number - donor, turns[donor] if kind == "after" else 0)
        lengths = (request.prompt_tokens, request.output_tokens)
        found.append(Template(request.arrival_s - before_s, *lengths, join))
        latest.update(dict.fromkeys(chain, number))
        depths.append(depth)
        turns.append(_turn(join))
        before_s = request.arrival_s
    return found


def _kind(depth: int, full_blocks: int, branched_at: int) -> Kind:
    """Of a join at `depth` to a request with so many full blocks, that had joined at another."""
    return "after" if full_blocks == depth else "beside" if branched_at == depth else "inside"


def _turn(join: Join | None) -> int:
    """Of a request that joins so."""
    return join.turn + 1 if join and join.kind == "after" else 0


# -- the new one -----------------------------------------------------------------------------------


class _Growing:
    """The new trace so far."""

    def __init__(self, original: Trace) -> None:
        self.requests: list[TraceRequest] = []
        self._original = original
        self._fresh = count()
        self._now_s = 0.0
        # Requests in ascending order, by the kind, turn and depth at which another may join them. A
        # request is gone on with once: then it leaves "after".
        self._open: dict[tuple[Kind, int, int], list[int]] = {}

    def add(self, template: Template) -> None:
        """Append a request like the template."""
        self._now_s += template.gap_s
        shared = self._shared(template.join) if template.join else ()
        depth = len(shared)
        # What a request adds to its prefix stays, if it had to join at another depth.
        grown = depth - template.join.depth if template.join else 0
        tokens = template.prompt_tokens + grown * self._original.block_tokens
        blocks = shared + self._new_blocks(tokens, depth)
        arrival_s = round(self._now_s, 6)
        request = TraceRequest(arrival_s, tokens, template.output_tokens, blocks)
        self._enter(request, depth, _turn(template.join))

    def _new_blocks(self, tokens: int, depth: int) -> tuple[int, ...]:
        if not self._original.has_blocks:
            return ()
        needed = -(-tokens // self._original.block_tokens) - depth
        return tuple(next(self._fresh) for _ in range(needed))

    def _enter(self, request: TraceRequest, depth: int, turn: int) -> None:
        number = len(self.requests)
        self.requests.append(request)
        full = request.full_blocks(self._original.block_tokens)
        self._open.setdefault(("after", turn, full), []).append(number)
        self._open.setdefault(("beside", 0, depth), []).append(number)

    def _shared(self, join: Join) -> tuple[int, ...]:
        """The blocks in common with the earlier request that suits the join best."""
        wanted = len(self.requests) - join.distance
        for depth in _around(join.depth, round(join.depth * DEPTH_TOLERANCE)):
            if candidates := self._open.get((join.kind, join.turn, depth)):
                donor = _nearest(candidates, wanted)
                if join.kind == "after":
                    candidates.remove(donor)
                return self.requests[donor].blocks[:depth]
        return self._inside(join.depth, wanted)

    def _inside(self, depth: int, wanted: int) -> tuple[int, ...]:
        """`depth` blocks of the request nearest to `wanted` that has them; fewer if none has."""
        deepest: tuple[int, ...] = ()
        for number in _around(wanted, INSIDE_REACH):
            if 0 <= number < len(self.requests):
                chain = self._original.full_blocks(self.requests[number])[:depth]
                deepest = max(deepest, chain, key=len)
            if len(deepest) == depth:
                break
        return deepest


def _around(middle: int, reach: int) -> Iterator[int]:
    """The numbers within `reach` of the middle, the nearest first."""
    yield middle
    for step in range(1, reach + 1):
        yield from (middle - step, middle + step)


def _nearest(ascending: Sequence[int], wanted: int) -> int:
    place = bisect_left(ascending, wanted)
    return min(ascending[max(0, place - 1) : place + 1], key=lambda one: abs(one - wanted))
