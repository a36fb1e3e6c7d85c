"""The current state of a conductor as metrics. Pure."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from typing import TYPE_CHECKING

import numpy as np

from ..records import Role, Status
from ..state.prefix_index import TIERS

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ..web.metrics import Family
    from .conductor import Conductor

# How requests end other than by the events "finished" and "cancelled".
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
    """The metric families; a scrape with a thousand instances takes some milliseconds."""
    numbers = core.statistics()
    yield from _instances(core)
    yield from _index(core, now)
    yield (
        "requests_in_flight",
        "Requests that were placed and have not ended.",
        (),
        [((), float(numbers["in_flight"]))],
    )
    yield (
        "requests_held",
        "Of these, those that wait for their release.",
        (),
        [((), float(core.queues.waiting_in_all if core.dispatch.holding else 0))],
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


def _instances(core: Conductor) -> Iterator[Family]:
    cluster = core.cluster
    counted = Counter[tuple[Role, Status]]()
    for role, able in (
        (Role.PREFILL, cluster.prefills & ~cluster.decodes),
        (Role.DECODE, cluster.decodes & ~cluster.prefills),
        (Role.MIXED, cluster.prefills & cluster.decodes),
    ):
        counted[role, Status.READY] = int(np.count_nonzero(cluster.ready & able))
    for row in np.flatnonzero(cluster.used & ~cluster.ready).tolist():  # few, mostly
        counted[cluster.role(row), cluster.status[row]] += 1
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
    """Metrics of the prefix index. A holder has an age only if it reported its blocks itself; one
    with guessed blocks only has none."""
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
        "index_parts",
        "Parts of prompts' first blocks that somebody holds.",
        (),
        [((), float(len(core.parts.index)))],
    )
    yield (
        "index_age_seconds",
        "Since the longest silent holder was heard of.",
        ("tier",),
        [((tier,), ages[tier]) for tier in TIERS if tier in ages],
    )
