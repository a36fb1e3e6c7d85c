"""The synchronous client for engines and scripts: reads and writes a pool's blocks by prefix.

Every verb takes a `Prefix` (from `KVSchema.prefix`) and `timeout_s`. A miss is a result, not an
error; `errors.py` lists the exceptions. A client is thread-safe.
"""

from __future__ import annotations

import operator
import random
import time
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Self, TypeVar, overload

from tiffin.messenger.signal_safe import uninterrupted

from ..after_fork import OfOneProcess
from ..blocks.block_places import BlockPlaces, MappedRegion
from ..blocks.block_views import Block, Blocks, Slot, select
from ..blocks.payload_buffers import target_views
from ..connection.node_link import LocalLink, NodeLink, SocketLink
from ..errors import ClientClosed, InvalidInput, StaleLease, TiffinError, open_errors
from ..node.core import messages
from ..node.core.records import Kept, PinLevel
from ..node.node import Node
from ..streaming.layer_stream import LayerStream
from ..streaming.local_source import LocalSource
from ..streaming.publish import publish, published_segments
from ..url import Daemon, Embedded, Pool, parse_url
from ..verbs import block_verbs
from ..verbs.arguments import Verify, check_verify, opening, verb
from ..verbs.block_verbs import (
    DEFAULT_TIMEOUT_S,
    Access,
    Hit,
    PutResult,
    ReservedSlots,
)
from ..verbs.prefetching import PrefetchState
from .prefetch_handles import Prefetch

if TYPE_CHECKING:
    from types import TracebackType

    from ..format.key_space import KeySpace
    from ..format.keys import Prefix
    from ..format.schema import AnyShard, HeadRange, LayerRange

T = TypeVar("T")


def open_link(target: Embedded | Daemon, name: str) -> NodeLink:
    """Open a link to the node of a parsed URL; starts the node if it is an embedded one."""
    if isinstance(target, Daemon):
        return SocketLink(target.path, name)
    node = Node(target.options, name=name or "embedded")
    try:
        return LocalLink(node, name, owns_node=True)
    except TiffinError:
        node.close()
        raise


class LeasedBlocks(OfOneProcess, Blocks):
    """`Blocks` in the pool's memory, under a lease until `release()` or the `with` block's end."""

    def __init__(self, blocks: Blocks, lease: int, link: NodeLink | None) -> None:
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
        if self._link is not None:
            self._check_process()
        return super().__getitem__(index)

    @property
    def released(self) -> bool:
        """Whether `release` was called."""
        return self._released

    def places(self) -> BlockPlaces:
        """Where the blocks lie, for other processes of this host that have mapped the same node's
        memory (`Client.region`); valid until `release`. Raises InvalidInput for copies, StaleLease
        if the node was restarted, and ClientClosed after `release`."""
        if self._link is None:
            raise InvalidInput("these blocks are copies in this process's own memory")
        mapped, block_bytes = self._link.mapping.mapped, self.prefix.schema.block_bytes
        base = _address(mapped.memory)
        offsets = tuple(_address(self[index].memory) - base for index in range(len(self)))
        if not mapped.has(offsets, block_bytes):
            raise StaleLease("these blocks are of a node that was restarted")
        return BlockPlaces(mapped.identity, offsets, block_bytes)

    def release(self) -> None:
        """Release the lease and invalidate its views. Raises StaleLease the second time."""
        if self._released:
            raise StaleLease("these blocks were released before")
        self._released = True
        for block in self._made.values():
            block.let_go()
        if self._lease and self._link is not None and not self._inherited:
            self._link.post(messages.Release(0, self._lease))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if not self._released:
            self.release()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.__exit__()


def _address(memory: Any) -> int:
    return int(memory.__array_interface__["data"][0])


class Slots(OfOneProcess, Sequence[Slot]):
    """A reservation: slots to write in place. As a context manager it commits them at the end, and
    aborts them all after an exception.

    There is a slot only for each block that was not resident. `slots[i].index` is a position in the
    prefix, and so are the entries of `resident` (in the pool already), `busy` (another writer has
    reserved the block) and, after the commit, `stored` and `pending` (this rank's slice is written,
    other ranks' slices are not yet). `reason` is "no_room" if blocks at the end of the prefix got
    no slots.
    """

    def __init__(self, prefix: Prefix, reserved: ReservedSlots, link: NodeLink) -> None:
        self.prefix = prefix
        self.resident = reserved.resident
        self.busy = reserved.busy
        self.reason = reserved.reason
        self.stored: tuple[int, ...] = ()
        self.pending: tuple[int, ...] = ()
        # In a pool: the number of the node with the reservation; remote readers stream from it.
        self.node: int | None = None
        self._slots = reserved.slots
        self._lease = reserved.lease
        self._link = link
        self._ended = False
        self._unpublished: set[int] = set()  # layers that the commit requires to be published

    @overload
    def __getitem__(self, index: int) -> Slot: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Slot]: ...
    def __getitem__(self, index: int | slice) -> Slot | Sequence[Slot]:
        self._check_process()
        return self._slots[index]

    def __len__(self) -> int:
        return len(self._slots)

    def _end(self) -> None:
        self._check_open()
        self._ended = True

    def _check_open(self) -> None:
        self._check_process()
        if self._ended:
            raise StaleLease("this reservation was committed or aborted before")

    def _require_layers(self) -> Self:
        """Refuse the commit until every layer that this writer has was published."""
        if self._slots:
            selection = self._slots[0].selection
            layers = range(len(selection.schema.layers))
            self._unpublished = {n for n in layers if published_segments(selection, n)}
        return self

    def _check_published(self) -> None:
        if self._unpublished and not all(slot.skipped for slot in self._slots):
            raise InvalidInput(
                f"layers {sorted(self._unpublished)} were not published: publish them first, or "
                "abort; slots reserved by_layer are never stored half written"
            )

    def _begin_commit(self) -> None:
        self._check_published()
        self._end()
        # Raises ClientClosed after `close`: the node may have given the extents to another writer.
        _ = self._link.mapping

    def _settle(self, kept: bytes) -> None:
        settled = list(zip([slot.index for slot in self._slots], kept, strict=True))
        self.stored = tuple(index for index, flag in settled if flag == Kept.STORED)
        self.pending = tuple(index for index, flag in settled if flag == Kept.PENDING)
        for slot in self._slots:
            slot.let_go()

    @verb
    def publish(self, layer: int, *, timeout_s: float = DEFAULT_TIMEOUT_S) -> None:
        """Publish `layer` of all slots except skipped ones: `stream` may read it before the commit,
        so the writer must not change it any more. Raises StaleLease, SchemaError and, for a layer
        that was published before, InvalidInput."""
        publish(self._link, self._slots, self._lease, layer, timeout_s)
        self._unpublished.discard(layer)

    def commit(self) -> None:
        """Checksum the written blocks and make them visible to readers. Raises StaleLease if the
        reservation expired; InvalidInput, and ends nothing, if it was made `by_layer` and a layer
        was not published."""
        self._begin_commit()
        try:
            self._settle(block_verbs.commit(self._link, self.prefix, self._slots, self._lease))
        finally:
            for slot in self._slots:
                slot.let_go()

    def abort(self) -> None:
        """End the reservation without storing its blocks; a no-op in a forked child."""
        if self._inherited:
            return
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
        try:
            if kind is None:
                self.commit()
        finally:
            if not self._ended:
                self.abort()

    def __repr__(self) -> str:
        return (
            f"<Slots {len(self)} of {len(self.prefix)} blocks{self.reason and ', '}{self.reason}>"
        )


@open_errors()
def _opened(cls: type[Client], url: str, verify: Verify, name: str, *, populate: bool) -> Client:
    target = parse_url(url)
    if isinstance(target, Pool):
        from ..pool.open_pool import open_pool  # imports this module

        return open_pool(target, verify, name)
    link = open_link(target, name)
    if populate:
        link.mapping.populate()
    return cls(link, verify)


class ClientBase(OfOneProcess):
    """State that both clients share: whether they are open, and the verification policy."""

    def __init__(self, verify: Verify) -> None:
        self._access: Access | None = Access(check_verify(verify), random.Random())

    def _check_open(self) -> None:
        """Raise ClientClosed unless this client may be used."""
        self._check_process()
        if self._access is None:
            raise ClientClosed("this client is closed; open another")

    def _reading(self, verify: Verify | None) -> Access:
        """The `Access` of one read: the client's, or one with the policy `verify` of this call."""
        assert self._access is not None
        if verify is None or verify == self._access.verify:
            return self._access
        return Access(verify, self._access.dice)


class Client(ClientBase):
    """Synchronous client. Open it with `Client.open(url)`; it is a context manager."""

    def __init__(self, link: NodeLink, verify: Verify) -> None:
        super().__init__(verify)
        self._link = link

    @classmethod
    @opening
    def open(
        cls, url: str, *, verify: Verify = "always", name: str = "", populate: bool = False
    ) -> Client:
        """Open the node that `url` names (docs/client.md lists the forms).

        `verify`: "always" (the default), "sampled" or "off"; each get may choose another.
        `populate`: fill the page tables for reading now, 0.05 s per GiB of the node's DRAM; for
        long-lived processes such as engines, whose first touches would otherwise be slow.
        Raises InvalidInput, NodeUnavailable, VersionMismatch, TierUnavailable and, for a pool,
        DirectoryUnavailable and NotAuthenticated.
        """
        opened = partial(_opened, cls, url, verify, name, populate=populate)
        return uninterrupted(opened, undo=lambda client: client.close())

    @classmethod
    @opening
    def attach(cls, node: Node, *, verify: Verify = "always", name: str = "") -> Client:
        """Connect to a `Node` of this process; closing the client leaves the node open."""
        return cls(LocalLink(node, name, owns_node=False), verify)

    @verb
    def match(
        self,
        prefix: Prefix,
        *,
        writing: bool = False,
        at_least: int = 0,
        timeout_s: float = DEFAULT_TIMEOUT_S,
    ) -> Hit:
        """Count the leading blocks that are resident, up to the first missing one. With `writing`,
        blocks that a writer has reserved count too: `stream` reads them, `get` does not yet.

        `at_least`: wait up to `timeout_s` until so many blocks are there; the result has what is
        there then.
        """
        return block_verbs.match(self._link, prefix, timeout_s, writing=writing, at_least=at_least)

    @verb
    def exists(self, prefix: Prefix, *, timeout_s: float = DEFAULT_TIMEOUT_S) -> list[bool]:
        """Tell for each block whether it is resident, regardless of the blocks before it."""
        return block_verbs.exists(self._link, prefix, timeout_s)

    @verb
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
        """Read the leading blocks of `prefix`: as leased views into the pool, or as copies.

        `into`: one writable buffer per block, or one for all. `layers`, `heads`: read only these
        (half-open); buffers then have just that range, packed. Waits for the node for `timeout_s`
        at most; the blocks that the node could not serve by then are in `missing`, with the reason.
        """
        access = self._reading(verify)
        selection = select(prefix.schema, layers, heads)
        if into is None:
            found = block_verbs.get(self._link, prefix, access, selection, timeout_s)
            return LeasedBlocks(*found, self._link)
        targets = target_views(into, len(prefix), selection.nbytes)
        copied = block_verbs.get_into(self._link, prefix, access, selection, targets, timeout_s)
        return LeasedBlocks(copied, 0, None)

    @verb
    def put(
        self,
        prefix: Prefix,
        payloads: Sequence[Any],
        *,
        shard: AnyShard | None = None,
        timeout_s: float = DEFAULT_TIMEOUT_S,
    ) -> PutResult:
        """Copy one payload per block into the pool; resident blocks are skipped.

        `shard`: (rank, ranks), to write one tensor-parallel rank's slice of each block, or a
        `Shard` that names a pipeline stage as well. Payloads are these slices, packed
        (`select_shard`), or whole blocks from which the client takes the slice. Readers see a block
        once every writer has put its slice; until then it is `pending`. Raises InvalidInput for a
        slice that overlaps another writer's, and SchemaError for one that can't be.

        Returns the outcome of each block: no room within `timeout_s` is a result, not an error.
        """
        return block_verbs.put(self._link, prefix, payloads, timeout_s, shard)

    @verb
    def reserve(
        self,
        prefix: Prefix,
        *,
        shard: AnyShard | None = None,
        by_layer: bool = False,
        timeout_s: float = DEFAULT_TIMEOUT_S,
    ) -> Slots:
        """Reserve slots for the blocks that are not resident, to be written in place.

        `shard`: (rank, ranks) or a `Shard`, to write only these heads and layers; see `put`. All
        writers get the same slots, each in its own process. `by_layer`: the slots can be committed
        only when every layer was published, so that a writer that stops half way stores nothing.
        Raises NoRoom when the node had room for no block within `timeout_s`.
        """
        reserved = block_verbs.reserve(self._link, prefix, timeout_s, shard)
        slots = Slots(prefix, reserved, self._link)
        return slots._require_layers() if by_layer else slots

    @verb
    def stream(
        self,
        prefix: Prefix,
        *,
        heads: HeadRange | None = None,
        verify: Verify | None = None,
        timeout_s: float = DEFAULT_TIMEOUT_S,
        ahead: int = 1,
    ) -> LayerStream:
        """Stream the leading blocks of `prefix` layer by layer, committed or still being written:
        iterate over the result, or enter it with `with`. Each layer has a timeout of `timeout_s`.

        `heads`: only these of each layer (half-open). `ahead`: how many layers to prefetch from a
        remote node; has no effect on the node's own host, where no bytes travel. The yielded layers
        are provisional until the iteration ends without an error (docs/client.md).
        """
        source = LocalSource(self._link, prefix, self._reading(verify), timeout_s, heads)
        return LayerStream(source, operator.call, timeout_s)

    @verb
    def prefetch(self, prefix: Prefix, *, timeout_s: float = DEFAULT_TIMEOUT_S) -> Prefetch:
        """Have the node bring the leading blocks of `prefix` from NVMe into its DRAM, and return at
        once: a handle with `poll` and `wait`. It ends after `timeout_s` at the latest. Blocks for
        which DRAM had no room are asked for again by `poll` and `wait` only."""
        state = PrefetchState(prefix, time.monotonic() + timeout_s)
        state.look(self._link)
        return Prefetch(state, self._check_open, self._link)

    @verb
    def pin(
        self,
        prefix: Prefix,
        *,
        ttl_s: float | None = None,
        hard: bool = False,
        timeout_s: float = DEFAULT_TIMEOUT_S,
    ) -> int:
        """Pin the resident blocks for `ttl_s`: the node evicts them last, or with `hard` never.

        Returns how many were resident.
        """
        level = PinLevel.HARD if hard else PinLevel.SOFT
        return block_verbs.pin(self._link, prefix, level, ttl_s, timeout_s)

    @verb
    def unpin(self, prefix: Prefix, *, timeout_s: float = DEFAULT_TIMEOUT_S) -> int:
        """Remove the pins; returns how many blocks were resident."""
        return block_verbs.pin(self._link, prefix, PinLevel.NONE, None, timeout_s)

    @verb
    def remove(self, prefix: Prefix, *, timeout_s: float = DEFAULT_TIMEOUT_S) -> int:
        """Remove the resident blocks, pinned or not; returns how many there were. Readers with a
        lease keep their bytes. The node wipes the copies on disk: once this returns, no restart
        finds the blocks, not even after a power cut.

        Raises TierUnavailable if the disk refused to wipe, DeadlineExceeded if it did not confirm
        in time; even then the running node no longer serves the blocks until it restarts.
        """
        return block_verbs.remove(self._link, prefix, timeout_s)

    @verb
    def announce(self, space: KeySpace, *, timeout_s: float = DEFAULT_TIMEOUT_S) -> None:
        """Say what the keys of this client's blocks are made of, so that who places requests finds
        them. It holds until the next call, or while the client is connected: repeat it every few
        seconds. Raises InvalidInput for a space that is too large."""
        block_verbs.announce(self._link, space, timeout_s)

    @verb
    def statistics(self, *, timeout_s: float = DEFAULT_TIMEOUT_S) -> dict[str, Any]:
        """The node's tiers, counters and sessions."""
        return block_verbs.statistics(self._link, timeout_s)

    @property
    def region(self) -> MappedRegion | None:
        """This process's mapping of the memory of the node on this host, in which other processes'
        leased blocks can be read (`LeasedBlocks.places`). None for a pool without a node here; a
        restarted node has another one. Raises ClientClosed."""
        self._check_open()
        return self._link.mapping.mapped

    def close(self) -> None:
        """Release all leases and reservations of this client; its views are invalid afterwards."""
        self._access = None
        if not self._inherited:
            self._link.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
