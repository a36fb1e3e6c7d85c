"""Bodies about engines that the conductor itself asks: `conductor/discovery/`."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta, Struct

from .models import Name, Reply, RoleName

Port = Annotated[int, Meta(ge=1, lt=1 << 16)]
Positive = Annotated[int, Meta(ge=1, le=1 << 40)]


class EngineOptions(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What an engine does not tell, or what to take instead of what it tells. Left out: what it
    tells."""

    id: Annotated[
        Name, Meta(description="The instance's id; else HOST:PORT, or the pod's name.")
    ] = ""
    model: Annotated[
        Name, Meta(description="Which of its models; else the first that is no adapter.")
    ] = ""
    role: Annotated[
        RoleName | None,
        Meta(description="Else what its connector for KV transfer says, or `mixed`."),
    ] = None
    profile: Annotated[
        Name, Meta(description="Name of its latency profile, which no engine tells.")
    ] = ""
    node: Annotated[Name, Meta(description="The kvstore node on its host.")] = ""
    fetches: Annotated[
        bool, Meta(description="Whether it can bring blocks from elsewhere, by the pool.")
    ] = False
    kv_capacity_tokens: Positive | None = None
    batch_max: Annotated[int, Meta(ge=1, le=1 << 20)] | None = None
    block_tokens: Annotated[
        Annotated[int, Meta(ge=1, le=1 << 16)] | None,
        Meta(
            description="Of the index, a multiple of the engine's own. Else that of the model's "
            "other instances, or 512, or the engine's own if 512 is no multiple."
        ),
    ] = None
    kv_events_port: Annotated[
        Port | None, Meta(description="Where it publishes its KV events, on its host.")
    ] = None
    kv_events_replay_port: Annotated[
        Port | None, Meta(description="Where it replays them, on its host.")
    ] = None
    kv_events_topic: Name | None = None


class EngineBody(EngineOptions, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """An engine to be asked, registered, and asked for its load from then on."""

    url: Annotated[
        Name, Meta(min_length=1, description="`http://HOST:PORT` or `https://HOST:PORT`.")
    ]


class EngineReply(Reply, frozen=True, kw_only=True):
    """An engine, and why it is not registered or does not answer."""

    url: str
    instance: Annotated[str, Meta(description="Its id; empty until it has said what it is.")]
    sources: Annotated[list[str], Meta(description="Who names it; none: it is being drained.")]
    error: str = ""
    failing_s: float | None = None
    told: Annotated[
        bool, Meta(description="It sends heartbeats of its own, which count instead.")
    ] = False
    removed: Annotated[bool, Meta(description="An operator has removed its instance.")] = False


class EnginesReply(Reply, frozen=True, kw_only=True):
    """All engines, and sources that could not be asked."""

    engines: list[EngineReply]
    failing: Annotated[list[str], Meta(description="Sources that could not be asked, and why.")]
