"""Choice of the decode instance: by time between tokens (TBT), KV room and the decodes there. Pure.

All candidates are compared at once; every term is an array with one number per candidate.

    tbt_s = factor · (d0 + d1 · (batch + 1) + d2 · (context + prompt + growth_share · answer))
    room  = (1 - reserve_share) · capacity - used - growing - prompt - answer    [tokens]

With `reserve` "static", `used` has every answer with its predicted length. With "dynamic" it has
what there is, and the request's own answer stands for what all grow by until one of them ends: of b
answers of g tokens, each somewhere in its course, the first ends after g / (b + 1) steps in the
mean, in which all b + 1 together grow by g.

The first is the step of continuous batching (`latency_model.py`) with this request in it, in the
middle of its answer. The second must not be negative, and there must be a place in the batch: an
instance that runs out of KV room preempts a request, and a preempted prompt is computed twice.

The setting `policy` chooses among the candidates that fit:

- "tbt": the lowest time between tokens, plus the time to transfer the context there, spread over
  the answer. Candidates within `near_share` of the best are ties, as the latency model can not tell
  them apart; of these, the one with the fewest decodes of this request's kind, heavy or light.
- "two-level": TetriInfer's policy (arXiv 2401.11181): two candidates at random, and of these the
  one with fewer decodes of this request's kind. It needs no coefficients, and many conductors that
  do not coordinate do not all pick the same instance.

Heavy decodes, those with long answers, are spread because they stay long: where they gather, the
context grows until all decodes there are slow; the paper measured 23 % more latency from decodes
that share a batch badly. As described there, it compares heavy decodes per light one, for all
requests. For heavy requests that is sound. A light request would go to the instance with most light
ones, make the ratio there lower still, and attract the next: the load of instances would diverge
without a bound. Balancing each kind by itself balances the ratio, too.
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

    from ..records import Request
    from ..state.instance_table import Cluster

    Floats = NDArray[np.float64]
    Rows = NDArray[np.int64]
    Numbers = Floats | list[float]  # [candidates]

Share = Annotated[float, Meta(ge=0.0, le=1.0)]


class DecodeSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """How an instance is chosen for decode."""

    policy: Literal["tbt", "two-level"] = "tbt"
    """Which of the instances that fit is taken; see the top of `selection.py`."""

    near_share: Share = 0.05
    """Candidates whose cost is at most this much above the lowest count as equal to it. The
    latency model is wrong by some 5 % in the mean."""

    reserve_share: Annotated[float, Meta(ge=0.0, le=0.9)] = 0.05
    """Of the KV capacity that is kept free, for answers that are longer than predicted. The 1 % of
    vLLM's block manager (as Vidur models it) is of what is taken, not of what is predicted."""

    reserve: Literal["static", "dynamic"] = "static"
    """What an answer takes of the KV room while it runs: all that is predicted from the start, or
    only what it has, so that an instance takes more. TetriInfer's two ways to admit decodes."""

    growth_share: Share = 0.5
    """How much of the answer counts as context in the time between tokens: 0.5 is the mean over its
    length, 1 its end."""

    tbt_share: Annotated[float, Meta(gt=0.0, le=10.0)] = 1.0
    """Of the request's TBT objective that a prediction may use up. Below 1 leaves a margin for
    those who come later."""


@dataclass(slots=True)
class DecodeQuestion:
    """The input of the choice: a request to decode, and the candidate instances.

    `rows` [candidates] are rows of `cluster`; every other array has one number per candidate.
    `output_tokens` is the predicted length of the answer, `heavy` whether that is a long one.
    `batch`, `context_tokens` and `kv_used_tokens` are the forecast load when the request arrives
    there; None: the current load. Candidates with a TBT of at most `limits_s` are preferred: above
    it, somebody's objective would break. `growing_tokens` are the tokens that running requests will
    still add beyond those counted as used. `factor` corrects predicted step times
    (`calibration.py`). `move_s` is the time to transfer the context there after prefill. Without
    `enforce` the TBT objective is ignored, and a request is refused only for lack of KV room or a
    place in the batch. `batch_now` and `context_now` are the arrays in force: the forecast if
    given, else the current load.
    """

    request: Request
    cluster: Cluster
    rows: Rows
    output_tokens: int
    settings: DecodeSettings
    dice: random.Random
    batch: Rows | None = None
    context_tokens: Rows | None = None
    kv_used_tokens: Rows | None = None
    limits_s: Floats | float = np.inf
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
        """The limit of the predicted time between tokens; infinite without an objective."""
        objective_s = self.request.objectives.tbt_s
        if objective_s is None or not self.enforce:
            return np.inf
        return objective_s * self.settings.tbt_share

    def room_tokens(self) -> Floats:
        """Free KV tokens of each candidate, less the reserve, without this request."""
        cluster, rows = self.cluster, self.rows
        share = 1.0 - self.settings.reserve_share
        usable = cluster.kv_capacity_tokens.take(rows).astype(np.float64) * share
        used = self.kv_used_tokens
        used = cluster.kv_used_tokens.take(rows) if used is None else used
        room: Floats = usable - used - self.growing_tokens
        return room

    def places(self) -> NDArray[np.bool_]:
        """Whether each candidate has a free place in its batch."""
        free: NDArray[np.bool_] = self.batch_now < self.cluster.batch_max.take(self.rows)
        return free

    def step_terms(
        self, more_tokens: Floats | float, more_requests: Rows | int = 1
    ) -> dict[str, Floats]:
        """The parts of one decode step in seconds, with `more_tokens` of context and
        `more_requests` in the batch added."""
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
    """The chosen candidate: `at` is its index in `DecodeQuestion.rows`.

    `cost` [candidates] is infinite where the request does not fit or would be too slow; lowest is
    best, except for ties and for "two-level". `tbt_s` [candidates] is the predicted time between
    tokens. `terms`, each [candidates]: the seconds that add up to `tbt_s` (`base_s`, `batch_s`,
    `context_s`), `move_s`, `room_tokens` after the request (negative: too little), and
    `alike_share`: decodes of the request's kind there, per place in the batch.
    """

    at: int
    cost: Numbers
    tbt_s: Numbers
    terms: Mapping[str, Numbers] = field(default_factory=dict)


@dataclass(slots=True)
class NoDecode:
    """No candidate can take the request.

    `reason`: "no_decode" (there is no candidate), "kv_room" (no candidate has KV room and a place
    in its batch) or "tbt" (all candidates with room would be too slow). `at` is the candidate that
    came nearest: the one with the most room, or the fastest with room; -1 without candidates.
    `best_tbt_s` is its predicted time between tokens.
    """

    reason: Literal["no_decode", "kv_room", "tbt"]
    at: int = -1
    best_tbt_s: float | None = None
    tbt_s: Numbers = field(default_factory=list)
    terms: Mapping[str, Numbers] = field(default_factory=dict)


def choose(question: DecodeQuestion) -> DecodeChoice | NoDecode:
    """Choose the instance that decodes this request, or return why there is none."""
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
    kept = eligible & (tbt_s <= q.limits_s)
    able = kept if kept.any() else eligible
    cost = np.where(able, tbt_s + terms["move_s"] / max(answer, 1.0), np.inf)
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
    kv_used_tokens: int,
    heavy: bool = False,
) -> DecodeChoice | NoDecode:
    """`choose` for a single candidate that already has the context, without enforcing the TBT
    objective: with plain numbers instead of arrays, in a tenth of the time. Most requests decode on
    their prefill instance."""
    answer, c = float(output_tokens), cluster
    more_tokens = request.prompt_tokens + settings.growth_share * answer
    base_s, batch_s = c.d0.item(row), c.d1.item(row) * (batch + 1)
    context_s = c.d2.item(row) * (context_tokens + more_tokens)
    tbt_s = base_s + batch_s + context_s
    usable = c.kv_capacity_tokens.item(row) * (1.0 - settings.reserve_share)
    room_tokens = usable - kv_used_tokens - (request.prompt_tokens + answer)
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
    """Decodes of the request's kind (heavy or light) per place in the batch, [candidates]."""
    cluster, rows = question.cluster, question.rows
    alike = cluster.heavy.take(rows)
    if not question.heavy:
        alike = np.maximum(question.batch_now - alike, 0)
    share: Floats = alike / np.maximum(cluster.batch_max.take(rows), 1)
    return share


def _nearest(question: DecodeQuestion, cost: Floats, alike: Floats) -> int:
    """Of the candidates near the lowest cost, the one with the fewest decodes of the request's
    kind, then the lowest cost, then a random one."""
    near = np.flatnonzero(cost <= cost.min() * (1.0 + question.settings.near_share))
    near = _lowest(near, alike)
    near = _lowest(near, cost)
    return int(near[question.dice.randrange(len(near))])


def _two_level(question: DecodeQuestion, cost: Floats, alike: Floats) -> int:
    """The power of two choices: of two random candidates, the one with fewer decodes of the
    request's kind, then the lower cost."""
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
