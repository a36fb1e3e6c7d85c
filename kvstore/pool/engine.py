"""Carries out the pool's verbs over real connections: peers, their health, threads."""

from __future__ import annotations

import contextvars
import logging
import random
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeVar

from tiffin.messenger.budget import SHARED, STREAM_BYTES, Priority
from tiffin.messenger.errors import TransferTimeout

from ..credentials import Credentials, parse_address
from ..errors import (
    ClientClosed,
    DirectoryUnavailable,
    InvalidInput,
    NodeUnavailable,
    ProtocolError,
    TiffinError,
)
from ..link import raise_refusal
from . import verbs
from .fetch import Arrivals, Fetched, fetch
from .links import Links
from .members import Placements
from .peer import Peer
from .verbs import Ask, Context, Read, Together

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Sequence

    import numpy as np
    from numpy.typing import NDArray

    from ..blocks import Selection
    from ..directory.base import NodeRecord
    from ..keys import Prefix
    from ..verbs import Access, PutResult
    from .members import Members
    from .plan import Run
    from .store import Stored
    from .verbs import Verb

    Bytes = NDArray[np.uint8]

log = logging.getLogger(__name__)
T = TypeVar("T")

# Threads of one client that wait for nodes. They sleep in system calls; a prompt's runs and a
# put's replicas use some at a time.
WORKERS = 8
# Connections to nodes that have left are given up when so many more peers than nodes are known.
PEERS_SPARE = 8
# Links that a node tells the directory about; a record has 16 KiB at most.
SUMMARY_MAX = 64
# Smaller reads are over before anybody notices them: they do not wait for room in flight.
_BUDGETED_BYTES_MIN = 1 << 20
_CLOSED = "this client is closed; open another"


@dataclass(frozen=True, slots=True)
class PoolOptions:
    """What a user may choose about a client of many nodes.

    `hedge_s`: how long a node may send nothing before another replica is asked instead; a healthy
    node answers in well under a millisecond, and no get should wait 250 ms for a sick one.
    `hedge_share`: at most this share of reads may be asked for twice, so that a pool that is slow
    as a whole is not made slower. `streams`: TCP streams over which one large read is spread.
    `nixl`: read by NIXL from nodes that offer it.
    """

    hedge_s: float = 0.1
    hedge_share: float = 0.1
    streams: int = 1
    streams_max: int = 8
    nixl: bool = False

    def __post_init__(self) -> None:
        if not self.hedge_s > 0:
            raise InvalidInput(f"hedge_s must be positive, not {self.hedge_s}")
        if not 0 <= self.hedge_share <= 1:
            raise InvalidInput(f"hedge_share is a share from 0 to 1, not {self.hedge_share}")
        if not 1 <= self.streams <= self.streams_max:
            raise InvalidInput(f"streams must be 1 to {self.streams_max}, not {self.streams}")


@dataclass(slots=True)
class Reader:
    """Where and how the blocks of one read arrive. `memory(i)` is the target of block i. Large
    reads wait for their turn among all of this process by `priority`."""

    prefix: Prefix
    selection: Selection
    access: Access
    memory: Callable[[int], Bytes]
    piece: Callable[[int, int], None] | None = None
    priority: Priority = Priority.PREFILL


class Engine:
    """Peers by node number, and the threads that wait for them. Thread-safe."""

    def __init__(
        self,
        members: Members,
        credentials: Credentials,
        name: str = "",
        options: PoolOptions | None = None,
    ) -> None:
        self.members = members
        self.options = options or PoolOptions()
        self.dice = random.Random()
        self.links = Links(self.options.hedge_share)
        self.placements = Placements()
        self.context = Context(time.monotonic, self.links, self.links.may_hedge)
        self._credentials = credentials
        self._name = name
        self._peers: dict[str, Peer] = {}
        self._lock = threading.Lock()
        self._workers = ThreadPoolExecutor(WORKERS, thread_name_prefix="tiffin-pool")
        self._records: dict[int, NodeRecord] = {}  # the last that the directory said
        self._directory_lost = False  # a log has been told; each read would tell it again
        self._closed = False

    def close(self) -> None:
        """Cut what is under way, wait until nothing touches anybody's memory, hang up."""
        with self._lock:
            self._closed = True
            peers, self._peers = list(self._peers.values()), {}
        for peer in peers:
            peer.cut()  # all of them, before any is waited for
        for peer in peers:
            peer.close()
        self._workers.shutdown(wait=True, cancel_futures=True)
        self.members.close()

    # -- who and where ---------------------------------------------------------------------------

    def nodes(self) -> dict[int, NodeRecord]:
        """The nodes of the pool; those that it had, while the directory does not answer.

        Raises DirectoryUnavailable if it never did.
        """
        try:
            self._records = self.members.nodes()
        except DirectoryUnavailable:
            if not self._records:
                raise
        return self._records

    def locate(self, keys: Sequence[bytes]) -> list[tuple[int, ...]]:
        """Per key, the nodes to ask for it. Raises DirectoryUnavailable."""
        try:
            located = self.members.locate(keys)
        except DirectoryUnavailable as error:
            if not self._directory_lost:
                self._directory_lost = True
                log.warning("%s; blocks of other nodes are not found until it answers", error)
            raise
        if self._directory_lost:
            self._directory_lost = False
            log.warning("the directory answers again")
        return self.placements.added_to(located, keys, time.monotonic())

    def noted(self, number: int, prefix: Prefix, stored: Stored) -> PutResult:
        """The result of a put to one node, which is found from now on."""
        there = [prefix.keys[i] for i in (*stored.stored, *stored.resident)]
        self.placements.note(number, there, time.monotonic())
        return stored.result()

    # -- peers -----------------------------------------------------------------------------------

    def record(self, number: int) -> NodeRecord:
        """What the directory knows of a node. Raises NodeUnavailable if it is not there."""
        record = self.nodes().get(number)
        if record is None:
            raise NodeUnavailable(f"node {number} is not in the pool any more")
        return record

    def peer(self, number: int) -> Peer:
        """The connections to a node. Raises NodeUnavailable for one that can't be reached, and
        ClientClosed."""
        record = self.record(number)
        retired: list[Peer] = []
        with self._lock:
            if self._closed:
                raise ClientClosed(_CLOSED)
            peer = self._peers.get(record.address)
            if peer is None:
                retired = self._retire()
                peer = self._peers[record.address] = self._connect(record)
        for old in retired:
            old.close()
        return peer

    def _connect(self, record: NodeRecord) -> Peer:
        if not record.address:
            raise NodeUnavailable(f"node {record.name} does not listen on the network")
        try:
            address = parse_address(record.address)
        except InvalidInput as error:  # the directory is a hint
            raise NodeUnavailable(f"node {record.name}: {error}") from error
        return Peer(
            address,
            self._credentials,
            self._name,
            streams_max=self.options.streams_max,
            nixl=self.options.nixl,
        )

    def _retire(self) -> list[Peer]:
        """Peers at addresses that no node has any more, if there are many. Under the lock."""
        if len(self._peers) < len(self._records) + PEERS_SPARE:
            return []
        addresses = {record.address for record in self._records.values()}
        gone = [address for address in self._peers if address not in addresses]
        self.links.keep(set(self._records))
        return [self._peers.pop(address) for address in gone]

    def link_summary(self) -> dict[str, list[float]]:
        """[bandwidth in bytes/s, latency in s] of the ways that were used, by the nodes' names."""
        records = self._records
        return {
            records[number].name: [link["bandwidth_bytes_s"], link["latency_s"]]
            for number, link in list(self.links.statistics().items())[-SUMMARY_MAX:]
            if number in records
        }

    # -- steps -----------------------------------------------------------------------------------

    def read(
        self,
        reader: Reader,
        deadline: float,
        context: Context,
        start: int,
        without: Collection[int] = (),
    ) -> verbs.Outcome:
        """Carry out `verbs.read` of the reader's prefix.

        Nearly always one node has all of it. That is asked at once, and a plan, which takes as long
        as the bytes of a small block, is made only for what it leaves.
        """
        prefix = reader.prefix
        keys = prefix.keys[start:]
        tried = None
        try:
            located = self.locate(keys) if keys else []
        except DirectoryUnavailable:
            return verbs.Outcome(start, "directory")
        run = verbs.sole_run(located, start, context, without)
        if run is not None:
            fetched = self._read(run, deadline, None, reader)
            if fetched.blocks == len(keys):
                return verbs.whole(run, fetched)
            tried = run, fetched
        verb = verbs.read(prefix, start, deadline, context, located, without, tried)
        return self.run(verb, reader)

    def run(self, verb: Verb[T], reader: Reader | None = None) -> T:
        """Carry out a verb's steps. `reader` is where its `Read` steps go."""
        outcome: Any = None
        failure: BaseException | None = None
        while True:
            try:
                step = verb.send(outcome) if failure is None else verb.throw(failure)
            except StopIteration as stop:
                return stop.value  # type: ignore[no-any-return]
            outcome = failure = None
            try:
                outcome = self._do(step, reader)
            except BaseException as error:  # noqa: BLE001 - the verb cleans up, then raises it again
                failure = error

    def _do(self, step: Any, reader: Reader | None) -> Any:
        if isinstance(step, Read):
            assert reader is not None
            stall_s = None if step.patience is None else step.patience * self.options.hedge_s
            return self._read(step.run, step.deadline, stall_s, reader)
        if isinstance(step, Together):
            return self._together(step.steps, reader)
        assert isinstance(step, Ask)
        return self.ask(step.node, step.request, step.timeout_s)

    def _together(self, steps: list[Any], reader: Reader | None) -> list[Any]:
        """Outcomes of all steps, once none of them is running any more."""
        began = time.monotonic()

        def attempt(step: Any) -> Any:
            if isinstance(step, Ask):  # it may have waited for its turn
                left_s = max(0.0, step.timeout_s - (time.monotonic() - began))
                step = replace(step, timeout_s=left_s)
            try:
                return self._do(step, reader)
            except TiffinError as error:
                return error

        others: list[Future[Any]] = []
        outcomes: list[Any] = []
        try:
            others += [self._submit(attempt, step) for step in steps[1:]]
            outcomes += map(attempt, steps[:1])
            for step, future in zip(steps[1:], others, strict=True):
                # What no thread has begun, for others keep them busy, is done by this one.
                outcomes.append(attempt(step) if future.cancel() else future.result())
        finally:
            _wait_for(others)
        return outcomes

    def _submit(self, attempt: Callable[[Any], Any], step: Any) -> Future[Any]:
        try:
            # In the same context: whoever gives up the call gives up all its threads.
            return self._workers.submit(contextvars.copy_context().run, attempt, step)
        except RuntimeError as error:  # it was shut down
            raise ClientClosed(_CLOSED) from error

    def ask(self, number: int, request: Any, timeout_s: float) -> Any:
        """One request to one node; what happens to it counts for the node's health."""
        try:
            reply = self.peer(number).exchange(request, timeout_s)
        except (NodeUnavailable, ProtocolError):
            self.links.failed(number, time.monotonic())
            raise
        self.links.answered(number)
        return raise_refusal(reply)

    def _read(self, run: Run, deadline: float, stall_s: float | None, reader: Reader) -> Fetched:
        try:
            peer = self.peer(run.node)
        except (NodeUnavailable, DirectoryUnavailable) as error:
            log.debug("not read from: %s", error)
            return Fetched(0, "lost")
        part = reader.prefix  # it knows its keys already; a slice would have to join them again
        if run.start or run.stop != len(part):
            part = part[run.start : run.stop]
        arrivals = Arrivals(
            part,
            reader.selection,
            reader.access,
            [reader.memory(index) for index in range(run.start, run.stop)],
            piece=_shifted(reader.piece, run.start),
        )
        try:
            how = peer, part, arrivals, deadline, stall_s, self.options.streams
            if arrivals.nbytes < _BUDGETED_BYTES_MIN:
                fetched = fetch(*how)
            else:
                # Not the node's fault, nor counted as its time: others of this process were first.
                with _turn(peer, arrivals.nbytes, reader.priority, deadline):
                    fetched = fetch(*how)
        except TransferTimeout:
            return Fetched(0, "deadline")
        self._note(run.node, fetched)
        return fetched

    def _note(self, node: int, fetched: Fetched) -> None:
        # Without a byte by the deadline it is as if it were dead, if that was time enough.
        silent = not fetched.answered and fetched.seconds >= self.options.hedge_s
        if fetched.reason == "stalled":
            self.links.failed(node, time.monotonic(), late=True)
            self.links.hedged()
        elif fetched.reason == "lost" or (fetched.reason == "deadline" and silent):
            self.links.failed(node, time.monotonic())
        elif fetched.blocks:
            self.links.moved(node, fetched.nbytes, fetched.seconds)
        else:
            self.links.answered(node)


@contextmanager
def _turn(peer: Peer, nbytes: int, priority: Priority, deadline: float) -> Iterator[None]:
    """Room for so many bytes in flight: of the peer's share, and of all. Raises TransferTimeout if
    there is none by the deadline."""
    claim = min(nbytes, STREAM_BYTES)
    with peer.budget.hold(claim, priority, deadline), SHARED.hold(claim, priority, deadline):
        yield


def _wait_for(futures: list[Future[Any]]) -> None:
    """Wait until none is running, Ctrl-C or not: they write into the caller's memory."""
    interruption: BaseException | None = None
    pending = {future for future in futures if not future.cancel()}
    while pending:
        try:
            pending = wait(pending).not_done
        except BaseException as error:  # noqa: BLE001 - raised again below
            interruption = error
    if interruption is not None:
        raise interruption


def _shifted(
    piece: Callable[[int, int], None] | None, start: int
) -> Callable[[int, int], None] | None:
    if piece is None:
        return None
    return lambda block, number: piece(start + block, number)
