"""The client for engines and scripts: reads and writes a pool's blocks by prefix.

Every verb takes a `Prefix` (from `KVSchema.prefix`) and `timeout_s`. A miss is a result, not an
error; `errors.py` lists the exceptions. A client is thread-safe. It has the link to one
node, whose verbs are `block_verbs`, or a pool's `ManyNodes`.
"""

from __future__ import annotations

import operator
import random
import time
from functools import partial
from typing import TYPE_CHECKING, Any, Self

from tiffin.messenger.signal_safe import Forsaken, uninterrupted

from ..after_fork import OfOneProcess
from ..errors import ClientClosed, InvalidInput, TiffinError, open_errors
from ..node.core.records import PinLevel
from ..node.node import Node
from ..url import Daemon, Embedded, Pool, parse_url
from .blocks.block_views import select
from .blocks.payload_buffers import target_views
from .connection.node_link import LocalLink, NodeLink, SocketLink
from .pool.many_nodes import ManyNodes, carry_out
from .pool.open_pool import open_pool
from .streaming.layer_stream import LayerStream
from .streaming.local_source import LocalSource
from .verbs import block_verbs
from .verbs.arguments import Verify, check_verify, opening, verb
from .verbs.block_verbs import DEFAULT_TIMEOUT_S, Access, Hit, PutResult
from .verbs.leased_blocks import LeasedBlocks
from .verbs.prefetch_handles import Prefetch
from .verbs.prefetching import PrefetchState
from .verbs.slots import Slots

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ..directory.base import NodeRecord
    from ..format.key_space import KeySpace
    from ..format.keys import Prefix
    from ..format.schema import AnyShard, HeadRange, LayerRange
    from .blocks.block_places import MappedRegion


@open_errors()
def _opened(cls: type[Client], url: str, verify: Verify, name: str, *, populate: bool) -> Client:
    target = parse_url(url)
    if isinstance(target, Pool):
        return cls(open_pool(target, name), verify)
    link = _open_link(target, name)
    if populate:
        link.mapping.populate()
    return cls(link, verify)


def _open_link(target: Embedded | Daemon, name: str) -> NodeLink:
    """A link to the node of a parsed URL; starts the node if it is an embedded one."""
    if isinstance(target, Daemon):
        return SocketLink(target.path, name)
    node = Node(target.options, name=name or "embedded")
    try:
        return LocalLink(node, name, owns_node=True)
    except TiffinError:
        node.close()
        raise


class Client(OfOneProcess):
    """Synchronous client. Open it with `Client.open(url)`; it is a context manager.

    A client of a pool asks the node on its host first, its *home* node, whose blocks it reads in
    place; what other nodes have travels over the network. A pool's directory lists committed blocks
    and may be stale; for a fixed list of nodes the client asks the nodes themselves.
    """

    def __init__(self, nodes: NodeLink | ManyNodes, verify: Verify) -> None:
        self._access: Access | None = Access(check_verify(verify), random.Random())
        self._nodes = nodes

    @classmethod
    @opening
    def open(
        cls, url: str, *, verify: Verify = "always", name: str = "", populate: bool = False
    ) -> Client:
        """Open the node or the pool that `url` names (docs/client.md lists the forms).

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

    # -- looking ---------------------------------------------------------------------------------

    @verb
    def match(
        self,
        prefix: Prefix,
        *,
        writing: bool = False,
        at_least: int = 0,
        timeout_s: float = DEFAULT_TIMEOUT_S,
        node: int | None = None,
    ) -> Hit:
        """Count the leading blocks that are resident, up to the first missing one. With `writing`,
        blocks that a writer has reserved count too: `stream` reads them, `get` does not yet.

        `at_least`: wait up to `timeout_s` until so many blocks are there; the result has what is
        there then.

        In a pool, home's answer is exact; what other nodes have may be stale, so that a get finds
        fewer. A directory does not list reservations: what is being written counts at home, in a
        fixed list, and at `node`, the number of the writer's node. The wait is for that node;
        without one, for home, or for the only node of a fixed list. Raises InvalidInput if there is
        none of these.
        """
        nodes, how = self._nodes, {"writing": writing, "at_least": at_least}
        if isinstance(nodes, ManyNodes):
            return nodes.match(prefix, timeout_s, **how, node=node)  # type: ignore[arg-type]
        _refuse(node)
        return block_verbs.match(nodes, prefix, timeout_s, **how)  # type: ignore[arg-type]

    @verb
    def exists(self, prefix: Prefix, *, timeout_s: float = DEFAULT_TIMEOUT_S) -> list[bool]:
        """Tell for each block whether it is resident, regardless of the blocks before it."""
        if isinstance(self._nodes, ManyNodes):
            return self._nodes.exists(prefix, timeout_s)
        return block_verbs.exists(self._nodes, prefix, timeout_s)

    # -- reading ---------------------------------------------------------------------------------

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
        """Read the leading blocks of `prefix`: as leased views into the memory of the node on this
        host (copies of what only other nodes have), or as copies of all.

        `into`: one writable buffer per block, or one for all. `layers`, `heads`: read only these
        (half-open); buffers then have just that range, packed. Waits for the nodes for `timeout_s`
        at most; the blocks that none could serve by then are in `missing`, with the reason.
        """
        selection = select(prefix.schema, layers, heads)
        targets = None if into is None else target_views(into, len(prefix), selection.nbytes)
        nodes, how = self._nodes, (prefix, self._reading(verify), selection)
        if isinstance(nodes, ManyNodes):
            return nodes.get(*how, targets, timeout_s)
        if targets is None:
            return LeasedBlocks(*block_verbs.get(nodes, *how, timeout_s), nodes)
        return LeasedBlocks(block_verbs.get_into(nodes, *how, targets, timeout_s), 0, None)

    @verb
    def stream(
        self,
        prefix: Prefix,
        *,
        heads: HeadRange | None = None,
        verify: Verify | None = None,
        timeout_s: float = DEFAULT_TIMEOUT_S,
        ahead: int = 1,
        node: int | None = None,
    ) -> LayerStream:
        """Stream the leading blocks of `prefix` layer by layer, committed or still being written:
        iterate over the result, or enter it with `with`. Each layer has a timeout of `timeout_s`.

        `heads`: only these of each layer (half-open). `ahead`: how many layers to prefetch from a
        remote node; has no effect on the node's own host, where no bytes travel. The yielded layers
        are provisional until the iteration ends without an error (docs/client.md).

        In a pool the layers come from one node: `node` is the number of the writer's. Without it,
        the client chooses among home and the holders of the first block the first that has all
        blocks, else the one with the most; it does not find reservations elsewhere. If the node is
        lost, the stream goes on at another that has the same blocks committed.
        """
        nodes, how = self._nodes, (prefix, self._reading(verify), timeout_s)
        if not isinstance(nodes, ManyNodes):
            _refuse(node)
            return LayerStream(LocalSource(nodes, *how, heads), operator.call, timeout_s)
        source = nodes.layer_source(*how, heads, ahead, node)
        stream = LayerStream(source, partial(carry_out, source), timeout_s)
        Forsaken.when(stream, source.release_dropped)
        return stream

    @verb
    def prefetch(self, prefix: Prefix, *, timeout_s: float = DEFAULT_TIMEOUT_S) -> Prefetch:
        """Have the node on this host bring the leading blocks of `prefix` into its DRAM, from its
        NVMe and from the other nodes of the pool, and return at once: a handle with `poll` and
        `wait`. It ends after `timeout_s` at the latest.

        Blocks for which the only node's DRAM had no room are asked for again by `poll` and `wait`
        only. In a pool it goes on by itself, ignores the admission policy (the caller knows what it
        wants), and ends with the reason "no_home" if there is no node on this host.
        """
        state = PrefetchState(prefix, time.monotonic() + timeout_s)
        if isinstance(self._nodes, ManyNodes):
            return self._nodes.prefetch(state, self._check_open)
        state.look(self._nodes)
        return Prefetch(state, self._check_open, self._nodes)

    # -- writing ---------------------------------------------------------------------------------

    @verb
    def put(
        self,
        prefix: Prefix,
        payloads: Sequence[Any],
        *,
        shard: AnyShard | None = None,
        timeout_s: float = DEFAULT_TIMEOUT_S,
        replicas: int = 1,
        sync: bool = True,
        node: int | None = None,
    ) -> PutResult:
        """Copy one payload per block into the pool; resident blocks are skipped. In a pool, to the
        home node if it has room, else to another node that has room.

        `shard`: (rank, ranks), to write one tensor-parallel rank's slice of each block, or a
        `Shard` that names a pipeline stage as well. Payloads are these slices, packed
        (`select_shard`), or whole blocks from which the client takes the slice. Readers see a block
        once every writer has put its slice; until then it is `pending`. Raises InvalidInput for a
        slice that overlaps another writer's, and SchemaError for one that can't be. All ranks have
        to write to the same node: home, or without a home node the one that `shard_node` computes
        for the prefix; ranks on several hosts have to name one as `node`.

        `replicas`: the number of a pool's nodes that store the blocks. With `sync`, the put returns
        when all of them have the blocks; without, nodes copy the other replicas in the background,
        where a failure raises nothing.

        Returns the outcome of each block: no room within `timeout_s` is a result, not an error.
        """
        nodes, what = self._nodes, (prefix, payloads)
        if isinstance(nodes, ManyNodes):
            where = {"replicas": replicas, "sync": sync, "node": node}
            return nodes.put(*what, shard, timeout_s, **where)  # type: ignore[arg-type]
        _refuse(node, replicas)
        return block_verbs.put(nodes, *what, timeout_s, shard)

    @verb
    def reserve(
        self,
        prefix: Prefix,
        *,
        shard: AnyShard | None = None,
        by_layer: bool = False,
        timeout_s: float = DEFAULT_TIMEOUT_S,
        node: int | None = None,
    ) -> Slots:
        """Reserve slots for the blocks that are not resident, to be written in place.

        `shard`: (rank, ranks) or a `Shard`, to write only these heads and layers; see `put`. All
        writers get the same slots, each in its own process. `by_layer`: the slots can be committed
        only when every layer was published, so that a writer that stops half way stores nothing.
        Raises NoRoom when the node had room for no block within `timeout_s`.

        In a pool the slots lie in home's memory. Without a home node, with another `node`, or when
        home does not answer or has no room while another node could have some, they are memory of
        this process, which is sent when they are published or committed (which raises NoRoom if no
        node has any). `slots.node` is the number of the node that has the slots, for readers that
        stream them. A block is resident if that node has it; for slots in memory of this process
        without a named node, if any node has it. Raises NodeUnavailable or DeadlineExceeded when
        the node is silent and no other node may take the blocks.
        """
        nodes = self._nodes
        if isinstance(nodes, ManyNodes):
            slots = nodes.reserve(prefix, shard, timeout_s, node)
        else:
            _refuse(node)
            slots = Slots(prefix, block_verbs.reserve(nodes, prefix, timeout_s, shard), nodes)
        return slots.require_layers() if by_layer else slots

    # -- wishes ----------------------------------------------------------------------------------

    @verb
    def pin(
        self,
        prefix: Prefix,
        *,
        ttl_s: float | None = None,
        hard: bool = False,
        timeout_s: float = DEFAULT_TIMEOUT_S,
    ) -> int:
        """Pin the resident blocks for `ttl_s`: the node evicts them last, or with `hard` never. In
        a pool, on every node that is known to have them.

        Returns how many were resident: in a pool, the largest number on one node.
        """
        return self._pin(prefix, PinLevel.HARD if hard else PinLevel.SOFT, ttl_s, timeout_s)

    @verb
    def unpin(self, prefix: Prefix, *, timeout_s: float = DEFAULT_TIMEOUT_S) -> int:
        """Remove the pins; returns as `pin`."""
        return self._pin(prefix, PinLevel.NONE, None, timeout_s)

    def _pin(self, prefix: Prefix, level: int, ttl_s: float | None, timeout_s: float) -> int:
        if isinstance(self._nodes, ManyNodes):
            return self._nodes.pin(prefix, level, ttl_s, timeout_s)
        return block_verbs.pin(self._nodes, prefix, level, ttl_s, timeout_s)

    @verb
    def remove(self, prefix: Prefix, *, timeout_s: float = DEFAULT_TIMEOUT_S) -> int:
        """Remove the resident blocks, pinned or not; returns how many there were. Readers with a
        lease keep their bytes. The node wipes the copies on disk: once this returns, no restart
        finds the blocks, not even after a power cut.

        In a pool the request goes to all nodes that are in the directory now, whichever of them
        have the blocks, and to those that this client has known; they remember it, and tell a node
        that returns before it serves. The result is the largest number that one node had.

        Raises TierUnavailable if a disk refused to wipe: a restart may find the blocks.
        NodeUnavailable, DeadlineExceeded if a node or the directory did not confirm in time: there
        may be nodes that still have them. A running node that has the request serves them no more.
        """
        if isinstance(self._nodes, ManyNodes):
            return self._nodes.remove(prefix, timeout_s)
        return block_verbs.remove(self._nodes, prefix, timeout_s)

    # -- the nodes -------------------------------------------------------------------------------

    @verb
    def announce(self, space: KeySpace, *, timeout_s: float = DEFAULT_TIMEOUT_S) -> None:
        """Say what the keys of this client's blocks are made of, so that who places requests finds
        them: at home, without one at the node with the lowest number. It holds until the next call,
        or while the client is connected: repeat it every few seconds. Raises InvalidInput for a
        space that is too large, NodeUnavailable if there is no node."""
        if isinstance(self._nodes, ManyNodes):
            self._nodes.announce(space, timeout_s)
        else:
            block_verbs.announce(self._nodes, space, timeout_s)

    @verb
    def statistics(self, *, timeout_s: float = DEFAULT_TIMEOUT_S) -> dict[str, Any]:
        """The node's tiers, counters and sessions. For a pool: those of each node that answers, by
        its name, this client's statistics of its links to them, the name of the home node, and of
        the directory (None for a fixed list) with the `reason` why it shows no node that is
        registered."""
        if isinstance(self._nodes, ManyNodes):
            return self._nodes.statistics(timeout_s)
        return block_verbs.statistics(self._nodes, timeout_s)

    @property
    def is_pool(self) -> bool:
        """Whether this client has a pool of nodes, not one node."""
        return isinstance(self._nodes, ManyNodes)

    @property
    def home_number(self) -> int | None:
        """The number of the node on this host in the pool's directory, which a restart changes;
        None without one, and for a client of one node."""
        return self._nodes.home_number if isinstance(self._nodes, ManyNodes) else None

    @property
    def near_link(self) -> NodeLink | None:
        """The link to the node on this host, whose memory this process has mapped; None if all
        nodes are remote."""
        return self._nodes.near if isinstance(self._nodes, ManyNodes) else self._nodes

    @property
    def region(self) -> MappedRegion | None:
        """This process's mapping of the memory of the node on this host, in which other processes'
        leased blocks can be read (`LeasedBlocks.places`). None for a pool without a node here; a
        restarted node has another one. Raises ClientClosed."""
        self._check_open()
        near = self.near_link
        return None if near is None else near.mapping.mapped

    def _many(self) -> ManyNodes:
        if not isinstance(self._nodes, ManyNodes):
            raise InvalidInput(
                "this client has one node; open a pool: redis://, tiffin://host:port"
            )
        return self._nodes

    @verb
    def nodes(self) -> dict[int, NodeRecord]:
        """The nodes of the pool by number. Raises InvalidInput for a client of one node."""
        return self._many().records()

    @verb
    def replicate(
        self, prefix: Prefix, to: Sequence[int], *, timeout_s: float = DEFAULT_TIMEOUT_S
    ) -> dict[int, int]:
        """Have the pool's nodes `to` (numbers, see `nodes`) copy the resident blocks from their
        holders. Returns per node how many leading blocks of the prefix it has afterwards. Raises
        NoRoom if no node is known to have the first block, and the error of a node that could copy
        none; InvalidInput for a client of one node."""
        return self._many().replicate(prefix, to, timeout_s)

    @verb
    def evacuate(self, node: int, *, timeout_s: float = 600.0) -> int:
        """Drain a node of the pool before it leaves: it takes no new blocks, and has other nodes
        copy the blocks that no other node has. Returns how many of its blocks other nodes have
        afterwards. The node serves its blocks until it stops; after a timeout, call again to go on.
        Raises InvalidInput for a client of one node."""
        return self._many().evacuate(node, timeout_s)

    def close(self) -> None:
        """Release all leases and reservations of this client; its views are invalid afterwards.
        Calls in flight raise ClientClosed or return what they have. Waits up to 5 s for a pool's
        replications in the background."""
        self._access = None
        if not self._inherited:
            self._nodes.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _refuse(node: int | None, replicas: int = 1) -> None:
    if node is not None or replicas != 1:
        raise InvalidInput(
            "node= and replicas= are for clients of a pool (redis://..., tiffin://host:port); "
            "this client has one node"
        )
