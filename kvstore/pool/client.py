"""The client of a pool of many nodes: the verbs of `Client`, over the network.

Home is the node on this host, if there is one: its blocks are read where they lie, puts go there
first, and blocks read from elsewhere may leave a copy there. Without a home, blocks are read into
memory of this process.
"""

from __future__ import annotations

import random
import time
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from .. import verbs as local_verbs
from ..blocks import Block, Blocks, select, select_shard
from ..client import Client, LeasedBlocks, Slots, drive
from ..errors import (
    ClientClosed,
    DirectoryUnavailable,
    InvalidInput,
    NoRoom,
    TiffinError,
)
from ..node import messages
from ..node.records import Pin
from ..payloads import payload_views, target_views
from ..slices import source_views
from ..streaming import LayerStream, check_ahead
from ..verbs import DEFAULT_TIMEOUT_S, Hit, PutResult, check_verify
from . import verbs
from .engine import Engine, Reader
from .home import Home
from .homecopy import HomeCopies
from .members import FixedMembers, names_of
from .placing import Placing, check_replicas
from .replication import Orders, replicate_from, replicate_to
from .results import MixedBlocks, Wanted, joined, reason_of
from .shards import shard_node
from .staged import StagedSlots
from .store import Seals, store
from .streaming import Searching

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray

    from ..keys import Prefix
    from ..link import Link
    from ..schema import HeadRange, LayerRange, Shard
    from ..verbs import Verify

    Bytes = NDArray[np.uint8]


# In `Hit.where`: some other node of the pool has the block.
IN_PEER = 4


class PoolClient(Client):
    """What `Client.open("redis://...")` and `Client.open("tiffin://host:port")` return."""

    def __init__(
        self,
        engine: Engine,
        verify: Verify,
        *,
        home: Link | None = None,
        home_number: Callable[[], int | None] = lambda: None,
        admission: str = "second",
    ) -> None:
        """`home_number()` is what the directory calls home now: another number after a restart."""
        self._access = local_verbs.Access(check_verify(verify), random.Random())
        self._engine = engine
        self._home = Home(home, home_number, engine) if home is not None else None
        self._copies = HomeCopies(admission) if home is not None else None
        self._dice = random.Random()
        self._orders = Orders()

    # -- looking ---------------------------------------------------------------------------------

    def match(self, prefix: Prefix, *, timeout_s: float = DEFAULT_TIMEOUT_S) -> Hit:
        """How many leading blocks are resident: at home, for sure; elsewhere, as the directory has
        it, so that a get may find fewer."""
        self._check(timeout_s)
        deadline = time.monotonic() + timeout_s
        local_verbs.check_blocks(prefix)
        where = b""
        if self._home is not None:
            where = self._home.ask(local_verbs.match(prefix, timeout_s), Hit(0, 0)).where
        where += self._elsewhere(prefix, len(where), deadline)
        return Hit(len(where), len(where) * prefix.schema.block_tokens, where)

    def _elsewhere(self, prefix: Prefix, start: int, deadline: float) -> bytes:
        if start >= len(prefix):
            return b""
        if self._fixed:
            rest, left_s = prefix[start:], deadline - time.monotonic()
            hits = self._ask_all(lambda: messages.Match(0, rest.key_bytes), left_s)
            longest = max((reply.flags for reply in hits.values()), key=len, default=b"")
            return bytes(flag | IN_PEER for flag in longest)
        located = self._locate(prefix.keys[start:], without_home=True)
        return bytes([IN_PEER]) * _leading(located)

    def exists(self, prefix: Prefix, *, timeout_s: float = DEFAULT_TIMEOUT_S) -> list[bool]:
        """Which blocks are resident, each on its own; elsewhere as the directory has it."""
        self._check(timeout_s)
        local_verbs.check_blocks(prefix)
        deadline, found = time.monotonic() + timeout_s, [False] * len(prefix)
        if not len(prefix):
            return found
        if self._home is not None:
            found = self._home.ask(local_verbs.exists(prefix, timeout_s), found)
        if self._fixed:
            left_s = deadline - time.monotonic()
            replies = self._ask_all(lambda: messages.Exists(0, prefix.key_bytes), left_s)
            for reply in replies.values():
                found = [a or bool(b) for a, b in zip(found, reply.flags, strict=True)]
            return found
        located = self._locate(prefix.keys, without_home=True)
        return [a or bool(nodes) for a, nodes in zip(found, located, strict=True)]

    # -- reading ---------------------------------------------------------------------------------

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
        """The leading blocks of `prefix`, from home and from other nodes. As `Client.get`: views of
        what is (or comes to be) at home, copies of the rest; with `into`, copies of all."""
        self._check(timeout_s)
        local_verbs.check_blocks(prefix)
        wanted = Wanted(
            prefix,
            self._reading(verify),
            select(prefix.schema, layers, heads),
            (layers, heads),
            time.monotonic() + timeout_s,
            home_away=self._home is not None and self._home.away,
        )
        if into is not None:
            return self._copy(wanted, target_views(into, len(prefix), wanted.selection.nbytes))
        return self._view(wanted)

    def _copy(self, wanted: Wanted, targets: list[Bytes]) -> LeasedBlocks:
        prefix = wanted.prefix
        generations: list[int] = []
        why: str | None = None
        answered = False  # by home

        def from_home(home: Home) -> None:
            nonlocal answered, why
            done = len(generations)
            how = wanted.access, targets[done:], *wanted.part, wanted.left_s
            blocks = home.ask(local_verbs.get_into(prefix[done:], *how), None)
            if blocks is not None:
                generations.extend(block.generation for block in blocks)
                answered, why = True, blocks.reason

        if self._home is not None and len(prefix):
            from_home(self._home)
            if self._bring_home(wanted, len(generations)):
                from_home(self._home)
        count = len(generations)
        outcome = self._read(wanted, count, targets.__getitem__, answered)
        generations += [outcome.generations[i] for i in range(count, outcome.blocks)]

        def make(index: int) -> Block:
            target, key = targets[index], prefix.keys[index]
            return Block(target, wanted.selection, key, generations[index], packed=True)

        reason = reason_of(outcome, len(prefix), count, why)
        return LeasedBlocks(Blocks(prefix, outcome.blocks, reason, make), 0, None)

    def _view(self, wanted: Wanted) -> LeasedBlocks:
        prefix, selection = wanted.prefix, wanted.selection
        near = self._view_home(wanted)
        try:
            count = len(near) if near is not None else 0
            if self._bring_home(wanted, count):
                if near is not None:
                    near.release()
                near = self._view_home(wanted)
                count = len(near) if near is not None else 0
            if near is not None and near.complete:
                return near
            far: dict[int, Bytes] = {}

            def memory(index: int) -> Bytes:
                if index not in far:
                    far[index] = np.empty(selection.nbytes, np.uint8)
                return far[index]

            outcome = self._read(wanted, count, memory, near is not None)
        except BaseException:
            if near is not None and not near.released:
                near.release()
            raise
        why = near.reason if near is not None else None
        outcome.reason = reason_of(outcome, len(prefix), count, why)
        return MixedBlocks(prefix, near, far, outcome, selection)

    def _view_home(self, wanted: Wanted) -> LeasedBlocks | None:
        """What home has, leased; None if it does not answer."""
        if self._home is None:
            return None
        verb = local_verbs.get(wanted.prefix, wanted.access, *wanted.part, wanted.left_s)
        held = self._home.ask(verb, None)
        if held is None:
            return None
        blocks, lease = held
        return LeasedBlocks(blocks, lease, self._home)

    def _read(
        self, wanted: Wanted, start: int, memory: Callable[[int], Bytes], home_answered: bool
    ) -> verbs.Outcome:
        """Read from block `start` on. A home that has answered is not asked once more, by its port:
        it may wait for room that its own answer takes. Nor is one that is silent; but the call that
        found it so waits for it after all, by its port, for blocks that nobody else has."""
        prefix, home, context = wanted.prefix, self._home, self._engine.context
        reader = Reader(prefix, wanted.selection, wanted.access, memory)

        read = partial(self._engine.read, reader, wanted.deadline)
        if home is None or home_answered or not home.away:
            number = self._home_number if home_answered else None
            outcome = read(context, start, () if number is None else (number,))
        else:
            outcome = read(home.shunned(context), start)
            if outcome.reason == "lost" and not wanted.home_away and wanted.left_s:
                outcome = joined(outcome, read(context, outcome.blocks))
        if self._copies is not None:
            self._copies.saw(prefix, start, outcome.blocks)
        return outcome

    def _bring_home(self, wanted: Wanted, start: int) -> bool:
        """Read blocks from `start` on into slots at home, if they were wanted often enough, and
        commit them; whether there are any more at home then."""
        prefix, home = wanted.prefix, self._home
        if home is None or self._copies is None or home.lost:
            return False
        if not self._copies.wants(prefix, start):
            return False
        located = self._locate(prefix.keys[start:], without_home=True)
        part = prefix[start : start + _leading(located)]
        if not len(part):
            return False
        return self._copies.bring(part, home, self._engine, wanted.deadline) > 0

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
        """As `Client.stream`, from one node: number `node`, the writer's; without, whoever of home
        and the first block's holders has all blocks, or most. No directory knows reservations. If
        that node is lost, it goes on at another that has the same blocks committed."""
        course = self._course(prefix, heads, verify, timeout_s, ahead, node)
        return LayerStream(course, partial(drive, link=self._home))  # type: ignore[arg-type]

    def _course(
        self,
        prefix: Prefix,
        heads: HeadRange | None,
        verify: Verify | None,
        timeout_s: float,
        ahead: int,
        node: int | None,
    ) -> Searching:
        self._check(timeout_s)
        how = prefix, self._reading(verify), timeout_s, self._engine.peer
        number = (lambda: self._home_number) if self._home is not None else None
        first = partial(self._locate, without_home=True)
        return Searching(
            *how, number, node, lambda part: first(part.keys[:1])[0], heads, check_ahead(ahead)
        )

    # -- writing ---------------------------------------------------------------------------------

    def put(
        self,
        prefix: Prefix,
        payloads: Sequence[Any],
        *,
        shard: Shard | None = None,
        timeout_s: float = DEFAULT_TIMEOUT_S,
        replicas: int = 1,
        sync: bool = True,
        node: int | None = None,
    ) -> PutResult:
        """Copy one payload per block into the pool, at home if there is room and else where there
        is; blocks that are resident there are skipped.

        `replicas`: on so many nodes. With `sync` it returns when all have them; without, the other
        copies are made in the background and may fail silently.

        `shard`: see `Client.put`. All ranks have to write to one node: home, or without a home the
        one that `shard_node` computes for the prefix; ranks on several hosts name one as `node`.
        """
        self._check(timeout_s)
        deadline = time.monotonic() + timeout_s
        check_replicas(replicas)
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
            self._orders.add(partial(replicate_from, self._engine, prefix, number, more, without))
        return first

    def _placing(self, prefix: Prefix, views: list[Bytes], deadline: float) -> Placing:
        home = self._home
        put_home = partial(home.put, prefix, views) if home is not None else None
        seals = Seals(prefix, views)
        return Placing(self._engine, seals, deadline, put_home, self._home_number)

    def _put_another(self, placing: Placing, done: int, replicas: int) -> None:
        """One more replica, on another node. Raises NoRoom."""
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
        shard: Shard | None,
        deadline: float,
    ) -> PutResult:
        """Store at this node, or nowhere: other ranks do not know where else. None is home."""
        if node is None:
            if self._home is None:
                raise ClientClosed("this client has no home node")
            left_s = max(0.0, deadline - time.monotonic())
            return self._home.put(prefix, payloads, left_s, shard, patient=True)
        selection = select_shard(prefix.schema, shard)
        views = source_views(selection, payloads, len(prefix))
        seals, peer = Seals(prefix, views, selection), self._engine.peer(node)
        return self._engine.noted(node, prefix, store(peer, seals, 0, deadline=deadline))

    def _node_for(self, prefix: Prefix, node: int | None) -> int | None:
        """The number of the node to write to; None for home. Raises NoRoom."""
        if node is not None:
            return None if node == self._home_number else node
        if self._home is not None:
            return None
        return shard_node(self._engine.nodes(), prefix)

    def reserve(
        self,
        prefix: Prefix,
        *,
        shard: Shard | None = None,
        timeout_s: float = DEFAULT_TIMEOUT_S,
        node: int | None = None,
    ) -> Slots:
        """Slots for the blocks that are not resident: at home in place; without a home, or with a
        `node`, in memory of this process, sent when they are published or committed. `shard` as in
        `put`. `slots.node` is the number of the node that has them, for who streams them. Resident
        is what that node has, and where none is named what any has. Raises NodeUnavailable or
        DeadlineExceeded when that node is silent and no other one may take them."""
        self._check(timeout_s)
        deadline = time.monotonic() + timeout_s
        shard = prefix.schema.check_shard(shard)
        bound = shard is not None or node is not None  # to one node: others do not know where else
        if bound:
            node = self._node_for(prefix, node)
        if self._home is not None and node is None:
            verb = local_verbs.reserve(prefix, timeout_s, shard)
            reserved = self._home.reserve(verb, patient=bound)
            if reserved is not None:
                slots = Slots(prefix, reserved, self._home.patient)
                slots.node = self._home_number
                return slots
        return StagedSlots(prefix, self, timeout_s, deadline, shard, node)

    # -- wishes ----------------------------------------------------------------------------------

    def pin(
        self,
        prefix: Prefix,
        *,
        ttl_s: float | None = None,
        hard: bool = False,
        timeout_s: float = DEFAULT_TIMEOUT_S,
    ) -> int:
        """Keep the resident blocks, on every node that has them. Returns how many were resident on
        the node that had most."""
        level = Pin.HARD if hard else Pin.SOFT
        return self._pin(prefix, level, ttl_s, timeout_s)

    def unpin(self, prefix: Prefix, *, timeout_s: float = DEFAULT_TIMEOUT_S) -> int:
        """Take pins back, everywhere."""
        return self._pin(prefix, Pin.NONE, None, timeout_s)

    def _pin(self, prefix: Prefix, level: int, ttl_s: float | None, timeout_s: float) -> int:
        self._check(timeout_s)
        local_verbs.check_blocks(prefix)
        until_s, deadline = local_verbs.check_ttl(ttl_s), time.monotonic() + timeout_s
        at_home: int | None = None
        if self._home is not None:
            at_home = self._home.ask(local_verbs.pin(prefix, level, ttl_s, timeout_s), None)
        holders = {node for nodes in self._locate(prefix.keys) for node in nodes}
        return self._count(
            prefix,
            at_home,
            holders,
            lambda: messages.Pin(0, prefix.key_bytes, level, until_s),
            deadline - time.monotonic(),
        )

    def remove(self, prefix: Prefix, *, timeout_s: float = DEFAULT_TIMEOUT_S) -> int:
        """Forget the resident blocks on every node that has them: all nodes are told, whatever the
        directory says. Returns how many the node had that had most. Raises NodeUnavailable,
        DeadlineExceeded if a node could not be told: it may still have them."""
        self._check(timeout_s)
        local_verbs.check_blocks(prefix)
        deadline = time.monotonic() + timeout_s
        at_home: int | None = None
        if self._home is not None:
            at_home = self._home.ask(local_verbs.remove(prefix, timeout_s), None)
        self._engine.placements.forget(prefix.keys)
        return self._count(
            prefix,
            at_home,
            self._known_nodes(),
            lambda: messages.Remove(0, prefix.key_bytes),
            deadline - time.monotonic(),
            strict=True,
        )

    def replicate(
        self, prefix: Prefix, to: Sequence[int], *, timeout_s: float = DEFAULT_TIMEOUT_S
    ) -> dict[int, int]:
        """Have the nodes `to` (numbers, see `nodes`) copy the resident blocks from who has them.
        Returns how many leading blocks of the prefix each holds then. Raises NoRoom if nobody is
        known to have the first one, and what a node met that could copy none."""
        self._check(timeout_s)
        local_verbs.check_blocks(prefix)
        holders = self._locate(prefix.keys)
        deadline = time.monotonic() + timeout_s
        return {
            target: replicate_to(self._engine, prefix, target, holders, deadline) for target in to
        }

    def evacuate(self, node: int, *, timeout_s: float = 600.0) -> int:
        """Drain a node before it leaves: it takes nothing new, and hands over what no other node
        has. Returns how many of its blocks others have then. It serves what it has until it stops;
        call again to go on where time ran out."""
        self._check(timeout_s)
        self._engine.ask(node, messages.Drain(0, True), DEFAULT_TIMEOUT_S)
        return int(self._engine.ask(node, messages.Evacuate(0, timeout_s), timeout_s).count)

    # -- the pool --------------------------------------------------------------------------------

    def nodes(self) -> dict[int, Any]:
        """The nodes of the pool by number, as `NodeRecord`s."""
        return dict(self._engine.nodes())

    def statistics(self, *, timeout_s: float = DEFAULT_TIMEOUT_S) -> dict[str, Any]:
        """Every node's numbers by name, and what this client knows of its ways to them."""
        self._check(timeout_s)
        names = names_of(self._engine.nodes())
        replies = self._ask_all(lambda: messages.Statistics(0), timeout_s)
        nodes = {names[n]: reply.numbers for n, reply in replies.items() if n in names}
        links = {
            names[number]: numbers
            for number, numbers in self._engine.links.statistics().items()
            if number in names
        }
        home = self._home_number
        return {"nodes": nodes, "links": links, "home": names.get(home) if home else None}

    def close(self) -> None:
        """Release everything this client holds, finish replications that were ordered (for up to
        5 s), hang up. Calls that are under way raise ClientClosed or come back with what they have.
        """
        if self._access is None:
            return
        self._access = None
        self._orders.finish(DEFAULT_TIMEOUT_S)
        self._engine.close()
        self._orders.close()
        if self._home is not None:
            self._home.close()

    # -- small -----------------------------------------------------------------------------------

    @property
    def _home_number(self) -> int | None:
        return self._home.number if self._home is not None else None

    @property
    def _fixed(self) -> bool:
        return isinstance(self._engine.members, FixedMembers)

    def _locate(
        self, keys: Sequence[bytes], *, without_home: bool = False
    ) -> list[tuple[int, ...]]:
        """Whom to ask for each key; nobody while the directory does not answer. Home itself was
        asked before, and knows better than the directory."""
        try:
            located = self._engine.locate(keys)
        except DirectoryUnavailable:
            return [()] * len(keys)
        home = self._home_number if without_home else None
        if home is None:
            return located
        return [tuple(n for n in nodes if n != home) if home in nodes else nodes
                for nodes in located]  # fmt: skip

    def _known_nodes(self) -> set[int]:
        try:
            return set(self._engine.nodes())
        except DirectoryUnavailable:
            if self._home is None:
                raise
            return set()

    def _ask_all(self, make: Callable[[], messages.Request], timeout_s: float) -> dict[int, Any]:
        """Replies by node, of those that answer. Raises what the first met if none does."""
        replies = self._engine.run(verbs.ask_all(sorted(self._known_nodes()), make, timeout_s))
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
        *,
        strict: bool = False,
    ) -> int:
        """The largest count of these nodes and home, which is not asked again if it has answered
        nor, unless it is `strict` or has them alone, if it is silent. Raises what the first met if
        none answers or, if `strict`, if one does not."""
        silent = self._home is not None and self._home.away and not strict
        home = self._home_number if at_home is not None or silent else None
        if silent and nodes == {home}:
            home = None
        asked = sorted(nodes - {home}) if len(prefix) else []
        replies = self._engine.run(verbs.ask_all(asked, make, timeout_s))
        failures = [reply for reply in replies.values() if isinstance(reply, TiffinError)]
        if failures and (strict or (len(failures) == len(asked) and at_home is None)):
            raise failures[0]
        counts = [int(r.count) for r in replies.values() if isinstance(r, messages.Done)]
        return max(counts, default=0) if at_home is None else max([at_home, *counts])


def _leading(located: Sequence[Sequence[int]]) -> int:
    """How many leading blocks somebody is said to have."""
    return next((i for i, nodes in enumerate(located) if not nodes), len(located))
