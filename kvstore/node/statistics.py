"""A node's statistics: plain nested values, the shape of `tiffin status --json`."""

from __future__ import annotations

import os
import time
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ..tiers.base import Tier
    from .core.records import Session
    from .core.tier_ledger import TierSpace
    from .node import Node


def numbers_of(node: Node, *, waiting_requests: int, queued_moves: int) -> dict[str, Any]:
    """Statistics of tiers, counters and sessions. The caller must hold the node's lock."""
    core = node.core
    return {
        "node": node.name,
        "pid": os.getpid(),
        "started_at": node.started_at,
        "uptime_s": time.time() - node.started_at,
        "policy": node.options.policy,
        "draining": node.draining,
        "blocks": len(core.index),
        "pinned_blocks": len(core.residency.pins),
        "waiting_requests": waiting_requests,
        "queued_moves": queued_moves,
        "tiers": _tiers(node),
        "counters": asdict(core.residency.counters),
        "key_spaces": node.announcements.numbers(),
        "sessions": [_session(session) for session in core.sessions.values()],
        **{name: numbers() for name, numbers in node.extra_numbers.items()},
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


def _tiers(node: Node) -> dict[str, dict[str, Any]]:
    tiers: list[tuple[Tier, TierSpace | None]] = [(node.dram, node.core.residency.dram)]
    if node.nvme is not None:
        tiers.append((node.nvme, node.core.residency.nvme))
    numbers = {}
    for tier, space in tiers:
        assert space is not None
        medium = asdict(tier.statistics())
        numbers[str(medium["name"])] = {
            **medium,
            **asdict(space.statistics()),
            "name": str(medium["name"]),
            "writable": space.writable,
        }
    return numbers
