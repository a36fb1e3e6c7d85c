"""What a conductor is like at the moment, as metrics. Pure."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from typing import TYPE_CHECKING

from .index import TIERS
from .records import Role, Status

if TYPE_CHECKING:
    from collections.abc import Iterator

    from .core import Conductor
    from .metrics import Family

# How requests end that were neither finished nor cancelled.
_ENDS = ("expired", "preempted", "rescheduled")
_SHADOW = (
    "admitted_met",
    "admitted_missed",
    "admitted_unknown",
    "rejected_would_have_met",
    "rejected_would_have_missed",
    "rejected_unknown",
)


def state(core: Conductor, now: float, followers: int) -> Iterator[Family]:
    """Families of metrics: a scrape with a thousand instances takes some milliseconds."""
    numbers = core.statistics()
    yield from _instances(core, now)
    yield from _index(core, now)
    yield (
        "requests_in_flight",
        "Requests that were placed and have not ended.",
        (),
        [((), float(numbers["in_flight"]))],
    )
    yield (
        "requests_ended_total",
        "Requests that ended otherwise than by an event.",
        ("why",),
        [((why,), float(numbers[why])) for why in _ENDS],
    )
    yield (
        "shadow_requests_total",
        "Objectives met or missed: of admitted ones observed, of rejected ones estimated.",
        ("outcome",),
        [((outcome,), float(getattr(numbers["shadow"], outcome))) for outcome in _SHADOW],
    )
    yield (
        "leads",
        "1 if what this conductor plans is ordered, which it is of one of several.",
        (),
        [((), float(core.steering.leads(now)))],
    )
    yield "followers", "Connections that follow the decisions.", (), [((), float(followers))]


def _instances(core: Conductor, now: float) -> Iterator[Family]:
    counted = Counter((view.role, view.status) for view in core.instances(now))
    yield (
        "instances",
        "Registered instances.",
        ("role", "status"),
        [
            ((role.value, status.value), float(counted[role, status]))
            for role in Role
            for status in Status
        ],
    )


def _index(core: Conductor, now: float) -> Iterator[Family]:
    """Ages are of those who have said anything themselves; what is only guessed has none."""
    index = core.index
    held, ages = Counter[str](), defaultdict[str, float](float)
    for number in index.numbers():
        tier = index.label(number).rpartition("/")[2]
        held[tier] += index.blocks_of(number)
        age_s = index.age_s(number, now)
        if math.isfinite(age_s):
            ages[tier] = max(ages[tier], age_s)
    yield "index_blocks", "Blocks that somebody holds.", (), [((), float(len(index)))]
    yield (
        "index_held_blocks",
        "Pairs of a block and a holder of this kind.",
        ("tier",),
        [((tier,), float(held[tier])) for tier in TIERS],
    )
    yield (
        "index_guessed_blocks",
        "Of these, what follows from routing alone.",
        (),
        [((), float(core.holdings.guessed_blocks))],
    )
    yield (
        "index_age_seconds",
        "Since the longest silent holder was heard of.",
        ("tier",),
        [((tier,), ages[tier]) for tier in TIERS if tier in ages],
    )
