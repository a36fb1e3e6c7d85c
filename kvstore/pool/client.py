"""The client of a pool of many nodes: the verbs of `Client`, over the network.

Home is the node on this host, if there is one: its blocks are read where they lie, puts go there
first, and blocks read from elsewhere may leave a copy there. Without a home, blocks are read into
memory of this process.
"""

from __future__ import annotations

import logging
import random
import time
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from .. import verbs as local_verbs
from ..blocks import Block, Blocks, Slot, select
from ..client import Client, LeasedBlocks, Slots, drive
from ..errors import (
    ClientClosed,
    DeadlineExceeded,
    DirectoryUnavailable,
    NoRoom,
    TiffinError,
)
from ..node import messages
from ..node.records import Pin
from ..payloads import payload_views, target_views
from ..verbs import DEFAULT_TIMEOUT_S, FOREVER_S, Hit, PutResult, Reserved, check_verify
from . import verbs
from .engine import Engine, Reader
from .homecopy import HomeCopies
from .plan import place
from .store import Seals, Stored, store

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray

    from ..blocks import Selection
    from ..keys import Prefix
    from ..link import Link
    from ..schema import HeadRange, LayerRange
    from ..verbs import Access, Verify

    Bytes = NDArray[np.uint8]

log = logging.getLogger(__name__)

# In `Hit.where`: some other node of the pool has the block.
IN_PEER = 4
# Replications that were ordered and not waited for.
_ORDERS_MAX = 64


class PoolClient(Client):
    """What `Client.open("redis://...")` and `Client.open("tiffin://host:port")` return."""

    def __init__(
        self,
        engine: Engine,
        verify: Verify,
        *,
        home: Link | None = None,
        home_number: int | None = None,
        admission: str = "second",
    ) -> None:
        self._access = local_verbs.Access(check_verify(verify), random.Random())
        self._engine = engine
        self._home = home
        self._home_number = home_number
        self._copies = HomeCopies(admission) if home is not None else None
        self._dice = random.Random()
        self._orders = ThreadPoolExecutor(1, thread_name_prefix="tiffin-replicate")
        self._ordered: list[Future[None]] = []

    # -- looking ---------------------------------------------------------------------------------

    def match(self, prefix: Prefix, *, timeout_s: float = DEFAULT_TIMEOUT_S) -> Hit:
        """How many leading blocks are resident: at home, for sure; elsewhere, as the directory has
        it, so that a get may find fewer."""
        self._check(timeout_s)
        where = b""
        if self._home is not None:
            where = self._at_home(local_verbs.match(prefix, timeout_s), Hit(0, 0)).where
        where += self._elsewhere(prefix, len(where), timeout_s)
        return Hit(len(where), len(where) * prefix.schema.block_tokens, where)

    def _elsewhere(self, prefix: Prefix, start: int, timeout_s: float) -> bytes:
        if start >= len(prefix):
            return b""
        if self._fixed:
            hits = self._ask_all(lambda: messages.Match(0, prefix[start:].key_bytes), timeout_s)
            longest = max((len(reply.flags) for reply in hits.values()), default=0)
            return bytes([IN_PEER]) * longest
        count = 0
        for nodes in self._locate(prefix.keys[start:]):
            if not nodes:
                break
            count += 1
        return bytes([IN_PEER]) * count

    def exists(self, prefix: Prefix, *, timeout_s: float = DEFAULT_TIMEOUT_S) -> list[bool]:
        """Which blocks are resident, each on its own; elsewhere as the directory has it."""
        self._check(timeout_s)
        found = [False] * len(prefix)
        if not len(prefix):
            return found
        if self._home is not None:
            found = self._at_home(local_verbs.exists(prefix, timeout_s), found)
        if self._fixed:
            replies = self._ask_all(lambda: messages.Exists(0, prefix.key_bytes), timeout_s)
            for reply in replies.values():
                found = [a or bool(b) for a, b in zip(found, reply.flags, strict=True)]
            return found
        located = self._locate(prefix.keys)
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
        access = self._reading(verify)
        selection = select(prefix.schema, layers, heads)
        deadline = time.monotonic() + timeout_s
        if into is None:
            return self._view(prefix, access, selection, layers, heads, deadline)
        targets = target_views(into, len(prefix), selection.nbytes)
        generations, count = [], 0
        if self._home is not None and len(prefix):
            copied = local_verbs.get_into(prefix, access, targets, layers, heads, timeout_s)
            blocks = self._at_home(copied, None)
            if blocks is not None:
                generations = [blocks[i].generation for i in range(len(blocks))]
                count = len(blocks)
        outcome = self._read(prefix, count, access, selection, targets.__getitem__, deadline)
        generations += [outcome.generations[i] for i in range(count, outcome.blocks)]

        def make(index: int) -> Block:
            key = prefix.keys[index]
            return Block(targets[index], selection, key, generations[index], packed=True)

        reason = None if outcome.blocks == len(prefix) else outcome.reason
        return LeasedBlocks(Blocks(prefix, outcome.blocks, reason, make), 0, None)

    def _view(
        self,
        prefix: Prefix,
        access: Access,
        selection: Selection,
        layers: LayerRange | None,
        heads: HeadRange | None,
        deadline: float,
    ) -> LeasedBlocks:
        left_s = deadline - time.monotonic()
        near: LeasedBlocks | None = None
        if self._home is not None:
            found = local_verbs.get(prefix, access, layers, heads, left_s)
            held = self._at_home(found, None)
            if held is not None:
                blocks, lease = held
                near = LeasedBlocks(blocks, lease, self._home)
                if near.complete:
                    return near
        count = len(near) if near is not None else 0
        if self._copies is not None and self._copies.wants(prefix, count):
            brought = self._bring_home(prefix, count, deadline)
            if brought > count:
                if near is not None:
                    near.release()
                left_s = max(0.0, deadline - time.monotonic())
                found = local_verbs.get(prefix, access, layers, heads, left_s)
                blocks, lease = drive(found, self._link_home())
                return LeasedBlocks(blocks, lease, self._home)
        far: dict[int, Bytes] = {}

        def memory(index: int) -> Bytes:
            if index not in far:
                far[index] = np.empty(selection.nbytes, np.uint8)
            return far[index]

        try:
            outcome = self._read(prefix, count, access, selection, memory, deadline)
        except BaseException:
            if near is not None:
                near.release()
            raise
        return _MixedBlocks(prefix, near, far, outcome, selection)

    def _read(
        self,
        prefix: Prefix,
        start: int,
        access: Access,
        selection: Selection,
        memory: Callable[[int], Bytes],
        deadline: float,
    ) -> verbs.Outcome:
        reader = Reader(prefix, selection, access, memory)
        verb = verbs.read(prefix, start, deadline, self._engine.context)
        outcome = self._engine.run(verb, reader)
        if self._copies is not None:
            self._copies.saw(prefix, start, outcome.blocks)
        return outcome

    def _bring_home(self, prefix: Prefix, start: int, deadline: float) -> int:
        """Read blocks from `start` on into slots at home and commit them; how many leading blocks
        are at home then."""
        assert self._copies is not None
        located = self._locate(prefix.keys[start:])
        held = next((i for i, nodes in enumerate(located) if not nodes), len(located))
        part = prefix[start : start + held]
        if not len(part):
            return start
        return start + self._copies.bring(
            part, self._link_home(), self._engine, deadline - time.monotonic()
        )

    # -- writing ---------------------------------------------------------------------------------

    def put(
        self,
        prefix: Prefix,
        payloads: Sequence[Any],
        *,
        timeout_s: float = DEFAULT_TIMEOUT_S,
        replicas: int = 1,
        sync: bool = True,
    ) -> PutResult:
        """Copy one payload per block into the pool, at home if there is room and else where there
        is; blocks that are resident there are skipped.

        `replicas`: on so many nodes. With `sync` it returns when all have them; without, the other
        copies are made in the background and may fail silently.
        """
        self._check(timeout_s)
        deadline = time.monotonic() + timeout_s
        views = payload_views(prefix.schema, payloads, len(prefix))
        if not len(prefix):
            return PutResult((), (), (), (), None)
        seals = Seals(prefix, views)
        tried: set[int] = set()
        first, number = self._put_first(prefix, views, seals, tried, deadline)
        done = 1
        while done < replicas and sync:
            other = self._put_remote(prefix, seals, tried, deadline)
            if other is None:
                raise NoRoom(f"only {done} of {replicas} replicas could be written")
            done += 1
        if replicas > 1 and not sync and number is not None:
            self._order(partial(self._replicate_from, prefix, number, replicas - 1, tried))
        return first

    def _put_first(
        self,
        prefix: Prefix,
        views: list[Bytes],
        seals: Seals,
        tried: set[int],
        deadline: float,
    ) -> tuple[PutResult, int | None]:
        if self._home is not None:
            left_s = max(0.0, deadline - time.monotonic())
            region_bytes = self._home.memory.nbytes
            verb = local_verbs.put(prefix, views, region_bytes, left_s)
            try:
                result = self._at_home(verb, None)
            except NoRoom:  # or draining
                result = None
            if self._home_number is not None:
                tried.add(self._home_number)
            if result is not None and result.reason != "no_room":
                return result, self._home_number
        found = self._put_remote(prefix, seals, tried, deadline)
        if found is None:
            if self._home is not None and result is not None:
                return result, self._home_number
            raise NoRoom("no node of the pool takes these blocks; look at `tiffin status`")
        return found

    def _put_remote(
        self, prefix: Prefix, seals: Seals, tried: set[int], deadline: float
    ) -> tuple[PutResult, int] | None:
        """Store at the best node that was not tried; the next best if it fails."""
        while True:
            nodes = self._engine.members.nodes()
            size = len(prefix) * prefix.schema.extent_bytes
            chosen = place(nodes, 1, size, self._dice, without=tried)
            if not chosen or time.monotonic() >= deadline:
                return None
            tried.add(chosen[0])
            try:
                stored = store(self._engine.peer(chosen[0]), seals, 0, deadline=deadline)
            except TiffinError as error:
                log.info("not put to node %d: %s", chosen[0], error)
                self._engine.links.failed(chosen[0], time.monotonic())
                continue
            if stored.reason is None or stored.decided:
                return _result(stored), chosen[0]

    def reserve(self, prefix: Prefix, *, timeout_s: float = DEFAULT_TIMEOUT_S) -> Slots:
        """Slots for the blocks that are not resident: at home in place; without a home, in memory
        of this process, sent when they are committed."""
        self._check(timeout_s)
        if self._home is not None:
            return Slots(
                prefix, drive(local_verbs.reserve(prefix, timeout_s), self._home), self._home
            )
        return _StagedSlots(prefix, self, timeout_s)

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
        at_home = 0
        if self._home is not None:
            at_home = self._at_home(local_verbs.pin(prefix, level, ttl_s, timeout_s), 0)
        return max(
            at_home,
            self._count_all(
                prefix,
                lambda: messages.Pin(0, prefix.key_bytes, level, ttl_s or FOREVER_S),
                timeout_s,
            ),
        )

    def remove(self, prefix: Prefix, *, timeout_s: float = DEFAULT_TIMEOUT_S) -> int:
        """Forget the resident blocks on every node that has them."""
        at_home = 0
        if self._home is not None:
            at_home = self._at_home(local_verbs.remove(prefix, timeout_s), 0)
        remote = self._count_all(prefix, lambda: messages.Remove(0, prefix.key_bytes), timeout_s)
        return max(at_home, remote)

    def replicate(
        self, prefix: Prefix, to: Sequence[int], *, timeout_s: float = DEFAULT_TIMEOUT_S
    ) -> dict[int, int]:
        """Have the nodes `to` (numbers, see `nodes`) copy the resident blocks from who has them.
        Returns how many blocks of the prefix each holds then."""
        holders = self._locate(prefix.keys)
        counts: dict[int, int] = {}
        for target in to:
            source = next((n for nodes in holders[:1] for n in nodes if n != target), None)
            if source is None:
                raise NoRoom("no other node is known to have the first block of this prefix")
            counts[target] = self._pull(prefix, source, target, timeout_s)
        return counts

    def _pull(self, prefix: Prefix, source: int, target: int, timeout_s: float) -> int:
        request = messages.Pull(0, prefix.key_bytes, prefix.parent, prefix.start, source, timeout_s)
        return int(self._engine.ask(target, request, timeout_s).count)

    def _replicate_from(self, prefix: Prefix, source: int, count: int, tried: set[int]) -> None:
        nodes = self._engine.members.nodes()
        size = len(prefix) * prefix.schema.extent_bytes
        for target in place(nodes, count, size, self._dice, without=tried):
            try:
                self._pull(prefix, source, target, DEFAULT_TIMEOUT_S)
            except TiffinError as error:
                log.warning("not replicated to node %d: %s", target, error)

    def _order(self, order: Callable[[], None]) -> None:
        """Run it in the background, unless too many wait already."""
        self._ordered = [future for future in self._ordered if not future.done()]
        if len(self._ordered) < _ORDERS_MAX:
            self._ordered.append(self._orders.submit(order))
        else:
            log.warning("a replication was not ordered: %d wait already", _ORDERS_MAX)

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
        return dict(self._engine.members.nodes())

    def statistics(self, *, timeout_s: float = DEFAULT_TIMEOUT_S) -> dict[str, Any]:
        """Every node's numbers by name, and what this client knows of its ways to them."""
        self._check(timeout_s)
        records = self._engine.members.nodes()
        replies = self._ask_all(lambda: messages.Statistics(0), timeout_s)
        nodes = {records[n].name: reply.numbers for n, reply in replies.items() if n in records}
        links = {
            records[number].name: numbers
            for number, numbers in self._engine.links.statistics().items()
            if number in records
        }
        return {"nodes": nodes, "links": links, "home": self._home_number}

    def close(self) -> None:
        """Release everything this client holds, finish replications that were ordered, hang up."""
        if self._access is None:
            return
        self._access = None
        self._orders.shutdown(wait=True)
        self._engine.close()
        if self._home is not None:
            self._home.close()

    # -- small -----------------------------------------------------------------------------------

    @property
    def _fixed(self) -> bool:
        from .members import FixedMembers

        return isinstance(self._engine.members, FixedMembers)

    def _link_home(self) -> Link:
        if self._home is None:
            raise ClientClosed("this client has no home node")
        return self._home

    def _at_home(self, verb: local_verbs.Verb[Any], otherwise: Any) -> Any:
        """The verb's result at home; `otherwise` if home does not answer: others may."""
        try:
            return drive(verb, self._link_home())
        except (ConnectionError, DeadlineExceeded) as error:
            log.warning("home does not answer: %s", error)
            return otherwise

    def _locate(self, keys: Sequence[bytes]) -> list[tuple[int, ...]]:
        try:
            return self._engine.members.locate(keys)
        except DirectoryUnavailable as error:
            log.warning("%s", error)
            return [()] * len(keys)

    def _ask_all(self, make: Callable[[], messages.Request], timeout_s: float) -> dict[int, Any]:
        """Replies by node, of those that answer."""
        numbers = list(self._engine.members.nodes())
        replies = self._engine.run(verbs.ask_all(numbers, make, timeout_s))
        return {n: reply for n, reply in replies.items() if not isinstance(reply, TiffinError)}

    def _count_all(
        self, prefix: Prefix, make: Callable[[], messages.Request], timeout_s: float
    ) -> int:
        self._check(timeout_s)
        if not len(prefix):
            return 0
        holders = {node for nodes in self._locate(prefix.keys) for node in nodes}
        holders.discard(self._home_number or 0)
        replies = self._engine.run(verbs.ask_all(sorted(holders), make, timeout_s))
        counts = [int(r.count) for r in replies.values() if isinstance(r, messages.Done)]
        return max(counts, default=0)


class _MixedBlocks(LeasedBlocks):
    """Leading blocks at home, leased; the rest in memory of this process."""

    def __init__(
        self,
        prefix: Prefix,
        near: LeasedBlocks | None,
        far: dict[int, Bytes],
        outcome: verbs.Outcome,
        selection: Selection,
    ) -> None:
        count = len(near) if near is not None else 0

        def make(index: int) -> Block:
            if near is not None and index < count:
                return near[index]
            generation = outcome.generations[index]
            return Block(far[index], selection, prefix.keys[index], generation, packed=True)

        reason = None if outcome.blocks == len(prefix) else outcome.reason
        super().__init__(Blocks(prefix, outcome.blocks, reason, make), 0, None)
        self._near = near

    def release(self) -> None:
        """See `LeasedBlocks.release`."""
        super().release()
        if self._near is not None:
            self._near.release()


class _StagedSlots(Slots):
    """Slots of a client without a home: private memory, put when committed."""

    def __init__(self, prefix: Prefix, client: PoolClient, timeout_s: float) -> None:
        flags = client.exists(prefix, timeout_s=timeout_s)
        selection, size = select(prefix.schema), prefix.schema.extent_bytes
        slots = [
            Slot(np.zeros(size, np.uint8), selection, index, 0, 0)
            for index, resident in enumerate(flags)
            if not resident
        ]
        resident = tuple(index for index, flag in enumerate(flags) if flag)
        super().__init__(prefix, Reserved(slots, 0, resident), None)  # type: ignore[arg-type]
        self._client = client
        self._timeout_s = timeout_s

    def commit(self) -> None:
        """Send what was written. Raises NoRoom, NodeUnavailable."""
        self._end()
        kept = [slot for slot in self._slots if not slot.skipped]
        try:
            stored: list[int] = []
            for first, part in _consecutive(kept):
                piece = self.prefix[first : first + len(part)]
                result = self._client.put(
                    piece, [slot.view for slot in part], timeout_s=self._timeout_s
                )
                stored += [first + index for index in result.stored]
            self.stored = tuple(stored)
        finally:
            for slot in self._slots:
                slot.let_go()

    def abort(self) -> None:
        """Forget what was written."""
        self._end()
        for slot in self._slots:
            slot.let_go()


def _consecutive(slots: Sequence[Slot]) -> list[tuple[int, list[Slot]]]:
    runs: list[tuple[int, list[Slot]]] = []
    for slot in slots:
        if runs and runs[-1][0] + len(runs[-1][1]) == slot.index:
            runs[-1][1].append(slot)
        else:
            runs.append((slot.index, [slot]))
    return runs


def _result(stored: Stored) -> PutResult:
    return PutResult(
        tuple(stored.stored),
        tuple(stored.resident),
        tuple(stored.busy),
        tuple(stored.refused),
        stored.reason,
    )
