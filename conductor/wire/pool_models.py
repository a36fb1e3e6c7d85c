"""Bodies of HTTP requests and answers about the pool as a whole, as typed structs (`models.py`)."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta

from .models import Body, Reply, RoleName, Seconds


class HotPrefixReply(Reply, frozen=True, kw_only=True):
    """A prefix that many prompts begin with. Keys are chained: the last one names all of it."""

    model: str
    blocks: int
    last_key: str
    popularity: Annotated[float, Meta(description="Prompts that begin so; older ones count less.")]
    share: Annotated[float, Meta(description="Of the model's prompts, 0 to 1.")]
    rate_s: Annotated[float, Meta(description="Prompts per second.")]
    block_bytes: int


class HotReply(Reply, frozen=True, kw_only=True):
    """The most popular prefixes, hottest first."""

    prefixes: list[HotPrefixReply]


class ReasonReply(Reply, frozen=True, kw_only=True):
    """A number that a plan rests on."""

    name: str
    value: float | None
    unit: str
    why: str


class WishReply(Reply, frozen=True, kw_only=True):
    """The flip after which the instances serve most."""

    instance: str
    role: RoleName


class PlanReply(Reply, frozen=True, kw_only=True):
    """What should be done about one model's instances, and why."""

    model: str
    planned_at: float
    mode: Annotated[
        Literal["off", "advise", "act"], Meta(description="When it was planned: `act` flips.")
    ]
    prefill: Annotated[int, Meta(description="Ready instances that prefill.")]
    decode: Annotated[int, Meta(description="Ready instances that decode.")]
    mixed: Annotated[int, Meta(description="Ready instances that do both.")]
    load: Annotated[float | None, Meta(description="Expected requests over `serves_rate`.")]
    serves_rate: Annotated[float | None, Meta(description="Requests/s within the objectives.")]
    best_prefill: Annotated[int, Meta(description="Of those that are not mixed.")]
    instances_wanted: Annotated[int, Meta(description="In all. Advice: nobody starts them.")]
    flip: Annotated[WishReply | None, Meta(description="If there is one that helps.")]
    flip_now: Annotated[bool, Meta(description="Whether this conductor began it.")]
    held_back: Annotated[str, Meta(description="Why it did not.")]
    reasons: list[ReasonReply]


class FlipReply(Reply, frozen=True, kw_only=True):
    """An instance's way from role to role."""

    instance: str
    old: RoleName
    new: RoleName
    step: Literal[
        "draining", "saving", "committing", "verifying", "ready", "returned", "failed", "lost"
    ]
    began_at: float
    ends_at: Annotated[
        float, Meta(description="When this step is given up; of one that has ended, when it did.")
    ]
    why: str


class PlansReply(Reply, frozen=True, kw_only=True):
    """What this conductor plans."""

    leads: Annotated[
        bool, Meta(description="Of several conductors only one orders what it plans: this one?")
    ]
    leader: Annotated[
        str, Meta(description="Its name; empty if nobody is known to lead, or there are no others.")
    ]
    plans: Annotated[list[PlanReply], Meta(description="The last one of each model.")]
    flips: Annotated[
        list[FlipReply],
        Meta(description="Of this conductor: the latest that have ended, then those under way."),
    ]


class DrainBody(Body, frozen=True, kw_only=True):
    """How a node is emptied."""

    deadline_s: Annotated[
        Seconds | None, Meta(description="When to give up; else the setting `draining.deadline_s`.")
    ] = None


class DrainReply(Reply, frozen=True, kw_only=True):
    """How far a node, or an instance, is emptied."""

    kind: Literal["node", "instance"]
    name: str
    phase: Literal[
        "closing", "hot", "rest", "waiting", "done", "late", "failed", "lost", "cancelled"
    ]
    left_s: Annotated[float, Meta(description="Until its deadline; 0 if it has ended.")]
    unique_blocks: Annotated[int, Meta(description="Hot ones that nobody else has yet.")]
    moved_blocks: Annotated[int, Meta(description="Hot ones that were copied away.")]
    moved_bytes: int
    handed_over: Annotated[
        int, Meta(description="Blocks that are elsewhere, as the node itself counts at the end.")
    ]
    left_blocks: Annotated[int, Meta(description="Blocks that are not: nobody had room, or time.")]
    failures: Annotated[int, Meta(description="Orders that failed.")]
    requests: Annotated[int, Meta(description="Of an instance, in flight.")]


class DrainsReply(Reply, frozen=True, kw_only=True):
    """Drains that this conductor was asked for: nodes, then instances, each oldest first."""

    drains: list[DrainReply]
