"""A node's statistics: plain nested values, the shape of `tiffin status --json`."""

from __future__ import annotations

import os
import time
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ..tiers.base import Tier
    from .core.node_core import NodeCore
    from .core.records import Session
    from .core.tier_ledger import TierSpace


def numbers_of(core: NodeCore, dram: Tier, nvme: Tier | None, started_at: float) -> dict[str, Any]:
    """Statistics of tiers, counters and sessions. The caller must hold the node's lock."""
    return {
        "pid": os.getpid(),
        "started_at": started_at,
        "uptime_s": time.time() - started_at,
        "blocks": len(core.index),
        "pinned_blocks": len(core.residency.pins),
        "tiers": _tiers([(dram, core.residency.dram), (nvme, core.residency.nvme)]),
        "counters": asdict(core.residency.counters),
        "sessions": [_session(session) for session in core.sessions.values()],
    }


def _session(session: Session) -> dict[str, Any]:
    leases = session.leases.values()
    return {
        "name": session.name,
        "pid": session.pid,
        "gone": session.gone,
        "read_leases": sum(not x.writes for x in leases),
        "write_leases": sum(x.writes for x in leases),
        "zombie_leases": len(session.zombies),
        "held_bytes": sum(
            r.length for x in [*leases, *session.zombies.values()] for r in x.replicas
        ),
    }


def _tiers(tiers: list[tuple[Tier | None, TierSpace | None]]) -> dict[str, dict[str, Any]]:
    numbers = {}
    for tier, space in tiers:
        if tier is None or space is None:
            continue
        medium = asdict(tier.statistics())
        numbers[str(medium["name"])] = {
            **medium,
            **asdict(space.statistics()),
            "name": str(medium["name"]),
            "writable": space.writable,
        }
    return numbers
