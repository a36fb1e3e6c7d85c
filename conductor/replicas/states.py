"""What conductors write for each other: a state per conductor, a record per instance. Pure.

Both are MessagePack. All numbers are absolute: a reader that misses a value loses nothing, for the
next one replaces it.
"""

from __future__ import annotations

from typing import Annotated, TypeVar

import msgspec
from msgspec import Meta, Struct

from ..records import InstanceSpec, Load

Name = Annotated[str, Meta(min_length=1, max_length=1024)]
Count = Annotated[int, Meta(ge=0, le=1 << 40)]
Total = Annotated[float, Meta(ge=0, le=1e300)]
# Longer than any queue.
SECONDS_MAX = 86_400.0


class LoadRow(Struct, array_like=True, frozen=True):
    """The load of one conductor's in-flight requests on one instance.

    `queued_s` are the seconds of prefill left in this conductor's queue there. `coming` requests,
    with `coming_tokens` of context, will decode there once their prefill is done.
    """

    instance: Name
    queued: Count = 0
    queued_tokens: Count = 0
    batch: Count = 0
    context_tokens: Count = 0
    kv_used_tokens: Count = 0
    coming: Count = 0
    coming_tokens: Count = 0
    queued_s: Annotated[float, Meta(ge=0, le=SECONDS_MAX)] = 0.0


class HeardRow(Struct, array_like=True, frozen=True):
    """An instance's latest heartbeats at one conductor: the number of the last one, the number of
    the last one with a load (0: none), and that load."""

    instance: Name
    beat: Count = 0
    load_beat: Count = 0
    load: Load = Load()


class DemandRow(Struct, array_like=True, frozen=True):
    """A model's requests that were offered to one conductor since it began: the fields of
    `PromptSums`."""

    model: Name
    sums: Annotated[list[Total], Meta(max_length=16)] = []


class State(Struct, array_like=True, frozen=True):
    """All that the conductor `name` says of itself. `number` grows with every change; `address` is
    the URL for the events of its requests."""

    name: Name
    number: Count = 0
    address: Annotated[str, Meta(max_length=2048)] = ""
    loads: list[LoadRow] = []
    heard: list[HeardRow] = []
    demand: list[DemandRow] = []


class InstanceRecord(Struct, array_like=True, frozen=True):
    """What all conductors know of an instance. Without a `spec` it was removed at `removed_at`,
    Unix time. `flip` is (new role, name of the conductor that flips it), or twice "" if none does.
    `schema` determines the keys of its model's blocks, as canonical text; "" if it is not known."""

    instance: Name
    spec: InstanceSpec | None
    role: Annotated[str, Meta(max_length=16)] = ""
    draining: bool = False
    flip: tuple[str, str] = ("", "")
    schema: str = ""
    removed_at: Total = 0.0

    @property
    def id(self) -> str:
        """The id of the instance; "" if the record names two."""
        return self.instance if self.spec is None or self.spec.id == self.instance else ""


Value = TypeVar("Value", State, InstanceRecord)

# Deterministic, because records are compared by their bytes.
_encoder = msgspec.msgpack.Encoder(order="deterministic")
# The decoder's exceptions: broken or of another type, no UTF-8, nested too deeply.
_NOT_OURS = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)


def pack(value: State | InstanceRecord) -> bytes:
    """The bytes of a value."""
    return _encoder.encode(value)


def unpack(raw: bytes, kind: type[Value]) -> Value | None:
    """The value; None for anything that `pack` would not have made."""
    try:
        return msgspec.msgpack.decode(raw, type=kind)
    except _NOT_OURS:
        return None
