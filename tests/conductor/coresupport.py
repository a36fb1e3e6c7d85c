"""A conductor's core for tests: instances, prompts, and events of requests."""

from __future__ import annotations

import hashlib
import random

from tiffin.conductor.core import Conductor
from tiffin.conductor.core.settings import Settings, patched
from tiffin.conductor.records import (
    InstanceSpec,
    Request,
    RequestEvent,
    Role,
)

PROFILE = "llama-3-70b.a800.tp8.mooncake"


BLOCK = 512


OWN = ("own_queued", "own_queued_tokens", "own_batch", "own_context_tokens", "own_kv_used_tokens")


def keys(name: str, count: int) -> tuple[bytes, ...]:
    """The chained keys of a prompt."""
    return tuple(
        hashlib.blake2b(f"{name}/{at}".encode(), digest_size=16).digest() for at in range(count)
    )


def spec(name: str, role: Role = Role.MIXED, **more: object) -> InstanceSpec:
    given = {"block_bytes": 160 << 20, "node": f"node-{name}", **more}
    return InstanceSpec(name, "m", role, PROFILE, **given)  # type: ignore[arg-type]


def conductor(*specs: InstanceSpec, **changes: object) -> Conductor:
    made = Conductor(patched(Settings(), changes), dice=random.Random(1))
    for one in specs:
        made.register(one, 0.0)
    return made


def prompt(name: str, blocks: int = 8, **more: object) -> Request:
    given = {"keys": keys(name, blocks), **more}
    return Request(name, "m", blocks * BLOCK + 10, **given)  # type: ignore[arg-type]


def tell(made: Conductor, request_id: str, *kinds: str, now: float, tokens: int = 0) -> None:
    for kind in kinds:
        made.observe(RequestEvent(request_id, kind, tokens if kind == "tokens" else 0), now)


def nothing_is_promised(made: Conductor) -> bool:
    return all(not getattr(made.cluster, column).any() for column in OWN)


def nothing_moves(made: Conductor) -> bool:
    """Whether no transfer is booked, and no card has anything to do."""
    return len(made.bookings) == 0 and made.transfers.idle
