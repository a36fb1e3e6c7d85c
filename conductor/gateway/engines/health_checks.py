"""Asks every instance at its `/health`, as vLLM and SGLang have it, whether it is well."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from .circuit_breakers import CircuitBreakers
    from .engine_client import Engines
    from .instance_cache import Known

log = logging.getLogger("tiffin.gateway")


async def check_all(
    engines: Engines,
    known: Known,
    breakers: CircuitBreakers,
    clock: Callable[[], float],
    timeout_s: float,
) -> None:
    """Ask all known instances at once, and tell the breakers."""
    names = [name for name in known.names() if known.url(name)]
    breakers.keep(known.names())
    healthy = await asyncio.gather(
        *(engines.healthy(known.target(name), timeout_s) for name in names)
    )
    before = set(breakers.open(clock()))
    for name, well in zip(names, healthy, strict=True):
        breakers.checked(name, well, clock())
    for name in set(breakers.open(clock())) - before:
        log.warning("%s does not say that it is well: it gets no requests for now", name)
