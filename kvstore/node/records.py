"""What a node remembers: blocks, their replicas, sessions and leases.

Everything here is plain state; `core.py` is the only module that changes it. At 500,000 resident
blocks each field costs 4 MB, so a record holds nothing that can be derived: the extent's length and
offset live in the replica and nowhere else, and the parent is a reference, not a second key.
"""

from __future__ import annotations

import enum
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from ..block import BlockState

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ..tiers.base import TierName
    from .following import Followed

# Bits of `Block.where`, and of the byte per block that `match` returns.
IN_DRAM = 1
IN_NVME = 2


class Pin(enum.IntEnum):
    """How strongly a block is wished to stay. SOFT: evicted last. HARD: never evicted."""

    NONE = 0
    SOFT = 1
    HARD = 2


class Block:
    """One named block of this node: at most one replica per tier, and its place in the chain.

    Invariants: a block is in the index exactly while `where != 0`; `children` counts the blocks,
    committed or being written, whose `parent` is this object, so a block with children is never
    dropped from its last tier (a descendant without its ancestors can never be matched).
    """

    __slots__ = (
        "children",
        "depth",
        "dram",
        "key",
        "move",
        "nvme",
        "parent",
        "pin",
        "uses",
        "where",
    )

    def __init__(self, key: bytes, parent: Block | None, depth: int) -> None:
        self.key = key
        self.parent = parent
        self.depth = depth
        self.children = 0
        self.uses = 0
        self.where = 0
        self.pin = Pin.NONE
        self.dram: Replica | None = None
        self.nvme: Replica | None = None
        self.move: Move | None = None

    def replicas(self) -> list[Replica]:
        """The committed replicas, fastest tier first."""
        return [replica for replica in (self.dram, self.nvme) if replica is not None]

    @property
    def tier(self) -> int:
        """Where it is read from: IN_DRAM, IN_NVME if it is there alone, 0 if it is nowhere."""
        return self.where & IN_DRAM or self.where

    def __repr__(self) -> str:
        tiers = ", ".join(str(replica.tier) for replica in self.replicas()) or "nowhere"
        return (
            f"<Block {self.key.hex()[:8]} depth={self.depth} children={self.children} in {tiers}>"
        )


class Replica:
    """One copy of a block: `length` bytes at `offset` of a tier's arena.

    `holds` counts readers, writers and moves that still touch the extent. The extent goes back to
    the arena only when the replica is no longer wanted *and* `holds` is zero; between the two it is
    QUARANTINED.
    """

    __slots__ = ("block", "generation", "holds", "length", "offset", "state", "tier", "visits")

    def __init__(
        self, block: Block, tier: TierName, offset: int, length: int, generation: int
    ) -> None:
        self.block = block
        self.tier = tier
        self.offset = offset
        self.length = length
        self.generation = generation
        self.holds = 0
        self.visits = 0
        self.state = BlockState.RESERVED

    @property
    def key(self) -> bytes:
        """The key of its block (what eviction policies call an entry's key)."""
        return self.block.key

    @property
    def depth(self) -> int:
        """How many blocks come before this one in its prefix."""
        return self.block.depth

    def __repr__(self) -> str:
        return (
            f"<Replica {self.key.hex()[:8]} {self.tier} {self.state} "
            f"[{self.offset}, {self.offset + self.length}) holds={self.holds}>"
        )


class Priority(enum.IntEnum):
    """Order of background moves: a waiting reader before a waiting writer before housekeeping."""

    PROMOTE = 0
    DEMOTE_NOW = 1
    DEMOTE_AHEAD = 2
    WRITE_BACK = 3


class Move:
    """A copy of one block between two tiers, ordered by the core and carried out by the mover.

    Promotions and write-backs leave the source where it is; a demotion frees it.
    """

    __slots__ = ("block", "cancelled", "priority", "source", "started", "target", "tickets")

    def __init__(self, block: Block, source: Replica, target: Replica, priority: Priority) -> None:
        self.block = block
        self.source = source
        self.target = target
        self.priority = priority
        self.cancelled = False
        self.started = False  # by the mover; it may be submitted again, with a better priority
        self.tickets: list[Ticket] = []

    @property
    def keeps_source(self) -> bool:
        """Whether the block stays in the tier it is copied from."""
        return self.priority in (Priority.PROMOTE, Priority.WRITE_BACK)


class MoveOutcome(enum.Enum):
    """How a move ended. CORRUPT: the source failed its checks. FAILED: a medium refused."""

    DONE = "done"
    CORRUPT = "corrupt"
    READ_FAILED = "read_failed"
    WRITE_FAILED = "write_failed"


class Reason(enum.IntEnum):
    """Why a lease or a reservation covers fewer blocks than were asked for."""

    NONE = 0
    MISS = 1
    BUSY = 2  # another writer has reserved it and has not committed yet
    NO_ROOM = 3
    DEADLINE = 4
    CORRUPT = 5
    MEDIUM = 6  # the medium refused the read


class Erase(NamedTuple):
    """Make the NVMe extent at `offset` unfindable for a restart; it was freed."""

    offset: int
    length: int


@dataclass(slots=True)
class Counters:
    """What happened since the node started, in blocks unless the name says otherwise."""

    dram_hits: int = 0
    nvme_hits: int = 0
    misses: int = 0
    dram_hit_bytes: int = 0
    nvme_hit_bytes: int = 0
    commits: int = 0
    commit_bytes: int = 0
    aborts: int = 0
    expired: int = 0
    evictions: int = 0
    demotions: int = 0
    write_backs: int = 0
    promotions: int = 0
    removals: int = 0
    corrupt: int = 0
    medium_errors: int = 0
    window_evictions: int = 0


class Kept(enum.IntEnum):
    """What became of one slot of a commit. PENDING: other ranks of its block are awaited."""

    REFUSED = 0
    STORED = 1
    PENDING = 2


class Lease:
    """A session's hold on some replicas. A write lease ends at `expires_at`, and so does a read
    lease of a remote session; a read lease on the same host ends with its release or with its
    process (see docs/leases.md). `transfers` counts transfers of it that are under way; `rank` is
    its writer's among those that write these blocks together, None if it is alone. `followed` is
    set for a read lease that also holds blocks which are still being written."""

    __slots__ = (
        "expires_at",
        "followed",
        "id",
        "rank",
        "replicas",
        "session",
        "transfers",
        "writes",
    )

    def __init__(
        self, lease_id: int, session: Session, replicas: list[Replica], *, writes: bool
    ) -> None:
        self.id = lease_id
        self.session = session
        self.replicas = replicas
        self.writes = writes
        self.rank: int | None = None
        self.followed: Followed | None = None
        self.expires_at = math.inf
        self.transfers = 0


class Session:
    """One connected client. `gone` once its connection ended and its process may still live.

    A `remote` one has not mapped the node's memory: the node's own threads move its bytes, and hold
    what they touch. So whatever ends a lease of it has fenced its holder as well.
    """

    __slots__ = ("gone", "id", "leases", "name", "pid", "remote", "zombies")

    def __init__(self, session_id: int, name: str, pid: int, *, remote: bool = False) -> None:
        self.id = session_id
        self.name = name
        self.pid = pid
        self.remote = remote
        self.gone = False
        self.leases: dict[int, Lease] = {}
        # Write leases that expired, or whose connection broke: cancelled, yet their process may
        # still write. They hold their extents until that process acknowledges or dies.
        self.zombies: dict[int, Lease] = {}


class Ticket:
    """A read request on its way to a lease: some of `keys` held, some still being promoted.

    `replicas[i]` is for `keys[i]`; `blocked` while the next one waits for room in DRAM. `follows`:
    blocks that are being written are held as well.
    """

    __slots__ = (
        "abandoned",
        "blocked",
        "follows",
        "keys",
        "pending",
        "reason",
        "replicas",
        "session",
    )

    def __init__(self, session: Session, keys: Sequence[bytes], *, follows: bool = False) -> None:
        self.session = session
        self.keys = keys
        self.follows = follows
        self.replicas: list[Replica] = []
        self.pending = 0
        self.blocked = False
        self.reason = Reason.NONE
        self.abandoned = False

    @property
    def ready(self) -> bool:
        """True when nothing is on its way any more."""
        return self.pending == 0 and not self.blocked
