"""The options of a node, which the operator sets at its start."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from .core.node_core import CoreOptions

if TYPE_CHECKING:
    from pathlib import Path


@dataclass(frozen=True, slots=True)
class NodeOptions:
    """Tiers, threads and rules of one node.

    `flush_s`: timeout for the write-back to NVMe in `close`, of blocks that are only in DRAM; 0
    skips it.
    """

    dram_bytes: int
    nvme_path: Path | None = None
    nvme_bytes: int = 0
    policy: str = "lru"
    hugepages: bool = False
    prefault: bool = True
    nvme_queue_depth: int = 4
    flush_s: float = 30.0
    core: CoreOptions = field(default_factory=CoreOptions)
