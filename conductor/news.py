"""What was learnt from other conductors, for whoever follows instances here. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from .records import InstanceSpec, RequestEvent

# Of each kind, until somebody asks for them: if nobody does, they are not kept for ever.
NEWS_MAX = 65_536

Learnt = TypeVar("Learnt")


@dataclass(slots=True)
class News:
    """What is new since the last look: instances that `joined` (or changed) and `left`, `schemas`
    of models as (model, canonical text), `events` of our requests that were reported elsewhere."""

    joined: list[InstanceSpec] = field(default_factory=list)
    left: list[str] = field(default_factory=list)
    schemas: list[tuple[str, str]] = field(default_factory=list)
    events: list[RequestEvent] = field(default_factory=list)


def learn(news: list[Learnt], item: Learnt) -> None:
    """One more, unless there are too many."""
    if len(news) < NEWS_MAX:
        news.append(item)
