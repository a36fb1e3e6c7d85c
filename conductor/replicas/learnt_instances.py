"""News from other conductors, for the service that follows instances here. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from ..records import InstanceSpec, RequestEvent

# The most items of each kind until the next call of `SharedConductor.news`; a bound on memory if it
# is never called.
NEWS_MAX = 65_536

Learnt = TypeVar("Learnt")


@dataclass(slots=True)
class News:
    """News since the last call: instances that `joined` (or changed) and `left`, instances
    `refused` here as (instance, why), `schemas` of models as (model, canonical text), `events` of
    this conductor's requests that another conductor received and passed on."""

    joined: list[InstanceSpec] = field(default_factory=list)
    left: list[str] = field(default_factory=list)
    refused: list[tuple[str, str]] = field(default_factory=list)
    schemas: list[tuple[str, str]] = field(default_factory=list)
    events: list[RequestEvent] = field(default_factory=list)


def learn(news: list[Learnt], item: Learnt) -> None:
    """Append an item, unless there are NEWS_MAX already."""
    if len(news) < NEWS_MAX:
        news.append(item)
