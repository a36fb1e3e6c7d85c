"""The client that engines and scripts use: a pool's blocks by prefix.

Every verb takes a `Prefix` (from `KVSchema.prefix`) and `timeout_s`. A miss is a result; see
`errors.py` for what is raised. One client may be used from several threads; its calls take turns.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Self, TypeVar, overload

from . import verbs
from .blocks import Block, Blocks, Slot
from .errors import ClientClosed, StaleLease
from .link import Link, LocalLink, SocketLink
from .node import messages
from .node.node import Node
from .node.records import Kept, Pin
from .streaming import LayerStream, NearFollowing, check_ahead, publish
from .url import Daemon, Embedded, Pool, parse_url
from .verbs import DEFAULT_TIMEOUT_S, Access, Call, Hit, Post, PutResult, Reserved, Verb, Verify

if TYPE_CHECKING:
    from types import TracebackType

    from .keys import Prefix
    from .schema import HeadRange, LayerRange, Shard

T = TypeVar("T")


def drive(verb: Verb[T], link: Link) -> T:
    """Carry out a verb's steps one after the other."""
    outcome: Any = None
    failure: BaseException | None = None
    while True:
        try:
            step = verb.send(outcome) if failure is None else verb.throw(failure)
        except StopIteration as stop:
            return stop.value  # type: ignore[no-any-return]
        outcome = failure = None
        try:
            if isinstance(step, Call):
                outcome = link.call(step.request, step.timeout_s)
            elif isinstance(step, Post):
                link.post(step.request)
            else:
                outcome = link.gate.run(step.action)
        except BaseException as error:  # noqa: BLE001 - the verb cleans up, then raises it again
            failure = error


def open_link(target: Embedded | Daemon, name: str) -> Link:
    """A link to the node that a URL named; starts the node if it is an embedded one."""
    if isinstance(target, Daemon):
        return SocketLink(target.path, name)
    return LocalLink(Node(target.options, name=name or "embedded"), name, owns_node=True)


class LeasedBlocks(Blocks):
    """`Blocks` that lie in the pool: leased until `release()` or the end of the `with` block."""

    def __init__(self, blocks: Blocks, lease: int, link: Link | None) -> None:
        super().__init__(blocks.prefix, len(blocks), blocks.reason, blocks._make)
        self._lease = lease
        self._link = link
        self._released = False

    @overload
    def __getitem__(self, index: int) -> Block: ...
    @overload
    def __getitem__(self, index: slice) -> list[Block]: ...
    def __getitem__(self, index: int | slice) -> Block | list[Block]:
        if self._released:
            raise ClientClosed("these blocks were released; use them inside the `with` block")
        return super().__getitem__(index)

    @property
    def released(self) -> bool:
        """Whether `release` was called."""
        return self._released

    def release(self) -> None:
        """End the lease; the views must not be used any more. Raises StaleLease the second time."""
        if self._released:
            raise StaleLease("these blocks were released before")
        self._released = True
        for block in self._made.values():
            block.let_go()
        if self._lease and self._link is not None:
            self._link.post(messages.Release(0, self._lease))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if not self._released:
            self.release()


class Slots(Sequence[Slot]):
    """Reserved blocks to write in place; a context manager that commits them when it ends well.

    Holds only blocks that were not resident: `slots[i].index` is a position in the prefix, and so
    are `resident` (in the pool already), `busy` (another writer is at it) and, after the `with`
    block, `stored`, and `pending` (this rank's slice is in, other ranks' are awaited). `reason` is
    "no_room" if the end of the prefix got no slots. An exception inside aborts all.
    """

    def __init__(self, prefix: Prefix, reserved: Reserved, link: Link) -> None:
        self.prefix = prefix
        self.resident = reserved.resident
        self.busy = reserved.busy
        self.reason = reserved.reason
        self.stored: tuple[int, ...] = ()
        self.pending: tuple[int, ...] = ()
        # In a pool: the number of the node that has the slots, which readers elsewhere stream from.
        self.node: int | None = None
        self._slots = reserved.slots
        self._lease = reserved.lease
        self._link = link
        self._ended = False

    @overload
    def __getitem__(self, index: int) -> Slot: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Slot]: ...
    def __getitem__(self, index: int | slice) -> Slot | Sequence[Slot]:
        return self._slots[index]

    def __len__(self) -> int:
        return len(self._slots)

    def _end(self) -> None:
        self._check_open()
        self._ended = True

    def _check_open(self) -> None:
        if self._ended:
            raise StaleLease("this reservation was committed or aborted before")

    def _begin_commit(self) -> None:
        self._end()
        # Raises ClientClosed: since its goodbye, these extents may belong to others.
        _ = self._link.memory

    def _settle(self, kept: bytes) -> None:
        settled = list(zip([slot.index for slot in self._slots], kept, strict=True))
        self.stored = tuple(index for index, flag in settled if flag == Kept.STORED)
        self.pending = tuple(index for index, flag in settled if flag == Kept.PENDING)
        for slot in self._slots:
            slot.let_go()

    def publish(self, layer: int, *, timeout_s: float = DEFAULT_TIMEOUT_S) -> None:
        """This layer of all slots (but skipped ones) is complete: `stream` may read it before the
        commit. It must not be changed any more. Raises StaleLease, SchemaError and, for a layer
        that was published before, InvalidInput."""
        self._check_open()
        verb = publish(self._slots, self._lease, layer, verbs.check_timeout(timeout_s))
        drive(verb, self._link)

    def commit(self) -> None:
        """Checksum and publish what was written. Raises StaleLease if the reservation expired."""
        self._begin_commit()
        try:
            self._settle(drive(verbs.commit(self.prefix, self._slots, self._lease), self._link))
        finally:
            for slot in self._slots:
                slot.let_go()

    def abort(self) -> None:
        """Give the slots back unwritten."""
        self._end()
        for slot in self._slots:
            slot.let_go()
        if self._slots:
            self._link.post(messages.Abort(0, self._lease))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._ended:
            return
        if kind is None:
            self.commit()
        else:
            self.abort()

    def __repr__(self) -> str:
        return (
            f"<Slots {len(self)} of {len(self.prefix)} blocks{self.reason and ', '}{self.reason}>"
        )


class ClientBase:
    """What both clients keep: whether they are open, and the verification policy."""

    def __init__(self, verify: str) -> None:
        self._access: Access | None = Access(verbs.check_verify(verify), random.Random())

    def _check(self, timeout_s: float) -> float:
        """`timeout_s`, if this client may be used with it; raises ClientClosed, InvalidInput."""
        if self._access is None:
            raise ClientClosed("this client is closed; open another")
        return verbs.check_timeout(timeout_s)

    def _reading(self, verify: str | None) -> Access:
        """How to read, perhaps with another policy than the client's."""
        assert self._access is not None
        if verify is None or verify == self._access.verify:
            return self._access
        return Access(verbs.check_verify(verify), self._access.dice)


class Client(ClientBase):
    """Synchronous client. Open it with `Client.open(url)`; it is a context manager."""

    def __init__(self, link: Link, verify: str) -> None:
        super().__init__(verify)
        self._link = link

    @classmethod
    def open(
        cls, url: str, *, verify: Verify = "always", name: str = "", populate: bool = False
    ) -> Client:
        """Open the node that `url` names (docs/client.md lists the forms).

        `verify`: "always" (the default), "sampled" or "off"; each get may choose another.
        `populate`: fill the page tables now, 0.2 s per GiB of the node's DRAM; for long-lived
        processes such as engines, whose first touches would otherwise be slow.
        Raises InvalidInput, NodeUnavailable, VersionMismatch, TierUnavailable and, for a pool,
        DirectoryUnavailable and NotAuthenticated.
        """
        verbs.check_verify(verify)
        target = parse_url(url)
        if isinstance(target, Pool):
            from .pool.open import open_pool  # it builds on this module

            return open_pool(target, verify, verbs.check_name(name))
        link = open_link(target, verbs.check_name(name))
        if populate and isinstance(link, SocketLink):
            link.populate()
        return cls(link, verify)

    @classmethod
    def attach(cls, node: Node, *, verify: Verify = "always", name: str = "") -> Client:
        """A client of a node that runs in this process and stays open after the client."""
        return cls(LocalLink(node, name, owns_node=False), verify)

    def match(self, prefix: Prefix, *, timeout_s: float = DEFAULT_TIMEOUT_S) -> Hit:
        """How many leading blocks are resident. Stops at the first that is missing."""
        return drive(verbs.match(prefix, self._check(timeout_s)), self._link)

    def exists(self, prefix: Prefix, *, timeout_s: float = DEFAULT_TIMEOUT_S) -> list[bool]:
        """Which blocks are resident, each on its own."""
        return drive(verbs.exists(prefix, self._check(timeout_s)), self._link)

    def get(
        self,
        prefix: Prefix,
        *,
        into: Any = None,
        layers: LayerRange | None = None,
        heads: HeadRange | None = None,
        verify: Verify | None = None,
        timeout_s: float = DEFAULT_TIMEOUT_S,
    ) -> LeasedBlocks:
        """The leading blocks of `prefix`: leased views into the pool, or copies.

        `into`: one writable buffer per block, or one for all. `layers`, `heads`: only these
        (half-open); buffers then hold just that range, packed. Waits no longer than `timeout_s` for
        the node; what it could not serve by then is in `missing`, with the reason.
        """
        self._check(timeout_s)
        access = self._reading(verify)
        if into is None:
            found = verbs.get(prefix, access, layers, heads, timeout_s)
            return LeasedBlocks(*drive(found, self._link), self._link)
        copied = verbs.get_into(prefix, access, into, layers, heads, timeout_s)
        return LeasedBlocks(drive(copied, self._link), 0, None)

    def put(
        self,
        prefix: Prefix,
        payloads: Sequence[Any],
        *,
        shard: Shard | None = None,
        timeout_s: float = DEFAULT_TIMEOUT_S,
    ) -> PutResult:
        """Copy one payload per block into the pool; blocks that are resident are skipped.

        `shard`: (rank, ranks), to write one tensor-parallel rank's slice of each block. Payloads
        are these slices, packed (`select_shard`), or whole blocks of which the slice is taken. A
        block is visible once every rank has put its slice; until then it is `pending`.

        Returns what became of each block: no room within `timeout_s` is a result, not an error.
        """
        self._check(timeout_s)
        verb = verbs.put(prefix, payloads, self._link.memory.nbytes, timeout_s, shard)
        return drive(verb, self._link)

    def reserve(
        self,
        prefix: Prefix,
        *,
        shard: Shard | None = None,
        timeout_s: float = DEFAULT_TIMEOUT_S,
    ) -> Slots:
        """Slots for the blocks that are not resident, to be written in place.

        `shard`: (rank, ranks), to write only this rank's heads of each layer; see `put`. All ranks
        get the same slots, each in its own process. Raises NoRoom when not even the first could be
        had within `timeout_s`.
        """
        verb = verbs.reserve(prefix, self._check(timeout_s), shard)
        return Slots(prefix, drive(verb, self._link), self._link)

    def stream(
        self,
        prefix: Prefix,
        *,
        heads: HeadRange | None = None,
        verify: Verify | None = None,
        timeout_s: float = DEFAULT_TIMEOUT_S,
        ahead: int = 1,
    ) -> LayerStream:
        """The leading blocks of `prefix` layer by layer, committed or still being written: iterate
        over it, or enter it with `with`. Each layer is waited for up to `timeout_s`.

        `heads`: only these of each layer (half-open). `ahead`: how many layers are fetched before
        they are asked for, over the network; on the node's host nothing travels. What it yields is
        provisional until the iteration ends without an error (docs/client.md).
        """
        self._check(timeout_s)
        check_ahead(ahead)
        following = NearFollowing(prefix, self._reading(verify), timeout_s, heads)
        return LayerStream(following, lambda verb: drive(verb, self._link))

    def pin(
        self,
        prefix: Prefix,
        *,
        ttl_s: float | None = None,
        hard: bool = False,
        timeout_s: float = DEFAULT_TIMEOUT_S,
    ) -> int:
        """Keep the resident blocks: evicted last, or with `hard` never, until `ttl_s` is over.

        Returns how many were resident.
        """
        level = Pin.HARD if hard else Pin.SOFT
        return drive(verbs.pin(prefix, level, ttl_s, self._check(timeout_s)), self._link)

    def unpin(self, prefix: Prefix, *, timeout_s: float = DEFAULT_TIMEOUT_S) -> int:
        """Take pins back; returns how many blocks were resident."""
        return drive(verbs.pin(prefix, Pin.NONE, None, self._check(timeout_s)), self._link)

    def remove(self, prefix: Prefix, *, timeout_s: float = DEFAULT_TIMEOUT_S) -> int:
        """Forget the resident blocks, pinned or not; returns how many there were. Readers that hold
        a lease keep their bytes."""
        return drive(verbs.remove(prefix, self._check(timeout_s)), self._link)

    def statistics(self, *, timeout_s: float = DEFAULT_TIMEOUT_S) -> dict[str, Any]:
        """The node's tiers, counters and sessions."""
        return drive(verbs.statistics(self._check(timeout_s)), self._link)

    def close(self) -> None:
        """Release everything this client holds. Views it handed out must not be used after."""
        self._access = None
        self._link.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
