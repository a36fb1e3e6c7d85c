"""What a policy is asked, what it answers, and the register of all policies by name. Pure.

A policy compares all candidates at once: costs and their terms are arrays with one number per
candidate, so that a thousand instances take some dozens of numpy operations, and every term of
every candidate is there to explain the choice, without having been put into words for each.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

import numpy as np

from ..errors import InvalidRequest

if TYPE_CHECKING:
    import random
    from collections.abc import Callable

    from numpy.typing import NDArray

    from ..cluster import Cluster
    from ..computing import Computing
    from ..index import Match
    from ..records import Fetch, Request
    from ..transfers import Transfers
    from .settings import PolicySettings

    Floats = NDArray[np.float64]
    Blocks = NDArray[np.int64]


@dataclass(slots=True)
class Question:
    """Where should this request be prefilled?

    `rows` [candidates] are rows of `cluster`. The other arrays have one number per candidate:
    leading blocks of the prompt that the instance has in HBM, that it and its node have in HBM or
    DRAM, and those and NVMe. `best_blocks` is the longest leading part that any one holder has,
    `pool_blocks` what all holders have together. `queue_s` is how long each would wait.
    """

    request: Request
    now: float
    cluster: Cluster
    rows: Blocks
    hbm_blocks: Blocks
    dram_blocks: Blocks
    local_blocks: Blocks
    best_blocks: int
    pool_blocks: int
    queue_s: Floats
    match: Match
    transfers: Transfers
    computing: Computing
    settings: PolicySettings
    dice: random.Random

    @property
    def block_tokens(self) -> int:
        """Tokens of one block; the same for all candidates, which serve one model."""
        spec = self.cluster.specs[int(self.rows[0])]
        assert spec is not None
        return spec.block_tokens

    def prefill_s(self, cached_tokens: NDArray[np.int64] | int) -> Floats:
        """Seconds to compute the prompt on each candidate if so many leading tokens are there:
        c0 + c1 (n - p) + c2 (n² - p²). The last token is always computed: nothing else gives the
        first token of the answer."""
        c, rows, n = self.cluster, self.rows, self.request.prompt_tokens
        p = np.minimum(cached_tokens, n - 1).astype(np.float64)
        seconds: Floats = c.c0[rows] + c.c1[rows] * (n - p) + c.c2[rows] * (n * float(n) - p * p)
        return seconds


@dataclass(slots=True)
class Choice:
    """`at` is the index of the chosen one in `Question.rows`. `cost` [candidates], lowest best;
    `terms`: its parts, each [candidates]. `ttft_s` [candidates] is what each would predict.
    `cached_blocks` are used on the chosen one, after `fetches`."""

    at: int
    cost: Floats
    ttft_s: Floats
    cached_blocks: int
    terms: dict[str, Floats] = field(default_factory=dict)
    fetches: tuple[Fetch, ...] = ()
    wait_for: str = ""


class Policy(Protocol):
    """Chooses an instance for prefill. Has no state but what it says; `question.rows` is never
    empty."""

    name: str

    def choose(self, question: Question) -> Choice:
        """The best candidate, by this policy."""


_POLICIES: dict[str, Callable[[], Policy]] = {}


def register(name: str) -> Callable[[Callable[[], Policy]], Callable[[], Policy]]:
    """A class decorator: the policy can be chosen by this name."""

    def add(make: Callable[[], Policy]) -> Callable[[], Policy]:
        _POLICIES[name] = make
        return make

    return add


def policy(name: str) -> Policy:
    """A new policy of this name. Raises InvalidRequest for one that does not exist."""
    make = _POLICIES.get(name)
    if make is None:
        raise InvalidRequest(f"no policy {name!r}; there are {', '.join(names())}")
    return make()


def names() -> list[str]:
    """All policies."""
    return sorted(_POLICIES)


def lowest(cost: Floats, dice: random.Random) -> int:
    """The index of the lowest cost; ties are decided by the dice, or the first instance would get
    all requests of an idle cluster."""
    least = int(cost.argmin())  # the first of them
    best = np.flatnonzero(cost == cost[least])
    return least if len(best) < 2 else best.item(dice.randrange(len(best)))


def quickest(question: Question, ttft_s: Floats, work_s: Floats) -> int:
    """The index of the lowest TTFT [candidates]. Of those that the model could not tell from it,
    who makes the least work (`work_s` [candidates]: seconds to bring blocks and to compute), then
    who has the fewest decodes, which each prefill there delays; then the dice. Without that, who is
    the quickest by a millionth gets all requests until it is full, and all is computed again that
    somebody else has after the same time."""
    factor, everybody = 1.0 + question.settings.near_share, len(ttft_s)
    least = int(ttft_s.argmin())
    near = (ttft_s <= ttft_s[least] * factor).nonzero()[0]
    if len(near) < 2:
        return least
    # Of a hot prompt everybody is near, which saves some microseconds of taking parts.
    work_s = work_s if len(near) == everybody else work_s.take(near)
    little = work_s <= work_s[work_s.argmin()] * factor
    near = near if little.all() else near[little]
    rows = question.rows if len(near) == everybody else question.rows.take(near)
    batch = question.cluster.batch.take(rows)
    idlest = (batch == batch[batch.argmin()]).nonzero()[0]
    return int(near[idlest[question.dice.randrange(len(idlest))]])
