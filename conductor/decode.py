"""Where a request decodes: by the time between its tokens, by KV room, by what decodes there. Pure.

All candidates are compared at once; every term is an array with one number per candidate.

    tbt_s = factor · (d0 + d1 · (batch + 1) + d2 · (context + prompt + growth_share · answer))
    room  = (1 - reserve_share) · capacity - used - growing - prompt - answer    [tokens]

The first is the step of continuous batching (`cost.py`) with this request in it, in the middle of
its answer. The second must not be negative, and there must be a place in the batch: an instance
that runs out of KV room preempts somebody, and a preempted prompt is computed twice.

Which of those that fit is taken, `policy` says:

- "tbt": the lowest time between tokens, with what it takes to bring the context there spread over
  the answer. Among candidates so near to the best that the model could not tell them apart, the one
  with the fewest decodes of this request's kind, heavy or light.
- "two-level": TetriInfer's (arXiv 2401.11181): two candidates at random, and of these the one with
  fewer of its kind. It needs no coefficients, and many conductors that do not know of each other
  do not all pick the same instance.

Heavy decodes, those with long answers, are spread because they stay: where they gather, context
grows until all are slow; the paper measured 23 % more latency from decodes that share a batch
badly. It is said to compare heavy decodes per light one, for all requests. For heavy ones that is
sound. A light one would go where light ones are, make the ratio there lower still, and attract the
next: without a bound, instances drift apart. Each kind evened out by itself evens out the ratio,
too.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Literal

import msgspec
import numpy as np
from msgspec import Meta

if TYPE_CHECKING:
    import random
    from collections.abc import Mapping

    from numpy.typing import NDArray

    from .cluster import Cluster
    from .records import Request

    Floats = NDArray[np.float64]
    Rows = NDArray[np.int64]
    Numbers = Floats | list[float]  # [candidates]

Share = Annotated[float, Meta(ge=0.0, le=1.0)]


class DecodeSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """How an instance is chosen for decode."""

    policy: Literal["tbt", "two-level"] = "tbt"
    """Which of the instances that fit is taken; see the top of `decode.py`."""

    near_share: Share = 0.05
    """Candidates whose cost is at most this much above the lowest count as equal to it. The
    latency model is wrong by some 5 % in the mean."""

    reserve_share: Annotated[float, Meta(ge=0.0, le=0.9)] = 0.05
    """Of the KV capacity that is kept free, for answers that are longer than predicted. The 1 % of
    vLLM's block manager (as Vidur models it) is of what is taken, not of what is predicted."""

    growth_share: Share = 0.5
    """How much of the answer counts as context in the time between tokens: 0.5 is the mean over its
    length, 1 its end."""

    tbt_share: Annotated[float, Meta(gt=0.0, le=10.0)] = 1.0
    """Of the request's TBT objective that a prediction may use up. Below 1 leaves a margin for
    those who come later."""


@dataclass(slots=True)
class DecodeQuestion:
    """Where should this request decode?

    `rows` [candidates] are rows of `cluster`; every other array has one number per candidate.
    `output_tokens` is the predicted length of the answer, `heavy` whether that is a long one.
    `batch` and `context_tokens` are what will run there when the request comes; None: what runs
    now. `growing_tokens` are what those who run will still add beyond what counts as used. `factor`
    corrects predicted step times (`calibration.py`). `move_s` is how long the context takes to get
    there after prefill. Without `enforce` the objective is ignored, and only room can refuse.
    `batch_now` and `context_now` are the two arrays in either case.
    """

    request: Request
    cluster: Cluster
    rows: Rows
    output_tokens: int
    settings: DecodeSettings
    dice: random.Random
    batch: Rows | None = None
    context_tokens: Rows | None = None
    growing_tokens: Rows | int = 0
    heavy: bool = False
    factor: Floats | float = 1.0
    move_s: Floats | float = 0.0
    enforce: bool = True
    batch_now: Rows = field(init=False)
    context_now: Rows = field(init=False)

    def __post_init__(self) -> None:
        cluster, rows = self.cluster, self.rows
        self.batch_now = cluster.batch.take(rows) if self.batch is None else self.batch
        tokens = self.context_tokens
        self.context_now = cluster.context_tokens.take(rows) if tokens is None else tokens

    @property
    def limit_s(self) -> float:
        """The time between tokens that a prediction may not exceed; infinite if there is none."""
        objective_s = self.request.objectives.tbt_s
        if objective_s is None or not self.enforce:
            return np.inf
        return objective_s * self.settings.tbt_share

    def room_tokens(self) -> Floats:
        """What each candidate has room for, behind the reserve, without this request."""
        cluster, rows = self.cluster, self.rows
        share = 1.0 - self.settings.reserve_share
        usable = cluster.kv_capacity_tokens.take(rows).astype(np.float64) * share
        room: Floats = usable - cluster.kv_used_tokens.take(rows) - self.growing_tokens
        return room

    def places(self) -> NDArray[np.bool_]:
        """Who has a place in its batch."""
        free: NDArray[np.bool_] = self.batch_now < self.cluster.batch_max.take(self.rows)
        return free

    def step_terms(
        self, more_tokens: Floats | float, more_requests: Rows | int = 1
    ) -> dict[str, Floats]:
        """The parts of one decode step with so much more context and batch than now, in seconds."""
        cluster, rows = self.cluster, self.rows
        terms: dict[str, Floats] = {
            "base_s": cluster.d0.take(rows),
            "batch_s": cluster.d1.take(rows) * (self.batch_now + more_requests),
            "context_s": cluster.d2.take(rows) * (self.context_now + more_tokens),
        }
        if not isinstance(self.factor, float) or self.factor != 1.0:
            terms = {name: seconds * self.factor for name, seconds in terms.items()}
        return terms


@dataclass(slots=True)
class DecodeChoice:
    """`at` is the index of the chosen one in `DecodeQuestion.rows`.

    `cost` [candidates] is infinite where the request does not fit; lowest is best, but for ties and
    for "two-level". `tbt_s` [candidates] is predicted for each. `terms`, each [candidates]: the
    seconds that add up to `tbt_s` (`base_s`, `batch_s`, `context_s`), `move_s`, `room_tokens` after
    the request (negative: too little), and `alike_share`: decodes of its kind there, per place.
    """

    at: int
    cost: Numbers
    tbt_s: Numbers
    terms: Mapping[str, Numbers] = field(default_factory=dict)


@dataclass(slots=True)
class NoDecode:
    """Nobody can take the request, and why.

    `reason`: "no_decode" (there is no candidate), "kv_room" (nobody has the room, or a place in
    its batch) or "tbt" (who has room would be too slow). `at` is who came nearest: the one with the
    most room, or the fastest with room; -1 without candidates. `best_tbt_s` is its time between
    tokens.
    """

    reason: Literal["no_decode", "kv_room", "tbt"]
    at: int = -1
    best_tbt_s: float | None = None
    tbt_s: Numbers = field(default_factory=list)
    terms: Mapping[str, Numbers] = field(default_factory=dict)


def choose(question: DecodeQuestion) -> DecodeChoice | NoDecode:
    """The instance that decodes this request, or why there is none."""
    if len(question.rows) == 0:
        return NoDecode("no_decode")
    q, settings = question, question.settings
    answer = float(q.output_tokens)
    terms = q.step_terms(q.request.prompt_tokens + settings.growth_share * answer)
    tbt_s = terms["base_s"] + terms["batch_s"] + terms["context_s"]
    terms["move_s"] = np.full(len(q.rows), q.move_s, np.float64)
    terms["room_tokens"] = q.room_tokens() - (q.request.prompt_tokens + answer)
    terms["alike_share"] = _alike_share(q)
    fits = (terms["room_tokens"] >= 0) & q.places()
    eligible = fits & (tbt_s <= q.limit_s)
    if not eligible.any():
        return _refusal(fits, tbt_s, terms)
    cost = np.where(eligible, tbt_s + terms["move_s"] / max(answer, 1.0), np.inf)
    pick = _two_level if settings.policy == "two-level" else _nearest
    return DecodeChoice(pick(q, cost, terms["alike_share"]), cost, tbt_s, terms)


def choose_only(
    request: Request,
    cluster: Cluster,
    row: int,
    output_tokens: int,
    settings: DecodeSettings,
    *,
    batch: int,
    context_tokens: int,
    heavy: bool = False,
) -> DecodeChoice | NoDecode:
    """`choose` of one candidate that already has the context, whatever the objective: the same in
    plain numbers, which takes a tenth of the time. Most requests decode where they were prefilled.
    """
    answer, c = float(output_tokens), cluster
    more_tokens = request.prompt_tokens + settings.growth_share * answer
    base_s, batch_s = c.d0.item(row), c.d1.item(row) * (batch + 1)
    context_s = c.d2.item(row) * (context_tokens + more_tokens)
    tbt_s = base_s + batch_s + context_s
    usable = c.kv_capacity_tokens.item(row) * (1.0 - settings.reserve_share)
    room_tokens = usable - c.kv_used_tokens.item(row) - (request.prompt_tokens + answer)
    places, alike = c.batch_max.item(row), c.heavy.item(row)
    if not heavy:
        alike = max(batch - alike, 0)
    terms = {
        "base_s": [base_s],
        "batch_s": [batch_s],
        "context_s": [context_s],
        "move_s": [0.0],
        "room_tokens": [room_tokens],
        "alike_share": [alike / max(places, 1)],
    }
    if room_tokens < 0 or batch >= places:
        return NoDecode("kv_room", 0, tbt_s, [tbt_s], terms)
    return DecodeChoice(0, [tbt_s], [tbt_s], terms)


def _alike_share(question: DecodeQuestion) -> Floats:
    """Decodes of the request's kind, per place of the batch."""
    cluster, rows = question.cluster, question.rows
    alike = cluster.heavy.take(rows)
    if not question.heavy:
        alike = np.maximum(question.batch_now - alike, 0)
    share: Floats = alike / np.maximum(cluster.batch_max.take(rows), 1)
    return share


def _nearest(question: DecodeQuestion, cost: Floats, alike: Floats) -> int:
    """Of those near to the lowest cost, the fewest of its kind, then the lowest cost."""
    near = np.flatnonzero(cost <= cost.min() * (1.0 + question.settings.near_share))
    near = _lowest(near, alike)
    near = _lowest(near, cost)
    return int(near[question.dice.randrange(len(near))])


def _two_level(question: DecodeQuestion, cost: Floats, alike: Floats) -> int:
    """The power of two choices: of two at random, the one with fewer of its kind."""
    able = np.flatnonzero(np.isfinite(cost))
    pair = np.array(question.dice.sample(range(len(able)), min(2, len(able))))
    two = _lowest(able[pair], alike)
    return int(_lowest(two, cost)[0])


def _lowest(at: Rows, values: Floats) -> Rows:
    """Those of the indices `at` whose value is the lowest."""
    of = values.take(at)
    least: Rows = at[of == of.min()]
    return least


def _refusal(fits: NDArray[np.bool_], tbt_s: Floats, terms: dict[str, Floats]) -> NoDecode:
    if fits.any():
        at = int(np.where(fits, tbt_s, np.inf).argmin())
        return NoDecode("tbt", at, float(tbt_s[at]), tbt_s, terms)
    at = int(terms["room_tokens"].argmax())
    return NoDecode("kv_room", at, float(tbt_s[at]), tbt_s, terms)
