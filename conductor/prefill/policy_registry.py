"""The input and output of a prefill policy, and the registry of all policies by name. Pure.

A policy compares all candidates at once: costs and their terms are arrays with one number per
candidate, so that a thousand instances take some dozens of numpy operations, and every term of
every candidate is available to explain the choice, without an object built for each.
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

    from ..cost.transfer_model import TransferModel
    from ..records import Fetch, Request
    from ..state.inflight_prefills import Computing
    from ..state.instance_table import Cluster
    from ..state.prefix_index import PrefixMatch
    from .policies.policy_settings import PolicySettings
    from .wait_estimate import Coming

    Floats = NDArray[np.float64]
    Blocks = NDArray[np.int64]


@dataclass(slots=True)
class PolicyQuestion:
    """The input of a policy: a request to prefill, and the candidate instances.

    `rows` [candidates] are rows of `cluster`. The other arrays have one number per candidate:
    leading blocks of the prompt that the instance has in HBM, that it and its node have in HBM or
    DRAM, and in HBM, DRAM or NVMe. These are blocks that it will have at this request's turn:
    those that prompts queued there are going to compute count as in HBM. `held_blocks` are those
    that it and its node have now. `best_blocks` is the longest leading part that any one holder
    has, `pool_blocks` the longest that all holders have together. `queue_s` is each candidate's
    queueing time, without the prompts in `coming`, whose blocks still come. `cached_part_tokens`:
    the prompt's first tokens that the instance has in HBM where they end within a block; None if
    nobody is known to have any.
    """

    request: Request
    now: float
    cluster: Cluster
    rows: Blocks
    hbm_blocks: Blocks
    dram_blocks: Blocks
    local_blocks: Blocks
    held_blocks: Blocks
    best_blocks: int
    pool_blocks: int
    queue_s: Floats
    coming: Coming | None
    match: PrefixMatch
    transfers: TransferModel
    computing: Computing
    settings: PolicySettings
    dice: random.Random
    overlapped: bool = field(default=False, kw_only=True)  # its KV leaves while it is computed
    cached_part_tokens: Blocks | None = field(default=None, kw_only=True)

    @property
    def block_tokens(self) -> int:
        """Tokens of one block; the same for all candidates, which serve one model."""
        spec = self.cluster.specs[int(self.rows[0])]
        assert spec is not None
        return spec.block_tokens

    def tokens(self, blocks: Blocks) -> Blocks:
        """Tokens of the prompt that each candidate need not compute if it uses its leading `blocks`
        [candidates]: theirs, or those that end within a block."""
        tokens: Blocks = blocks * self.block_tokens
        if self.cached_part_tokens is not None:
            tokens = np.maximum(tokens, self.cached_part_tokens)
        return tokens


@dataclass(slots=True)
class Choice:
    """The answer of a policy. `at` is the index of the chosen candidate in `PolicyQuestion.rows`.
    `cost` [candidates], lowest best; `terms`: its parts, each [candidates]. `ttft_s` [candidates]
    is the predicted TTFT. The chosen candidate uses `cached_blocks`, after `fetches`: they have
    come in `ready_s`, and the prompt occupies the instance for `own_s`."""

    at: int
    cost: Floats
    ttft_s: Floats
    cached_blocks: int
    own_s: float
    terms: dict[str, Floats] = field(default_factory=dict)
    fetches: tuple[Fetch, ...] = ()
    ready_s: float = 0.0


class Policy(Protocol):
    """Chooses an instance for prefill. `question.rows` is never empty. A policy with state of its
    own documents it."""

    name: str

    def choose(self, question: PolicyQuestion) -> Choice:
        """The best candidate, by this policy."""


# The largest share by which errors of calibration make two instances equal, as of `near_share`.
_ERROR_MAX = 0.2

_POLICIES: dict[str, Callable[[], Policy]] = {}


def register(name: str) -> Callable[[Callable[[], Policy]], Callable[[], Policy]]:
    """A class decorator that registers a policy under `name`."""

    def add(make: Callable[[], Policy]) -> Callable[[], Policy]:
        _POLICIES[name] = make
        return make

    return add


def policy(name: str) -> Policy:
    """A new policy object. Raises InvalidRequest for an unknown name."""
    make = _POLICIES.get(name)
    if make is None:
        raise InvalidRequest(f"no policy {name!r}; there are {', '.join(names())}")
    return make()


def names() -> list[str]:
    """The names of all registered policies, sorted."""
    return sorted(_POLICIES)


def lowest(cost: Floats, dice: random.Random) -> int:
    """The index of the lowest cost. Ties are broken at random, or the first instance would get all
    requests of an idle cluster."""
    least = int(cost.argmin())  # the first of equal ones
    best = np.flatnonzero(cost == cost[least])
    return least if len(best) < 2 else best.item(dice.randrange(len(best)))


def quickest(
    question: PolicyQuestion, cost_s: Floats, work_s: Floats, waits_s: Floats | None = None
) -> int:
    """The index of the lowest TTFT, or other cost in seconds, [candidates]. Candidates within
    `near_share` of it are ties, as the latency model can not tell them apart, and so are those that
    the errors of both calibrated factors do not tell apart. Of these the shortest
    wait for the hand-over wins (`waits_s` [candidates], see `handover_wait.py`; times as near as
    above are the same), then the least work (`work_s` [candidates]: seconds to load blocks and to
    compute), then the fewest decodes, which each prefill there delays; then a random choice.
    Without these tie-breakers, an instance that is quicker by a millionth would get all requests
    until it is full, and would recompute blocks that another instance could use with the same TTFT.
    """
    least, everybody = int(cost_s.argmin()), len(cost_s)
    errors = question.cluster.prefill_error.take(question.rows)
    shares = np.minimum(2.0 * np.hypot(errors, errors[least]), _ERROR_MAX)
    shares = np.maximum(shares, question.settings.near_share)
    near = (cost_s <= cost_s[least] * (1.0 + shares)).nonzero()[0]
    if len(near) < 2:
        return least
    shares = shares if len(near) == everybody else shares.take(near)
    if waits_s is not None:
        waits_s = waits_s if len(near) == everybody else waits_s.take(near)
        near_s = cost_s[least] * question.settings.near_share
        soon = waits_s <= waits_s[waits_s.argmin()] + near_s
        if not soon.all():
            near, shares = near[soon], shares[soon]
    # With a hot prompt all candidates are near: skipping `take` then saves some microseconds.
    work_s = work_s if len(near) == everybody else work_s.take(near)
    little = work_s <= work_s[work_s.argmin()] * (1.0 + shares)
    near = near if little.all() else near[little]
    rows = question.rows if len(near) == everybody else question.rows.take(near)
    batch = question.cluster.batch.take(rows)
    idlest = (batch == batch[batch.argmin()]).nonzero()[0]
    return int(near[idlest[question.dice.randrange(len(idlest))]])
