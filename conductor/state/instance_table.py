"""The instances and their load, as columns: one numpy array per number, one row per instance.

A decision looks at every instance, and with a thousand of them a loop in Python would take a
millisecond; a column takes a microsecond. Rows of removed instances are reused; `version` counts
changes of membership, role and status, for caches that are keyed by row. Pure: no I/O, no clock.

The load columns are estimates: this conductor's own reservations (`inflight_requests.py`), and load
from elsewhere: from other conductors, by what they tell (`elsewhere`), or sent to the instance
directly, by what the instance reports (`load_reports.py`). Columns `own_...` are the reservations
alone; they return to zero when all requests have ended.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from ..errors import InvalidRequest, UnknownInstance
from ..records import InstanceSpec, Role, Status
from .id_allocator import IdAllocator
from .load_reports import REPORTED, LoadReports

if TYPE_CHECKING:
    from collections.abc import Collection

    from numpy.typing import NDArray

    from ..records import Load

INSTANCES_MAX = 16_384
_ROWS_MIN = 64
# The node limit of one pool (`kvstore.directory.base`). The link measurements between nodes
# (`transfer_model.py`) are two matrices of 64 MiB.
NODES_MAX = 4096
# Models without instances whose names are kept, the youngest ones.
IDLE_MODELS_MAX = 1024

# Of a load column, that of what this conductor has placed there.
_OWN = {name: f"own_{name}" for name in REPORTED}
# name: dtype, and the value in an unused row.
_COLUMNS: dict[str, tuple[Any, Any]] = {
    "used": (np.bool_, False),
    "ready": (np.bool_, False),
    "draining": (np.bool_, False),  # gets no new requests; kept while the instance is silent
    "prefills": (np.bool_, False),  # its role includes prefill
    "decodes": (np.bool_, False),
    "model": (np.int32, -1),
    "node": (np.int32, -1),  # number of the instance's host (`InstanceSpec.host`)
    "profile": (np.int32, -1),
    "block_bytes": (np.int64, 0),
    "fetches": (np.bool_, False),  # whether it can fetch blocks from other holders
    "prefix_caching": (np.bool_, False),  # whether it keeps prompts' blocks in HBM
    # Prefill: the queued work. `wait_estimate.py` has the queue's order and the waiting times.
    "queued": (np.int64, 0),
    "queued_tokens": (np.int64, 0),
    "others_s": (np.float64, 0.0),  # seconds of queued prefill work from elsewhere
    "own_queued": (np.int64, 0),
    "own_queued_tokens": (np.int64, 0),
    "own_batch": (np.int64, 0),
    "own_context_tokens": (np.int64, 0),
    "own_kv_used_tokens": (np.int64, 0),
    # Decode: running and reserved work, and the capacity.
    "batch": (np.int64, 0),
    "context_tokens": (np.int64, 0),
    "kv_used_tokens": (np.int64, 0),
    "kv_capacity_tokens": (np.int64, 0),
    "batch_max": (np.int64, 0),
    "heavy": (np.int64, 0),  # running requests with a long predicted output
    "heard_at": (np.float64, -np.inf),
    # Latency in seconds: prefill c0 + c1 (n - p) + c2 (n² - p²), decode d0 + d1 batch + d2 context.
    "c0": (np.float64, 0.0),
    "c1": (np.float64, 0.0),
    "c2": (np.float64, 0.0),
    "d0": (np.float64, 0.0),
    "d1": (np.float64, 0.0),
    "d2": (np.float64, 0.0),
    "prefill_error": (np.float64, 0.0),  # of the factor that c0, c1 and c2 have in them, a share
}


class Cluster:
    """All registered instances. Columns are attributes: `cluster.batch[row]`."""

    used: NDArray[np.bool_]
    ready: NDArray[np.bool_]
    draining: NDArray[np.bool_]
    prefills: NDArray[np.bool_]
    decodes: NDArray[np.bool_]
    model: NDArray[np.int32]
    node: NDArray[np.int32]
    profile: NDArray[np.int32]
    block_bytes: NDArray[np.int64]
    fetches: NDArray[np.bool_]
    prefix_caching: NDArray[np.bool_]
    queued: NDArray[np.int64]
    queued_tokens: NDArray[np.int64]
    others_s: NDArray[np.float64]
    own_queued: NDArray[np.int64]
    own_queued_tokens: NDArray[np.int64]
    own_batch: NDArray[np.int64]
    own_context_tokens: NDArray[np.int64]
    own_kv_used_tokens: NDArray[np.int64]
    batch: NDArray[np.int64]
    context_tokens: NDArray[np.int64]
    kv_used_tokens: NDArray[np.int64]
    kv_capacity_tokens: NDArray[np.int64]
    batch_max: NDArray[np.int64]
    heavy: NDArray[np.int64]
    heard_at: NDArray[np.float64]
    c0: NDArray[np.float64]
    c1: NDArray[np.float64]
    c2: NDArray[np.float64]
    d0: NDArray[np.float64]
    d1: NDArray[np.float64]
    d2: NDArray[np.float64]
    prefill_error: NDArray[np.float64]

    def __init__(self) -> None:
        self.version = 0
        self.specs: list[InstanceSpec | None] = []
        self.status: list[Status] = []
        self.key_spaces: list[str] = []  # by name; empty where nobody has announced any
        self._rows: dict[str, int] = {}
        self._free: list[int] = []
        self._models = IdAllocator()
        self._nodes = IdAllocator()
        for name, (dtype, empty) in _COLUMNS.items():
            setattr(self, name, np.full(_ROWS_MIN, empty, dtype))
        self._reports = LoadReports(_ROWS_MIN)
        # Of other conductors, in the order of `REPORTED`: their load, and seconds of prefill.
        self.elsewhere: NDArray[np.int64] = np.zeros((len(REPORTED), _ROWS_MIN), np.int64)
        self.elsewhere_s: NDArray[np.float64] = np.zeros(_ROWS_MIN)

    def __len__(self) -> int:
        return len(self._rows)

    def __contains__(self, instance: str) -> bool:
        return instance in self._rows

    @property
    def names(self) -> list[str]:
        """The ids of all instances, oldest first."""
        return list(self._rows)

    def row(self, instance: str) -> int:
        """The row of an instance. Raises UnknownInstance."""
        row = self._rows.get(instance)
        if row is None:
            raise UnknownInstance(f"no instance {instance!r} is registered")
        return row

    def name(self, row: int) -> str:
        """The id of the instance in a row, which must be in use."""
        spec = self.specs[row]
        assert spec is not None
        return spec.id

    def spec(self, instance: str) -> InstanceSpec:
        """The specification that an instance registered with. Raises UnknownInstance."""
        spec = self.specs[self.row(instance)]
        assert spec is not None
        return spec

    def model_number(self, model: str) -> int | None:
        """The number of a model in the column `model`; None if no instance serves it now or served
        it lately."""
        return self._models.find(model)

    def node_number(self, node: str) -> int:
        """The number of a node in the column `node`, allocated if it is new; -1 for no node."""
        return self._nodes.give(node) if node else -1

    def find_node(self, node: str) -> int:
        """The number of a node that has one, or -1."""
        number = self._nodes.find(node)
        return -1 if number is None else number

    @property
    def names_numbered(self) -> int:
        """How many nodes and models have numbers."""
        return len(self._nodes) + len(self._models)

    def forget_nodes(self, kept: Collection[str], busy: Collection[int]) -> list[int]:
        """Free the numbers of all nodes, except the names in `kept`, which must include every node
        with an instance, and the numbers in `busy`. Returns the freed numbers. Nodes whose numbers
        are too high for the matrices of link measurements get lower ones, if any are free."""
        freed = self._nodes.take_back_all_but(kept, busy)
        for name in [name for name in self._nodes if self.node_number(name) >= NODES_MAX]:
            lowered = self._nodes.lower(name)
            if lowered is None:
                break
            old, new = lowered
            self.node[self.node == old] = new
            self.version += 1
        return freed

    def forget_models(self) -> None:
        """Free the numbers of models that no instance serves, except the youngest
        `IDLE_MODELS_MAX`."""
        used = {spec.model for spec in self.specs if spec is not None}
        idle = [model for model in self._models if model not in used]
        for model in idle[:-IDLE_MODELS_MAX]:
            self._models.take_back(model)

    def register(self, spec: InstanceSpec, latency: tuple[float, ...], now: float) -> int:
        """Add an instance, or update it: the same id keeps its row and its load. Returns the row.

        `latency` is (c0, c1, c2, d0, d1, d2) of its profile. Raises InvalidRequest when
        `INSTANCES_MAX` instances are registered.
        """
        row = self._rows.get(spec.id)
        if row is None:
            row = self._new_row()
            self._rows[spec.id] = row
        self.specs[row], self.status[row] = spec, Status.READY
        self.used[row] = self.ready[row] = True
        self.draining[row] = False
        self.set_role(row, spec.role)
        self.model[row] = self._models.give(spec.model)
        self.node[row] = self.node_number(spec.host)
        self.block_bytes[row] = spec.block_bytes
        # Blocks of an unknown size would seem to come in no time.
        self.fetches[row] = spec.fetches and spec.block_bytes > 0
        self.prefix_caching[row] = spec.prefix_caching
        self.kv_capacity_tokens[row] = spec.kv_capacity_tokens
        self.batch_max[row] = spec.batch_max
        self.heard_at[row] = now
        for name, value in zip(("c0", "c1", "c2", "d0", "d1", "d2"), latency, strict=True):
            getattr(self, name)[row] = value
        self.version += 1
        return row

    def remove(self, instance: str) -> None:
        """Forget an instance. Raises UnknownInstance."""
        row = self.row(instance)
        del self._rows[instance]
        self.specs[row], self.status[row], self.key_spaces[row] = None, Status.LOST, ""
        for name, (_, empty) in _COLUMNS.items():
            getattr(self, name)[row] = empty
        self.elsewhere[:, row], self.elsewhere_s[row] = 0, 0.0
        self._reports.forget(row)
        self._free.append(row)
        self.version += 1

    def set_key_space(self, instance: str, name: str) -> None:
        """Set the key space of an instance's blocks. Raises UnknownInstance."""
        row = self.row(instance)
        if self.key_spaces[row] != name:
            self.version += 1
            self.key_spaces[row] = name

    def set_role(self, row: int, role: Role) -> None:
        """Set the role of a row: the kind of work it gets from now on."""
        self.version += 1
        self.prefills[row] = role is not Role.DECODE
        self.decodes[row] = role is not Role.PREFILL

    def role(self, row: int) -> Role:
        """The role of a row."""
        if self.prefills[row]:
            return Role.MIXED if self.decodes[row] else Role.PREFILL
        return Role.DECODE

    def assign(self, instance: str, *, on: bool) -> None:
        """Give an instance new requests from now on, or (`on=False`) drain it. A lost instance gets
        none before its next heartbeat. Raises UnknownInstance."""
        row = self.row(instance)
        if self.draining[row] == on:
            self.version += 1
            self.draining[row] = not on
        if self.status[row] is not Status.LOST:
            self.set_status(instance, Status.READY if on else Status.DRAINING)

    def set_status(self, instance: str, status: Status) -> None:
        """Set an instance's status. The next heartbeat of a lost instance restores its status from
        before. Raises UnknownInstance."""
        row = self.row(instance)
        if status is not Status.LOST:
            self.draining[row] = status is Status.DRAINING
        if self.status[row] is not status:
            self.version += 1
            self.status[row] = status
            self.ready[row] = status is Status.READY

    def heard(
        self, instance: str, load: Load, now: float, others: NDArray[np.int64] | None = None
    ) -> None:
        """Take a heartbeat: load that the instance reports beyond what this conductor had there is
        load from elsewhere. `others` is what other conductors had there when it was measured, in
        the order of `REPORTED`. Raises UnknownInstance."""
        row = self.row(instance)
        self.heard_at[row] = max(now, self.heard_at[row])
        if self.status[row] is Status.LOST:
            back = Status.DRAINING if self.draining[row] else Status.READY
            self.set_status(instance, back)
        own = [getattr(self, f"own_{name}").item(row) for name in REPORTED]
        if self._reports.heard(row, load, own, others, now):
            self.blend(now, row)

    def blend(self, now: float, row: int | None = None) -> None:
        """Bring the load columns up to date, of one row or of all: load from elsewhere passes. 0.1
        ms for a thousand rows."""
        part = slice(None) if row is None else slice(row, row + 1)
        counts, seconds = self._reports.strangers(self.c1[part], now, part)
        counts = counts + self.elsewhere[:, part]
        for at, name in enumerate(REPORTED):
            own = getattr(self, f"own_{name}")[part]
            np.add(own, counts[at], out=getattr(self, name)[part])
        self.others_s[part] = seconds + self.elsewhere_s[part]

    def promise(self, row: int, now: float, **amounts: int) -> None:
        """Add to (or, if negative, subtract from) an instance's reservations and load columns:
        `queued`, `queued_tokens`, `batch`, `context_tokens`, `kv_used_tokens`."""
        for name, amount in amounts.items():
            getattr(self, _OWN[name])[row] += amount
            getattr(self, name)[row] += amount
        self._reports.promised(row, amounts, now)

    def rows_for(self, model: str, *, prefill: bool, key_space: str = "") -> NDArray[np.int64]:
        """The rows that are ready to prefill (or decode) this model, in order: all, or those with
        blocks in a key space."""
        number = self._models.find(model)
        if number is None:
            return np.empty(0, np.int64)
        able = self.prefills if prefill else self.decodes
        rows = np.flatnonzero(self.ready & able & (self.model == number))
        if not key_space:
            return rows
        return rows[[self.key_spaces[row] == key_space for row in rows.tolist()]]

    def _new_row(self) -> int:
        if self._free:
            return self._free.pop()
        if len(self.specs) >= INSTANCES_MAX:
            raise InvalidRequest(f"{INSTANCES_MAX} instances are registered, which is the limit")
        row = len(self.specs)
        self.specs.append(None)
        self.status.append(Status.LOST)
        self.key_spaces.append("")
        had = len(self.used)
        if row >= had:
            for name, (dtype, empty) in _COLUMNS.items():
                more = np.full(had, empty, dtype)
                setattr(self, name, np.concatenate((getattr(self, name), more)))
            self._reports.grow(2 * had)
            self.elsewhere = np.pad(self.elsewhere, ((0, 0), (0, had)))
            self.elsewhere_s = np.pad(self.elsewhere_s, (0, had))
        return row
