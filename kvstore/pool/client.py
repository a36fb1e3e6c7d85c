"""The client of a pool of many nodes: the verbs of `Client`, over the network.

The home node is the node on this host, if there is one: the client reads its blocks in place, puts
blocks there first, and may copy blocks read from other nodes into it. A client without a home node
reads blocks into memory of its own process.
"""

from __future__ import annotations

import random
import threading
import time
from functools import partial
from typing import TYPE_CHECKING, Any

from tiffin.messenger.signal_safe import Forsaken, uninterrupted

from ..blocks.block_views import select, select_shard
from ..blocks.payload_buffers import payload_views, target_views
from ..blocks.selection_copy import source_views
from ..client.client import Client, LeasedBlocks, Slots
from ..deadlines import until_s
from ..directory.base import nobody, unreadable
from ..errors import (
    ClientClosed,
    DirectoryUnavailable,
    InvalidInput,
    NodeUnavailable,
    NoRoom,
    TierUnavailable,
    TiffinError,
)
from ..node.core import messages
from ..node.core.records import PinLevel
from ..streaming.layer_stream import LayerStream
from ..verbs import block_verbs as local_verbs
from ..verbs.arguments import check_ttl, check_verify, verb
from ..verbs.block_verbs import DEFAULT_TIMEOUT_S, Hit, PutResult
from ..verbs.prefetching import PrefetchState
from . import pool_verbs
from .failover_source import FailoverSource
from .home.home import Home
from .home.home_prefetch import HomePrefetch, HomePrefetches
from .members import FixedHomeNumber, FixedMembers, names_of
from .pool_verbs import HOME
from .put_placement import ROOM_WAIT_S, PutPlacement
from .read_results import MixedBlocks, OwnMemory, Reader, copied_blocks, release_all
from .remote.block_write import BlockSeals
from .remote.writer_shards import shard_node
from .removal import remove_everywhere
from .replication.replication_requests import Orders, replicate_from, replicate_to
from .signal_safe_verbs import given_up_together, in_one_piece
from .staged_write import StagedSlots

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import numpy as np
    from numpy.typing import NDArray

    from ..blocks.block_places import MappedRegion
    from ..connection.node_link import NodeLink
    from ..format.key_space import KeySpace
    from ..format.keys import Prefix
    from ..format.schema import AnyShard, HeadRange, LayerRange
    from ..verbs.arguments import Verify
    from .verb_driver import VerbDriver

    Bytes = NDArray[np.uint8]


# In `Hit.where`: another node of the pool has the block.
IN_PEER = 4
_NO_HIT = Hit(0, 0)


class PoolClient(Client):
    """What `Client.open("redis://...")` and `Client.open("tiffin://host:port")` return."""

    def __init__(
        self,
        driver: VerbDriver,
        verify: Verify,
        *,
        home: NodeLink | None = None,
        home_number: Callable[[], int | None] = lambda: None,
        admission: str = "second",
    ) -> None:
        """`home_number()` is the home node's number in the directory; a restart changes it."""
        self._access = local_verbs.Access(check_verify(verify), random.Random())
        self._driver = driver
        self._home = Home(home, home_number, driver, admission) if home is not None else None
        self._number_of_home = home_number
        self._dice = random.Random()
        self._orders = Orders()
        self._prefetches = HomePrefetches(self._home, driver)
        self._closing = threading.Lock()
        self._closed = False

    @property
    def home_number(self) -> int | None:
        """The home node's number in the directory, which a restart changes; None without one."""
        return self._home.number if self._home is not None else None

    # -- looking ---------------------------------------------------------------------------------

    @verb
    @in_one_piece
    def match(
        self,
        prefix: Prefix,
        *,
        writing: bool = False,
        at_least: int = 0,
        timeout_s: float = DEFAULT_TIMEOUT_S,
        node: int | None = None,
    ) -> Hit:
        """How many leading blocks are resident. The home node's answer is exact; for other nodes
        the client asks the directory, whose answer may be stale: a get may find fewer. With a fixed
        list of nodes it asks the nodes themselves.

        `writing`, `at_least`: as in `Client.match`. The directory does not list reservations: what
        is being written counts at home, in a fixed list, and at `node`, the number of the writer's
        node. The wait is for that node; without one, for home, or for the only node of a fixed
        list. Raises InvalidInput if there is none of these."""
        deadline = time.monotonic() + timeout_s
        where = b""
        if self._home is not None:
            here = self._home.ask(_NO_HIT, local_verbs.match, prefix, timeout_s, writing=writing)
            where = here.where
        where += self._elsewhere(prefix, len(where), deadline, writing=writing)
        at_least = min(at_least, len(prefix))
        if len(prefix) and (node is not None or len(where) < at_least):
            there = self._match_at(node, prefix, writing, at_least, deadline)
            where = max(where, there, key=len)
        return Hit(len(where), len(where) * prefix.schema.block_tokens, where)

    def _match_at(
        self, node: int | None, prefix: Prefix, writing: bool, at_least: int, deadline: float
    ) -> bytes:
        """What one node has, once it has `at_least` so many blocks or the deadline has passed."""
        left_s = until_s(deadline)
        if self._home is not None and (node is None or node == self.home_number):
            how = {"writing": writing, "at_least": at_least}
            return self._home.ask(_NO_HIT, local_verbs.match, prefix, left_s, **how).where
        if node is None:
            nodes = self._known_nodes() if self._fixed else {}
            if len(nodes) != 1:
                raise InvalidInput("at_least waits at one node: name the writer's as node=")
            (node,) = nodes
        request = messages.Match(0, prefix.key_bytes, writing, at_least, left_s)
        reply = self._driver.ask(node, request, left_s)
        return bytes(flag | IN_PEER for flag in reply.flags)

    def _elsewhere(
        self, prefix: Prefix, start: int, deadline: float, *, writing: bool = False
    ) -> bytes:
        if start >= len(prefix):
            return b""
        if self._fixed:
            rest, left_s = prefix[start:], deadline - time.monotonic()
            hits = self._ask_all(lambda: messages.Match(0, rest.key_bytes, writing), left_s)
            longest = max((reply.flags for reply in hits.values()), key=len, default=b"")
            return bytes(flag | IN_PEER for flag in longest)
        located = self._locate(prefix.keys[start:], without_home=True)
        return bytes([IN_PEER]) * _leading(located)

    @verb
    @in_one_piece
    def exists(self, prefix: Prefix, *, timeout_s: float = DEFAULT_TIMEOUT_S) -> list[bool]:
        """Whether each block is resident on its own; for other nodes than home as in `match`."""
        deadline, found = time.monotonic() + timeout_s, [False] * len(prefix)
        if not len(prefix):
            return found
        if self._home is not None:
            found = self._home.ask(found, local_verbs.exists, prefix, timeout_s)
        if self._fixed:
            left_s = deadline - time.monotonic()
            replies = self._ask_all(lambda: messages.Exists(0, prefix.key_bytes), left_s)
            for reply in replies.values():
                found = [a or bool(b) for a, b in zip(found, reply.flags, strict=True)]
            return found
        located = self._locate(prefix.keys, without_home=True)
        return [a or bool(nodes) for a, nodes in zip(found, located, strict=True)]

    # -- reading ---------------------------------------------------------------------------------

    @verb
    @in_one_piece
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
        """The leading blocks of `prefix`, from the home node and from other nodes. As `Client.get`:
        views of the blocks that are at home or that this call copies there, copies of the rest;
        with `into`, copies of all."""
        deadline, access = time.monotonic() + timeout_s, self._reading(verify)
        selection = select(prefix.schema, layers, heads)
        if into is not None:
            targets = target_views(into, len(prefix), selection.nbytes)
            reader = Reader(prefix, access, selection, targets.__getitem__, self._home)
            return copied_blocks(reader, self._driver.get(reader, deadline))
        own, leases = OwnMemory(selection.nbytes), list[LeasedBlocks]()
        reader = Reader(prefix, access, selection, own.__getitem__, self._home, leases)
        try:
            outcome = self._driver.get(reader, deadline)
        except BaseException:
            release_all(leases)
            raise
        if len(leases) == 1 and leases[0].complete:
            return leases[0]
        return MixedBlocks(reader, own, outcome)

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
        """As `Client.stream`, from one node: `node` is the number of the writer's node. Without it,
        the client chooses among the home node and the holders of the first block the first that has
        all blocks, else the one with the most. The directory does not list reservations. If the
        node is lost, the stream continues at another node that has the same blocks committed."""
        source = self._layer_source(prefix, heads, verify, timeout_s, ahead, node)

        def run(step: Callable[[], Any]) -> Any:
            return given_up_together(step, source.break_off)

        stream = LayerStream(source, run, timeout_s)
        Forsaken.when(stream, source.release_dropped)
        return stream

    def _layer_source(
        self,
        prefix: Prefix,
        heads: HeadRange | None,
        verify: Verify | None,
        timeout_s: float,
        ahead: int,
        node: int | None,
    ) -> FailoverSource:
        how = prefix, self._reading(verify), timeout_s, self._driver.peer
        first = partial(self._locate, without_home=True)
        return FailoverSource(
            *how, self._home, node, lambda part: first(part.keys[:1])[0], heads, ahead
        )

    # -- writing ---------------------------------------------------------------------------------

    @verb
    @in_one_piece
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
        """Copy one payload per block into the pool: to the home node if it has room, else to
        another node that has room. Blocks that are resident at that node are skipped.

        `replicas`: the number of nodes that store the blocks. With `sync`, the put returns when all
        of them have the blocks; without, nodes copy the other replicas in the background, where a
        failure raises nothing.

        `shard`: see `Client.put`. All ranks have to write to the same node: home, or without a home
        node the one that `shard_node` computes for the prefix; ranks on several hosts have to name
        one as `node`.
        """
        deadline = time.monotonic() + timeout_s
        if prefix.schema.check_shard(shard) is not None or node is not None:
            if replicas != 1:
                raise InvalidInput("slices, and blocks for one node, are put once: use replicate()")
            return self._put_at(self._node_for(prefix, node), prefix, payloads, shard, deadline)
        views = payload_views(prefix.schema, payloads, len(prefix))
        if not len(prefix):
            return PutResult((), (), (), (), None)
        placing = self._placing(prefix, views, deadline)
        first, number = placing.one()
        if sync:
            for done in range(1, replicas):
                self._put_another(placing, done, replicas)
        elif replicas > 1 and number is not None:
            more, without = replicas - 1, placing.done_with
            self._orders.add(partial(replicate_from, self._driver, prefix, number, more, without))
        return first

    def _placing(self, prefix: Prefix, views: list[Bytes], deadline: float) -> PutPlacement:
        return PutPlacement(self._driver, BlockSeals(prefix, views), deadline, self._home)

    def _put_another(self, placing: PutPlacement, done: int, replicas: int) -> None:
        """Write one more replica to another node. Raises NoRoom."""
        try:
            reason = placing.one()[0].reason
            failure = None
        except ClientClosed:
            raise
        except TiffinError as error:
            reason, failure = str(error), error
        if reason is not None:
            text = f"only {done} of {replicas} replicas could be written whole: {reason}"
            raise NoRoom(text) from failure

    def _put_at(
        self,
        node: int | None,
        prefix: Prefix,
        payloads: Sequence[Any],
        shard: AnyShard | None,
        deadline: float,
    ) -> PutResult:
        """Store at this node and at no other: the other ranks would not find the blocks elsewhere.
        None is the home node."""
        if node is None and self._home is None:
            raise ClientClosed("this client has no home node")
        selection = select_shard(prefix.schema, shard)
        seals = BlockSeals(prefix, source_views(selection, payloads, len(prefix)), selection)
        room_s = until_s(deadline)
        replica = self._driver.node(HOME if node is None else node, self._home)
        return replica.put(seals, room_s, deadline, patient=True)

    def _node_for(self, prefix: Prefix, node: int | None) -> int | None:
        """The number of the node to write to; None for the home node. Raises NoRoom."""
        if node is not None:
            return None if node == self.home_number else node
        if self._home is not None:
            return None
        return shard_node(self._driver.nodes(), prefix)

    @verb
    @in_one_piece
    def reserve(
        self,
        prefix: Prefix,
        *,
        shard: AnyShard | None = None,
        by_layer: bool = False,
        timeout_s: float = DEFAULT_TIMEOUT_S,
        node: int | None = None,
    ) -> Slots:
        """Reserve slots for the blocks that are not resident. At the home node the slots lie in its
        memory. Without a home node, with another `node`, or when the home node does not answer or
        has no room while another node could have some, they are memory of this process, which is
        sent when they are published or committed (which raises NoRoom if no node has any). `shard`
        as in `put`, `by_layer` as in `Client.reserve`. `slots.node` is the number of the node that
        has the slots, for readers that stream them. A block is resident if that node has it; for
        slots in memory of this process without a named node, if any node has it. Raises
        NodeUnavailable or DeadlineExceeded when the node is silent and no other node may take the
        blocks."""
        slots = self._reserve(prefix, shard, timeout_s, node)
        return slots._require_layers() if by_layer else slots

    def _reserve(
        self, prefix: Prefix, shard: AnyShard | None, timeout_s: float, node: int | None
    ) -> Slots:
        deadline = time.monotonic() + timeout_s
        shard = prefix.schema.check_shard(shard)
        # To one node: other ranks and readers would not find the slots elsewhere.
        bound = shard is not None or node is not None
        if bound:
            node = self._node_for(prefix, node)
        if self._home is not None and node is None:
            reserved = self._home.reserve(prefix, ROOM_WAIT_S, timeout_s, shard, patient=bound)
            if reserved is not None:
                slots = _HomeSlots(prefix, reserved, self._home.patient)
                slots.node = self.home_number
                return slots
        return StagedSlots(prefix, self, timeout_s, deadline, shard, node)

    # -- wishes ----------------------------------------------------------------------------------

    @verb
    @in_one_piece
    def pin(
        self,
        prefix: Prefix,
        *,
        ttl_s: float | None = None,
        hard: bool = False,
        timeout_s: float = DEFAULT_TIMEOUT_S,
    ) -> int:
        """Pin the resident blocks on every node that is known to have them. Returns the largest
        number of them that were resident on one node."""
        level = PinLevel.HARD if hard else PinLevel.SOFT
        return self._pin(prefix, level, ttl_s, timeout_s)

    @verb
    @in_one_piece
    def unpin(self, prefix: Prefix, *, timeout_s: float = DEFAULT_TIMEOUT_S) -> int:
        """Remove the pins on every node that is known to have the blocks. Returns as `pin`."""
        return self._pin(prefix, PinLevel.NONE, None, timeout_s)

    def _pin(self, prefix: Prefix, level: int, ttl_s: float | None, timeout_s: float) -> int:
        until_s, deadline = check_ttl(ttl_s), time.monotonic() + timeout_s
        at_home: int | None = None
        if self._home is not None:
            at_home = self._home.ask(None, local_verbs.pin, prefix, level, ttl_s, timeout_s)
        holders = {node for nodes in self._locate(prefix.keys) for node in nodes}
        return self._count(
            prefix,
            at_home,
            holders,
            lambda: messages.Pin(0, prefix.key_bytes, level, until_s),
            deadline - time.monotonic(),
        )

    @verb
    @in_one_piece
    def remove(self, prefix: Prefix, *, timeout_s: float = DEFAULT_TIMEOUT_S) -> int:
        """Remove the resident blocks from every node: the request goes to all nodes that are in the
        directory now, whichever of them have the blocks, and to those that this client has known.
        They remember it, and tell a node that returns before it serves. Returns the largest number
        of blocks that one node had. Raises NodeUnavailable, DeadlineExceeded if a node or the
        directory did not answer: there may be nodes that still have the blocks; TierUnavailable if
        a node's disk did not delete them: the node may find them after a restart."""
        deadline = time.monotonic() + timeout_s
        at_home: int | None = None
        refused: TierUnavailable | None = None
        number = self.home_number  # asked for before: a home that restarts meanwhile has another
        if self._home is not None:
            try:
                at_home = self._home.ask(None, local_verbs.remove, prefix, timeout_s)
            except TierUnavailable as error:  # the other nodes still have to remove theirs
                at_home, refused = 0, error
        self._driver.placements.forget(prefix.keys)
        told = {number} if at_home is not None else set()
        count = remove_everywhere(self._driver, prefix, told, deadline)
        if refused is not None:
            raise refused
        return max(count, at_home or 0)

    @verb
    @in_one_piece
    def replicate(
        self, prefix: Prefix, to: Sequence[int], *, timeout_s: float = DEFAULT_TIMEOUT_S
    ) -> dict[int, int]:
        """Have the nodes `to` (numbers, see `nodes`) copy the resident blocks from their holders.
        Returns per node how many leading blocks of the prefix it has afterwards. Raises NoRoom if
        no node is known to have the first block, and the error of a node that could copy none."""
        holders = self._locate(prefix.keys)
        deadline = time.monotonic() + timeout_s
        return {
            target: replicate_to(self._driver, prefix, target, holders, deadline) for target in to
        }

    @verb
    @in_one_piece
    def prefetch(self, prefix: Prefix, *, timeout_s: float = DEFAULT_TIMEOUT_S) -> HomePrefetch:
        """Have the home node copy the leading blocks of `prefix` from the nodes that have them, and
        bring them from its NVMe into its DRAM. As `Client.prefetch`, but asks nobody before it
        returns, and goes on whether or not it is polled. Ends with the reason "no_home" if there
        is no node on this host. Ignores the admission policy: the caller knows what it wants."""
        state = PrefetchState(prefix, time.monotonic() + timeout_s)
        return self._prefetches.begin(state, self._check_open)

    @verb
    @in_one_piece
    def evacuate(self, node: int, *, timeout_s: float = 600.0) -> int:
        """Drain a node before it leaves: it takes no new blocks, and has other nodes copy the
        blocks that no other node has. Returns how many of its blocks other nodes have afterwards.
        The node serves its blocks until it stops; after a timeout, call again to go on."""
        deadline = time.monotonic() + timeout_s
        self._driver.ask(node, messages.Drain(0, True), min(DEFAULT_TIMEOUT_S, timeout_s))
        left_s = until_s(deadline)
        return int(self._driver.ask(node, messages.Evacuate(0, left_s), left_s).count)

    # -- the pool --------------------------------------------------------------------------------

    @verb
    @in_one_piece
    def nodes(self) -> dict[int, Any]:
        """The nodes of the pool by number, as `NodeRecord`s."""
        return dict(self._driver.nodes())

    @verb
    @in_one_piece
    def announce(self, space: KeySpace, *, timeout_s: float = DEFAULT_TIMEOUT_S) -> None:
        """See `Client.announce`: at the home node, without one at the node with the lowest number.
        Raises NodeUnavailable if there is none."""
        if self._home is not None:
            self._home.ask(None, local_verbs.announce, space, timeout_s)
            return
        numbers = self._driver.nodes()
        if not numbers:
            raise NodeUnavailable("the pool has no node")
        self._driver.ask(min(numbers), messages.Announce(0, space.encoded()), timeout_s)

    @verb
    @in_one_piece
    def statistics(self, *, timeout_s: float = DEFAULT_TIMEOUT_S) -> dict[str, Any]:
        """The statistics of each node that answers, by its name, this client's statistics of its
        links to the nodes, the name of the home node, and of the directory (None for a fixed list)
        with the `reason` why it shows no node that is registered."""
        names = names_of(self._driver.nodes())
        replies = self._ask_all(lambda: messages.Statistics(0), timeout_s)
        nodes = {names[n]: reply.numbers for n, reply in replies.items() if n in names}
        links = {
            names[number]: numbers
            for number, numbers in self._driver.links.statistics().items()
            if number in names
        }
        number = self._number_of_home
        if self._home is None or not isinstance(number, FixedHomeNumber):
            home = names.get(self.home_number or 0)
        else:
            own = self._home.ask(None, local_verbs.statistics, timeout_s)
            home = number.named(own, names, nodes)
        directory = self._driver.members.statistics()
        if directory is not None:
            directory["reason"] = unreadable(directory) or nobody(directory)
        return {"nodes": nodes, "links": links, "home": home, "directory": directory}

    @property
    def region(self) -> MappedRegion | None:
        """See `Client.region`."""
        self._check_open()
        return None if self._home is None else self._home.mapping.mapped

    def close(self) -> None:
        """Release every lease and reservation of this client, wait up to 5 s for replications in
        the background, and close the connections. Calls in flight raise ClientClosed or return
        what they have."""
        self._access = None
        if not self._inherited:
            uninterrupted(self._close)

    def _close(self) -> None:
        with self._closing:
            closed, self._closed = self._closed, True
            if not closed:
                self._close_once()

    def _close_once(self) -> None:
        self._orders.finish(DEFAULT_TIMEOUT_S)
        self._prefetches.halt()
        self._driver.close()
        self._orders.close()
        self._prefetches.close()
        if self._home is not None:
            self._home.close()

    # -- small -----------------------------------------------------------------------------------

    @property
    def _fixed(self) -> bool:
        return isinstance(self._driver.members, FixedMembers)

    def _locate(
        self, keys: Sequence[bytes], *, without_home: bool = False
    ) -> list[tuple[int, ...]]:
        """The nodes to ask for each key; none while the directory does not answer. `without_home`
        leaves out the home node: the caller has asked it before, and its answer is more up to date
        than the directory."""
        try:
            located = self._driver.locate(keys)
        except DirectoryUnavailable:
            return [()] * len(keys)
        home = self.home_number if without_home else None
        if home is None:
            return located
        return [tuple(n for n in nodes if n != home) if home in nodes else nodes
                for nodes in located]  # fmt: skip

    def _known_nodes(self) -> set[int]:
        try:
            return set(self._driver.nodes())
        except NodeUnavailable:
            if self._home is None:
                raise
            return set()

    def _ask_all(self, make: Callable[[], messages.Request], timeout_s: float) -> dict[int, Any]:
        """Send a request to all nodes: replies by node, of those that answer. Raises the first
        node's error if none answers and this client has no home node."""
        replies = self._driver.run(pool_verbs.ask_all(sorted(self._known_nodes()), make, timeout_s))
        failures = [reply for reply in replies.values() if isinstance(reply, TiffinError)]
        if failures and len(failures) == len(replies) and self._home is None:
            raise failures[0]
        return {n: reply for n, reply in replies.items() if not isinstance(reply, TiffinError)}

    def _count(
        self,
        prefix: Prefix,
        at_home: int | None,
        nodes: set[int],
        make: Callable[[], messages.Request],
        timeout_s: float,
    ) -> int:
        """Send a request to `nodes`: the largest count in their replies and `at_home`, the home
        node's. The home node is not asked again if it has answered, nor if it is silent, unless no
        other node has the blocks. Raises the first node's error if no node answers."""
        silent = self._home is not None and self._home.away
        home = self.home_number if at_home is not None or silent else None
        if silent and nodes == {home}:
            home = None
        asked = sorted(nodes - {home}) if len(prefix) else []
        replies = self._driver.run(pool_verbs.ask_all(asked, make, timeout_s))
        failures = [reply for reply in replies.values() if isinstance(reply, TiffinError)]
        if failures and len(failures) == len(asked) and at_home is None:
            raise failures[0]
        counts = [int(r.count) for r in replies.values() if isinstance(r, messages.Done)]
        return max(counts, default=0) if at_home is None else max([at_home, *counts])


class _HomeSlots(Slots):
    """Slots in the memory of the node on this host."""

    publish = in_one_piece(Slots.publish)
    commit = in_one_piece(Slots.commit)


def _leading(located: Sequence[Sequence[int]]) -> int:
    """How many leading blocks have at least one known holder."""
    return next((i for i, nodes in enumerate(located) if not nodes), len(located))
