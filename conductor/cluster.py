"""The instances and their load, as columns: one numpy array per number, one row per instance.

A decision looks at every instance, and with a thousand of them a loop in Python would take a
millisecond; a column takes a microsecond. Rows are given again when an instance has left; `version`
counts what changes who is there and may do what, for whoever caches by row. Pure: no I/O, no clock.

What a column says is an estimate: the larger of what the instance reported last and of what was
promised to it here, and what was promised since (`ledger.py`). Columns `own_...` are the promises
alone; they return to zero when all requests have ended. The rest is others' work, of another
conductor or sent to the instance directly.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from .errors import InvalidRequest, UnknownInstance
from .names import Numbers
from .records import InstanceSpec, Role, Status

if TYPE_CHECKING:
    from collections.abc import Collection

    from numpy.typing import NDArray

    from .records import Load

INSTANCES_MAX = 16_384
_ROWS_MIN = 64
# As many nodes as one pool has (`kvstore.directory.base`): what is known of ways between nodes
# (`transfers.py`) is two matrices of 64 MiB.
NODES_MAX = 4096
# Models without instances that are still known, the youngest.
IDLE_MODELS_MAX = 1024

# name: dtype, and what it is of a row that nobody has.
_COLUMNS: dict[str, tuple[Any, Any]] = {
    "used": (np.bool_, False),
    "ready": (np.bool_, False),
    "draining": (np.bool_, False),  # it is given nothing new, whether or not it is heard of
    "prefills": (np.bool_, False),  # its role lets it prefill
    "decodes": (np.bool_, False),
    "model": (np.int32, -1),
    "node": (np.int32, -1),  # number of the kvstore node on its host
    "profile": (np.int32, -1),
    "block_bytes": (np.int64, 0),
    "fetches": (np.bool_, False),  # blocks from elsewhere
    # Prefill: how much is queued. In what order, and how long that takes: `queues.py`.
    "queued": (np.int64, 0),
    "queued_tokens": (np.int64, 0),
    "others_s": (np.float64, 0.0),  # prefill work that others queued
    "own_queued": (np.int64, 0),
    "own_queued_tokens": (np.int64, 0),
    "own_batch": (np.int64, 0),
    "own_context_tokens": (np.int64, 0),
    "own_kv_used_tokens": (np.int64, 0),
    # Decode: what runs, what is promised, and what there is room for.
    "batch": (np.int64, 0),
    "context_tokens": (np.int64, 0),
    "kv_used_tokens": (np.int64, 0),
    "kv_capacity_tokens": (np.int64, 0),
    "batch_max": (np.int64, 0),
    "heavy": (np.int64, 0),  # running requests that are expected to answer at length
    "heard_at": (np.float64, -np.inf),
    # Latency in seconds: prefill c0 + c1 (n - p) + c2 (n² - p²), decode d0 + d1 batch + d2 context.
    "c0": (np.float64, 0.0),
    "c1": (np.float64, 0.0),
    "c2": (np.float64, 0.0),
    "d0": (np.float64, 0.0),
    "d1": (np.float64, 0.0),
    "d2": (np.float64, 0.0),
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

    def __init__(self) -> None:
        self.version = 0
        self.specs: list[InstanceSpec | None] = []
        self.status: list[Status] = []
        self._rows: dict[str, int] = {}
        self._free: list[int] = []
        self._models = Numbers()
        self._nodes = Numbers()
        for name, (dtype, empty) in _COLUMNS.items():
            setattr(self, name, np.full(_ROWS_MIN, empty, dtype))

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
        """The id of the instance of a row that is used."""
        spec = self.specs[row]
        assert spec is not None
        return spec.id

    def spec(self, instance: str) -> InstanceSpec:
        """What it registered with. Raises UnknownInstance."""
        spec = self.specs[self.row(instance)]
        assert spec is not None
        return spec

    def model_number(self, model: str) -> int | None:
        """The number of a model in the column `model`; None if no instance has it, and none had it
        lately."""
        return self._models.find(model)

    def node_number(self, node: str) -> int:
        """The number of a node in the column `node`, given if it is new; -1 for no node."""
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
        """Take back the numbers of all nodes but the `kept` ones, among which are all that
        instances are on, and but those that are `busy`. Returns them. Nodes whose numbers were too
        high for what is known of ways get lower ones, if there are."""
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
        """Take back the numbers of models that no instance has, but of the youngest."""
        used = {spec.model for spec in self.specs if spec is not None}
        idle = [model for model in self._models if model not in used]
        for model in idle[:-IDLE_MODELS_MAX]:
            self._models.take_back(model)

    def register(self, spec: InstanceSpec, latency: tuple[float, ...], now: float) -> int:
        """Add an instance, or change one: the same id keeps its row and its load. Returns the row.

        `latency` is (c0, c1, c2, d0, d1, d2) of its profile. Raises InvalidRequest when there are
        too many.
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
        self.node[row] = self.node_number(spec.node)
        self.block_bytes[row] = spec.block_bytes
        self.fetches[row] = spec.fetches
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
        self.specs[row], self.status[row] = None, Status.LOST
        for name, (_, empty) in _COLUMNS.items():
            getattr(self, name)[row] = empty
        self._free.append(row)
        self.version += 1

    def set_role(self, row: int, role: Role) -> None:
        """What it may be given from now on."""
        self.version += 1
        self.prefills[row] = role is not Role.DECODE
        self.decodes[row] = role is not Role.PREFILL

    def role(self, row: int) -> Role:
        """What it may be given."""
        if self.prefills[row]:
            return Role.MIXED if self.decodes[row] else Role.PREFILL
        return Role.DECODE

    def assign(self, instance: str, *, on: bool) -> None:
        """Give it new work from now on, or none; a silent one not before it is heard of. Raises
        UnknownInstance."""
        row = self.row(instance)
        if self.draining[row] == on:
            self.version += 1
            self.draining[row] = not on
        if self.status[row] is not Status.LOST:
            self.set_status(instance, Status.READY if on else Status.DRAINING)

    def set_status(self, instance: str, status: Status) -> None:
        """Raises UnknownInstance. Who is lost is, when it is heard of again, what it was before."""
        row = self.row(instance)
        if status is not Status.LOST:
            self.draining[row] = status is Status.DRAINING
        if self.status[row] is not status:
            self.version += 1
            self.status[row] = status
            self.ready[row] = status is Status.READY

    def heard(self, instance: str, load: Load, now: float) -> None:
        """A heartbeat: what the instance counts beyond what was promised here is others' work.
        Raises UnknownInstance."""
        row = self.row(instance)
        self.heard_at[row] = max(now, self.heard_at[row])
        if self.status[row] is Status.LOST:
            back = Status.DRAINING if self.draining[row] else Status.READY
            self.set_status(instance, back)
        reported = {
            "queued": load.queued,
            "queued_tokens": load.queued_prefill_tokens,
            "batch": load.running,
            "context_tokens": load.context_tokens,
            "kv_used_tokens": load.kv_used_tokens,
        }
        for name, value in reported.items():
            if value is not None:
                own = getattr(self, f"own_{name}")[row]
                getattr(self, name)[row] = max(value, own)
        others_tokens = float(self.queued_tokens[row] - self.own_queued_tokens[row])
        self.others_s[row] = self.c1[row] * others_tokens

    def promise(self, row: int, **amounts: int) -> None:
        """Add to (or, if negative, take from) what was promised to an instance and what is counted
        of it: `queued`, `queued_tokens`, `batch`, `context_tokens`, `kv_used_tokens`."""
        for name, amount in amounts.items():
            getattr(self, f"own_{name}")[row] += amount
            getattr(self, name)[row] += amount

    def rows_for(self, model: str, *, prefill: bool) -> NDArray[np.int64]:
        """The rows that are ready to prefill (or decode) this model, in order."""
        number = self._models.find(model)
        if number is None:
            return np.empty(0, np.int64)
        able = self.prefills if prefill else self.decodes
        return np.flatnonzero(self.ready & able & (self.model == number))

    def _new_row(self) -> int:
        if self._free:
            return self._free.pop()
        if len(self.specs) >= INSTANCES_MAX:
            raise InvalidRequest(f"{INSTANCES_MAX} instances are registered, which is the limit")
        row = len(self.specs)
        self.specs.append(None)
        self.status.append(Status.LOST)
        had = len(self.used)
        if row >= had:
            for name, (dtype, empty) in _COLUMNS.items():
                more = np.full(had, empty, dtype)
                setattr(self, name, np.concatenate((getattr(self, name), more)))
        return row
