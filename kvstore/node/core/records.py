"""The records of a node's core: blocks, their replicas, sessions, leases, moves and tickets.

Plain state. The core's modules and the eviction policies change it; the shell sets only
`Session.gone` and `Move.started`. At 500,000 resident blocks each field costs 4 MB, so a record
stores nothing that can be derived: the extent's length and offset are stored in the replica and
nowhere else, and the parent is a reference, not a second key.
"""

from __future__ import annotations

import enum
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from ...format.header import BlockState
from .sealed import SegmentPart

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ...tiers.base import TierName
    from .sealed import Sealed

# Bits of `BlockRecord.where`, and of the byte per block that `match` returns.
IN_DRAM = 1
IN_NVME = 2
# In what `match` returns if it was asked for: reserved by a writer, which has not committed yet.
BEING_WRITTEN = 8


class PinLevel(enum.IntEnum):
    """How strongly a pin keeps a block from eviction. SOFT: evicted last. HARD: never evicted."""

    NONE = 0
    SOFT = 1
    HARD = 2


class BlockRecord:
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

    def __init__(self, key: bytes, parent: BlockRecord | None, depth: int) -> None:
        self.key = key
        self.parent = parent
        self.depth = depth
        self.children = 0
        self.uses = 0
        self.where = 0
        self.pin = PinLevel.NONE
        self.dram: Replica | None = None
        self.nvme: Replica | None = None
        self.move: Move | None = None

    def replicas(self) -> list[Replica]:
        """The committed replicas, fastest tier first."""
        return [replica for replica in (self.dram, self.nvme) if replica is not None]

    @property
    def tier(self) -> int:
        """The tier that serves reads: IN_DRAM; IN_NVME if it is only there; 0 if not resident."""
        return self.where & IN_DRAM or self.where

    def __repr__(self) -> str:
        tiers = ", ".join(str(replica.tier) for replica in self.replicas()) or "nowhere"
        return (
            f"<Block {self.key.hex()[:8]} depth={self.depth} children={self.children} in {tiers}>"
        )


class Replica:
    """One copy of a block: `length` bytes at `offset` of a tier's arena.

    `holds` counts the leases, transfers and moves that still use the extent. The extent goes back
    to the arena only when the replica was dropped *and* `holds` is zero; between the two it is
    QUARANTINED.
    """

    __slots__ = ("block", "generation", "holds", "length", "offset", "state", "tier", "visits")

    def __init__(
        self, block: BlockRecord, tier: TierName, offset: int, length: int, generation: int
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
        """The number of blocks before this one in its prefix."""
        return self.block.depth

    def __repr__(self) -> str:
        return (
            f"<Replica {self.key.hex()[:8]} {self.tier} {self.state} "
            f"[{self.offset}, {self.offset + self.length}) holds={self.holds}>"
        )


class MovePriority(enum.IntEnum):
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

    def __init__(
        self, block: BlockRecord, source: Replica, target: Replica, priority: MovePriority
    ) -> None:
        self.block = block
        self.source = source
        self.target = target
        self.priority = priority
        self.cancelled = False
        self.started = False  # set by the mover: a move may be submitted again at a higher priority
        self.tickets: list[Ticket] = []

    @property
    def keeps_source(self) -> bool:
        """Whether the block stays in the source tier."""
        return self.priority in (MovePriority.PROMOTE, MovePriority.WRITE_BACK)


class MoveOutcome(enum.Enum):
    """How a move ended. CORRUPT: the source failed its checks. READ_FAILED, WRITE_FAILED: the
    medium of the source or target tier refused."""

    DONE = "done"
    CORRUPT = "corrupt"
    READ_FAILED = "read_failed"
    WRITE_FAILED = "write_failed"


class Reason(enum.IntEnum):
    """Why a lease or a reservation covers fewer blocks than the request has keys."""

    NONE = 0
    MISS = 1
    BUSY = 2  # a writer has reserved the block and has not committed yet
    NO_ROOM = 3
    DEADLINE = 4
    CORRUPT = 5
    MEDIUM = 6  # the medium refused the read


class Erase(NamedTuple):
    """Make the freed NVMe extent at `offset` unfindable for a restarted node."""

    offset: int
    length: int


@dataclass(slots=True, eq=False)
class Removal:
    """One `remove` of `blocks`. A power cut may still restore its `pending` extents in NVMe; if it
    `failed`, also after it has ended. `number` is its sequence number."""

    number: int
    blocks: int
    pending: int = 0
    failed: bool = False


class Wipe(NamedTuple):
    """Make the extent of `replica`, which is held for this, durably unfindable. Without a replica,
    only flush earlier erases. Then call `Residency.wiped`."""

    removal: Removal
    replica: Replica | None


@dataclass(slots=True)
class Counters:
    """Event counts since the node started, in blocks unless the name says otherwise."""

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
    """The result for one slot of a commit. PENDING: other ranks have yet to commit the block."""

    REFUSED = 0
    STORED = 1
    PENDING = 2


class Published(dict["Replica", dict[int, SegmentPart]]):
    """The published segments of blocks that are not committed yet, by segment index.

    `version` grows with every publication, so that a waiting `Await` checks only after a change.
    """

    version = 0

    def add(self, replicas: Sequence[Replica], parts: Sequence[dict[int, SegmentPart]]) -> None:
        """Record complete segments: `parts[i]` of `replicas[i]`, by segment index."""
        for replica, more in zip(replicas, parts, strict=True):
            self.setdefault(replica, {}).update(more)
        self.version += 1


class Exposed(NamedTuple):
    """A byte range of one extent that a follower may read now."""

    replica: Replica
    offset: int
    length: int


class Followed:
    """Additional state of a follower's lease: the byte ranges that its last await exposed, which
    are all that it may read, and a cache of its committed blocks' segments."""

    __slots__ = ("exposed", "sealed")

    def __init__(self) -> None:
        self.exposed: list[Exposed] = []
        self.sealed: dict[Replica, Sealed] = {}


class LeaseRecord:
    """A lease: a session's hold on some replicas. A write lease (a reservation) expires at
    `expires_at`, and so does a read lease of a remote session; a read lease on the same host ends
    with its release or with its process (see docs/leases.md). `transfers` counts its in-flight
    transfers; `rank` is the writer's rank if several ranks write these blocks together, None for a
    single writer. `followed` is set for a read lease that also holds blocks which are still being
    written."""

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
    """One client's session. `gone` once its connection ended, though its process may still run.

    The client of a `remote` session has not mapped the node's memory: the node's own threads move
    its bytes, and hold the extents they access. So the end of a remote lease also fences the
    client.
    """

    __slots__ = ("gone", "id", "leases", "name", "pid", "remote", "zombies")

    def __init__(self, session_id: int, name: str, pid: int, *, remote: bool = False) -> None:
        self.id = session_id
        self.name = name
        self.pid = pid
        self.remote = remote
        self.gone = False
        self.leases: dict[int, LeaseRecord] = {}
        # Zombie leases: write leases that expired, or whose connection broke. They are cancelled,
        # but the writer's process may still write, so they hold their extents until that process
        # acknowledges or dies.
        self.zombies: dict[int, LeaseRecord] = {}


class Ticket:
    """An in-flight read request that becomes a lease: it holds the blocks of some of `keys`, and
    others are still being promoted.

    `replicas[i]` is for `keys[i]`; `blocked` while the next key waits for room in DRAM. `follows`:
    it also holds blocks that are being written.
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
        """True when no promotion is pending and no key waits for room."""
        return self.pending == 0 and not self.blocked
