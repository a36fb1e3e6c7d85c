"""The nodes of a pool, over shared memory and the network: carries out the verbs of `Client`.

The home node is the node on this host, if there is one: its blocks are read in place, puts go there
first, and blocks read from other nodes may be copied into it. Without a home node, blocks are read
into memory of this process.
"""

from __future__ import annotations

import threading
import time
from functools import partial
from typing import TYPE_CHECKING, Any

from tiffin.messenger.signal_safe import uninterrupted

from ...deadlines import until_s
from ...directory.base import nobody, unreadable
from ...errors import (
    ClientClosed,
    DirectoryUnavailable,
    InvalidInput,
    NodeUnavailable,
    NoRoom,
    TierUnavailable,
    TiffinError,
)
from ...node.core import messages
from ..blocks.block_views import select_shard
from ..blocks.payload_buffers import payload_views
from ..blocks.selection_copy import source_views
from ..verbs import block_verbs as local_verbs
from ..verbs.arguments import check_ttl
from ..verbs.block_verbs import DEFAULT_TIMEOUT_S, Hit, PutResult
from ..verbs.leased_blocks import LeasedBlocks
from ..verbs.slots import Slots
from . import pool_verbs
from .failover_source import FailoverSource
from .home.home import Home
from .home.home_prefetch import HomePrefetch, HomePrefetches
from .members import FixedHomeNumber, FixedMembers, names_of
from .pool_verbs import HOME
from .put_placement import ROOM_WAIT_S, PutPlacement
from .read_results import MixedBlocks, OwnMemory, Reader, copied_blocks, release_all
from .remote.block_write import BlockSeals
from .removal import remove_everywhere
from .replica_choice import shard_node
from .replication.replication_requests import Orders, replicate_from, replicate_to
from .signal_safe_verbs import given_up_together, in_one_piece
from .staged_write import StagedSlots

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import numpy as np
    from numpy.typing import NDArray

    from ...directory.base import NodeRecord
    from ...format.key_space import KeySpace
    from ...format.keys import Prefix
    from ...format.schema import AnyShard, HeadRange
    from ..blocks.block_views import Selection
    from ..connection.node_link import NodeLink
    from ..streaming.layer_source import LayerSource
    from ..verbs.block_verbs import Access
    from ..verbs.prefetching import PrefetchState
    from .verb_driver import VerbDriver

    Bytes = NDArray[np.uint8]


# In `Hit.where`: another node of the pool has the block.
IN_PEER = 4
_NO_HIT = Hit(0, 0)


class ManyNodes:
    """The verbs of `Client` at a pool of nodes. Thread-safe."""

    def __init__(
        self,
        driver: VerbDriver,
        *,
        home: NodeLink | None = None,
        home_number: Callable[[], int | None] = lambda: None,
        admission: str = "second",
    ) -> None:
        """`home_number()` is the home node's number in the directory; a restart changes it."""
        self.driver = driver
        self.near = Home(home, home_number, driver, admission) if home is not None else None
        self._number_of_home = home_number
        self._orders = Orders()
        self._prefetches = HomePrefetches(self.near, driver)
        self._closing = threading.Lock()
        self._closed = False

    @property
    def home_number(self) -> int | None:
        """The home node's number in the directory, which a restart changes; None without one."""
        return self.near.number if self.near is not None else None

    # -- looking ---------------------------------------------------------------------------------

    @in_one_piece
    def match(
        self, prefix: Prefix, timeout_s: float, *, writing: bool, at_least: int, node: int | None
    ) -> Hit:
        """See `Client.match`."""
        deadline = time.monotonic() + timeout_s
        where = b""
        if self.near is not None:
            here = self.near.ask(_NO_HIT, local_verbs.match, prefix, timeout_s, writing=writing)
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
        if self.near is not None and (node is None or node == self.home_number):
            how = {"writing": writing, "at_least": at_least}
            return self.near.ask(_NO_HIT, local_verbs.match, prefix, left_s, **how).where
        if node is None:
            nodes = self._known_nodes() if self._fixed else {}
            if len(nodes) != 1:
                raise InvalidInput("at_least waits at one node: name the writer's as node=")
            (node,) = nodes
        request = messages.Match(0, prefix.key_bytes, writing, at_least, left_s)
        reply = self.driver.ask(node, request, left_s)
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
        located = self.locate(prefix.keys[start:], without_home=True)
        return bytes([IN_PEER]) * len(pool_verbs.leading(located, None))

    @in_one_piece
    def exists(self, prefix: Prefix, timeout_s: float) -> list[bool]:
        """See `Client.exists`."""
        deadline, found = time.monotonic() + timeout_s, [False] * len(prefix)
        if not len(prefix):
            return found
        if self.near is not None:
            found = self.near.ask(found, local_verbs.exists, prefix, timeout_s)
        if self._fixed:
            left_s = deadline - time.monotonic()
            replies = self._ask_all(lambda: messages.Exists(0, prefix.key_bytes), left_s)
            for reply in replies.values():
                found = [a or bool(b) for a, b in zip(found, reply.flags, strict=True)]
            return found
        located = self.locate(prefix.keys, without_home=True)
        return [a or bool(nodes) for a, nodes in zip(found, located, strict=True)]

    # -- reading ---------------------------------------------------------------------------------

    @in_one_piece
    def get(
        self,
        prefix: Prefix,
        access: Access,
        selection: Selection,
        targets: Sequence[Bytes] | None,
        timeout_s: float,
    ) -> LeasedBlocks:
        """See `Client.get`: views of the blocks that are at home or that this call copies there,
        copies of the rest; with `targets`, copies of all."""
        deadline = time.monotonic() + timeout_s
        if targets is not None:
            reader = Reader(prefix, access, selection, targets.__getitem__, self.near)
            return copied_blocks(reader, self.driver.get(reader, deadline))
        own, leases = OwnMemory(selection.nbytes), list[LeasedBlocks]()
        reader = Reader(prefix, access, selection, own.__getitem__, self.near, leases)
        try:
            outcome = self.driver.get(reader, deadline)
        except BaseException:
            release_all(leases)
            raise
        if len(leases) == 1 and leases[0].complete:
            return leases[0]
        return MixedBlocks(reader, own, outcome)

    def layer_source(
        self,
        prefix: Prefix,
        access: Access,
        timeout_s: float,
        heads: HeadRange | None,
        ahead: int,
        node: int | None,
    ) -> FailoverSource:
        """Where `Client.stream` gets its layers."""
        how = prefix, access, timeout_s, self.driver.peer
        first = partial(self.locate, without_home=True)
        return FailoverSource(
            *how, self.near, node, lambda part: first(part.keys[:1])[0], heads, ahead
        )

    # -- writing ---------------------------------------------------------------------------------

    @in_one_piece
    def put(
        self,
        prefix: Prefix,
        payloads: Sequence[Any],
        shard: AnyShard | None,
        timeout_s: float,
        *,
        replicas: int = 1,
        sync: bool = True,
        node: int | None = None,
    ) -> PutResult:
        """See `Client.put`."""
        deadline = time.monotonic() + timeout_s
        if prefix.schema.check_shard(shard) is not None or node is not None:
            if replicas != 1:
                raise InvalidInput("slices, and blocks for one node, are put once: use replicate()")
            return self._put_at(self._node_for(prefix, node), prefix, payloads, shard, deadline)
        views = payload_views(prefix.schema, payloads, len(prefix))
        if not len(prefix):
            return PutResult((), (), (), (), None)
        placing = PutPlacement(self.driver, BlockSeals(prefix, views), deadline, self.near)
        first, number = placing.one()
        if sync:
            for done in range(1, replicas):
                self._put_another(placing, done, replicas)
        elif replicas > 1 and number is not None:
            more, without = replicas - 1, placing.done_with
            self._orders.add(partial(replicate_from, self.driver, prefix, number, more, without))
        return first

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
        if node is None and self.near is None:
            raise ClientClosed("this client has no home node")
        selection = select_shard(prefix.schema, shard)
        seals = BlockSeals(prefix, source_views(selection, payloads, len(prefix)), selection)
        room_s = until_s(deadline)
        replica = self.driver.node(HOME if node is None else node, self.near)
        return replica.put(seals, room_s, deadline, patient=True)

    def _node_for(self, prefix: Prefix, node: int | None) -> int | None:
        """The number of the node to write to; None for the home node. Raises NoRoom."""
        if node is not None:
            return None if node == self.home_number else node
        if self.near is not None:
            return None
        return shard_node(self.driver.nodes(), prefix)

    @in_one_piece
    def reserve(
        self, prefix: Prefix, shard: AnyShard | None, timeout_s: float, node: int | None
    ) -> Slots:
        """See `Client.reserve`."""
        deadline = time.monotonic() + timeout_s
        shard = prefix.schema.check_shard(shard)
        # To one node: other ranks and readers would not find the slots elsewhere.
        bound = shard is not None or node is not None
        if bound:
            node = self._node_for(prefix, node)
        if self.near is not None and node is None:
            reserved = self.near.reserve(prefix, ROOM_WAIT_S, timeout_s, shard, patient=bound)
            if reserved is not None:
                slots = _HomeSlots(prefix, reserved, self.near.patient)
                slots.node = self.home_number
                return slots
        return StagedSlots(prefix, self, timeout_s, deadline, shard, node)

    # -- wishes ----------------------------------------------------------------------------------

    @in_one_piece
    def pin(self, prefix: Prefix, level: int, ttl_s: float | None, timeout_s: float) -> int:
        """See `Client.pin`."""
        until_s, deadline = check_ttl(ttl_s), time.monotonic() + timeout_s
        at_home: int | None = None
        if self.near is not None:
            at_home = self.near.ask(None, local_verbs.pin, prefix, level, ttl_s, timeout_s)
        holders = {node for nodes in self.locate(prefix.keys) for node in nodes}
        return self._count(
            prefix,
            at_home,
            holders,
            lambda: messages.Pin(0, prefix.key_bytes, level, until_s),
            deadline - time.monotonic(),
        )

    @in_one_piece
    def remove(self, prefix: Prefix, timeout_s: float) -> int:
        """See `Client.remove`."""
        deadline = time.monotonic() + timeout_s
        at_home: int | None = None
        refused: TierUnavailable | None = None
        number = self.home_number  # asked for before: a home that restarts meanwhile has another
        if self.near is not None:
            try:
                at_home = self.near.ask(None, local_verbs.remove, prefix, timeout_s)
            except TierUnavailable as error:  # the other nodes still have to remove theirs
                at_home, refused = 0, error
        self.driver.placements.forget(prefix.keys)
        told = {number} if at_home is not None else set()
        count = remove_everywhere(self.driver, prefix, told, deadline)
        if refused is not None:
            raise refused
        return max(count, at_home or 0)

    @in_one_piece
    def replicate(self, prefix: Prefix, to: Sequence[int], timeout_s: float) -> dict[int, int]:
        """See `Client.replicate`."""
        holders = self.locate(prefix.keys)
        deadline = time.monotonic() + timeout_s
        return {
            target: replicate_to(self.driver, prefix, target, holders, deadline) for target in to
        }

    @in_one_piece
    def prefetch(self, state: PrefetchState, check_open: Callable[[], None]) -> HomePrefetch:
        """See `Client.prefetch`. Asks nobody before it returns."""
        return self._prefetches.begin(state, check_open)

    @in_one_piece
    def evacuate(self, node: int, timeout_s: float) -> int:
        """See `Client.evacuate`."""
        deadline = time.monotonic() + timeout_s
        self.driver.ask(node, messages.Drain(0, True), min(DEFAULT_TIMEOUT_S, timeout_s))
        left_s = until_s(deadline)
        return int(self.driver.ask(node, messages.Evacuate(0, left_s), left_s).count)

    # -- the pool --------------------------------------------------------------------------------

    @in_one_piece
    def records(self) -> dict[int, NodeRecord]:
        """See `Client.nodes`."""
        return dict(self.driver.nodes())

    @in_one_piece
    def announce(self, space: KeySpace, timeout_s: float) -> None:
        """See `Client.announce`."""
        if self.near is not None:
            self.near.ask(None, local_verbs.announce, space, timeout_s)
            return
        numbers = self.driver.nodes()
        if not numbers:
            raise NodeUnavailable("the pool has no node")
        self.driver.ask(min(numbers), messages.Announce(0, space.encoded()), timeout_s)

    @in_one_piece
    def statistics(self, timeout_s: float) -> dict[str, Any]:
        """See `Client.statistics`."""
        names = names_of(self.driver.nodes())
        replies = self._ask_all(lambda: messages.Statistics(0), timeout_s)
        nodes = {names[n]: reply.numbers for n, reply in replies.items() if n in names}
        links = {
            names[number]: numbers
            for number, numbers in self.driver.links.statistics().items()
            if number in names
        }
        number = self._number_of_home
        if self.near is None or not isinstance(number, FixedHomeNumber):
            home = names.get(self.home_number or 0)
        else:
            own = self.near.ask(None, local_verbs.statistics, timeout_s)
            home = number.named(own, names, nodes)
        directory = self.driver.members.statistics()
        if directory is not None:
            directory["reason"] = unreadable(directory) or nobody(directory)
        return {"nodes": nodes, "links": links, "home": home, "directory": directory}

    def close(self) -> None:
        """See `Client.close`."""
        uninterrupted(self._close)

    def _close(self) -> None:
        with self._closing:
            closed, self._closed = self._closed, True
            if not closed:
                self._close_once()

    def _close_once(self) -> None:
        self._orders.finish(DEFAULT_TIMEOUT_S)
        self._prefetches.halt()
        self.driver.close()
        self._orders.close()
        self._prefetches.close()
        if self.near is not None:
            self.near.close()

    # -- small -----------------------------------------------------------------------------------

    @property
    def _fixed(self) -> bool:
        return isinstance(self.driver.members, FixedMembers)

    def locate(self, keys: Sequence[bytes], *, without_home: bool = False) -> list[tuple[int, ...]]:
        """The nodes to ask for each key; none while the directory does not answer. `without_home`
        leaves out the home node: the caller has asked it before, and its answer is more up to date
        than the directory."""
        try:
            located = self.driver.locate(keys)
        except DirectoryUnavailable:
            return [()] * len(keys)
        home = self.home_number if without_home else None
        if home is None:
            return located
        return [tuple(n for n in nodes if n != home) if home in nodes else nodes
                for nodes in located]  # fmt: skip

    def _known_nodes(self) -> set[int]:
        try:
            return set(self.driver.nodes())
        except NodeUnavailable:
            if self.near is None:
                raise
            return set()

    def _ask_all(self, make: Callable[[], messages.Request], timeout_s: float) -> dict[int, Any]:
        """Send a request to all nodes: replies by node, of those that answer. Raises the first
        node's error if none answers and this client has no home node."""
        replies = self.driver.run(pool_verbs.ask_all(sorted(self._known_nodes()), make, timeout_s))
        failures = [reply for reply in replies.values() if isinstance(reply, TiffinError)]
        if failures and len(failures) == len(replies) and self.near is None:
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
        silent = self.near is not None and self.near.away
        home = self.home_number if at_home is not None or silent else None
        if silent and nodes == {home}:
            home = None
        asked = sorted(nodes - {home}) if len(prefix) else []
        replies = self.driver.run(pool_verbs.ask_all(asked, make, timeout_s))
        failures = [reply for reply in replies.values() if isinstance(reply, TiffinError)]
        if failures and len(failures) == len(asked) and at_home is None:
            raise failures[0]
        counts = [int(r.count) for r in replies.values() if isinstance(r, messages.Done)]
        return max(counts, default=0) if at_home is None else max([at_home, *counts])


class _HomeSlots(Slots):
    """Slots in the memory of the node on this host."""

    publish = in_one_piece(Slots.publish)
    commit = in_one_piece(Slots.commit)


def carry_out(source: LayerSource, step: Callable[[], Any]) -> Any:
    """Carry out a step of a stream; an interrupt ends it."""

    def break_off() -> None:
        source.interrupt()
        source.give_up()

    return given_up_together(step, break_off)
