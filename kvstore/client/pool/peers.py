"""The nodes of a pool: who there is, where blocks are, and the connections to them."""

from __future__ import annotations

import logging
import math
import random
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, TypeVar

from ... import deadlines
from ...credentials import Credentials, parse_address
from ...errors import (
    ClientClosed,
    DirectoryUnavailable,
    InvalidInput,
    NodeUnavailable,
)
from .link_health import Links
from .members import Placements
from .remote.peer import Peer

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ...directory.base import NodeRecord
    from .members import Members

log = logging.getLogger(__name__)
T = TypeVar("T")

# Worker threads of one client that wait for nodes. They sleep in system calls; the runs of one
# prompt and the requests to several nodes use some at a time.
WORKERS = 8
# Threads that ask the directory for calls whose deadline is before the directory's own timeout.
ASKERS = 2
# Connections to nodes that have left are closed when there are so many more peers than nodes.
PEERS_SPARE = 8
# The most nodes that a client remembers, so that a removal also reaches one that the directory does
# not list at the moment; some KiB each.
SEEN_MAX = 1024
# Links that a node tells the directory about; a record has 16 KiB at most.
SUMMARY_MAX = 64
CLOSED = "this client is closed; open another"


@dataclass(frozen=True, slots=True)
class PoolOptions:
    """The options of a client of many nodes.

    `hedge_s`: how long a node may send nothing before the client hedges: it asks another replica
    instead. A healthy node answers in well under a millisecond, and no get should wait 250 ms for a
    sick one. `hedge_share`: at most this share of reads may be hedged, so that a pool that is slow
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


class Peers:
    """The nodes of a pool, as the directory and this client's own requests know them, the
    connections to them, and the threads that wait for them. Thread-safe."""

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
        self._credentials = credentials
        self._name = name
        self._peers: dict[str, Peer] = {}
        self._lock = threading.Lock()
        self._workers = ThreadPoolExecutor(WORKERS, thread_name_prefix="tiffin-pool")
        self._askers = ThreadPoolExecutor(ASKERS, thread_name_prefix="tiffin-asker")
        self._records: dict[int, NodeRecord] = {}  # the directory's latest answer
        self._seen: dict[str, tuple[int, NodeRecord]] = {}  # by address, also of nodes that left
        self._directory_lost = False  # the loss is logged once, not by each read
        self._closed = False

    def close(self) -> None:
        """Cut the requests in flight, wait until no thread touches a caller's memory, and close the
        connections."""
        with self._lock:
            self._closed = True
            peers, self._peers = list(self._peers.values()), {}
        for peer in peers:
            peer.cut()  # all of them, before `close` waits for the first
        for peer in peers:
            peer.close()
        self._workers.shutdown(wait=True, cancel_futures=True)
        self.members.close()
        self._askers.shutdown(wait=False, cancel_futures=True)  # the directory has its own timeout

    # -- who and where ---------------------------------------------------------------------------

    def nodes(self) -> dict[int, NodeRecord]:
        """The nodes of the pool; while the directory does not answer, those of its latest answer.

        Raises NodeUnavailable if it has never answered: then no node is known.
        """
        try:
            records = self._asked(self.members.nodes)
        except DirectoryUnavailable as error:
            if not self._records:
                raise NodeUnavailable(f"no node of the pool is known yet: {error}") from error
            return self._records
        if records != self._records:
            self._see(records)
        return records

    def nodes_now(self) -> dict[int, NodeRecord]:
        """The nodes that are registered at this moment. Raises DirectoryUnavailable."""
        records = self._asked(partial(self.members.nodes, fresh=True))
        self._see(records)
        return records

    @property
    def latest(self) -> dict[int, NodeRecord]:
        """The directory's latest answer, without asking."""
        return self._records

    def _see(self, records: dict[int, NodeRecord]) -> None:
        self._records = records
        with self._lock:
            for number, record in records.items():
                self._seen.pop(record.address, None)
                self._seen[record.address] = number, record
            while len(self._seen) > max(SEEN_MAX, len(records)):
                del self._seen[next(iter(self._seen))]

    def seen(self) -> dict[int, NodeRecord]:
        """All nodes that this client has ever known, by their latest numbers, but those of which
        it knows that they are gone."""
        with self._lock:
            return dict(self._seen.values())

    def forget(self, record: NodeRecord) -> None:
        """Note that no node answers there."""
        with self._lock:
            self._seen.pop(record.address, None)

    def locate(self, keys: Sequence[bytes]) -> list[tuple[int, ...]]:
        """Per key, the nodes to ask for it. Raises DirectoryUnavailable."""
        try:
            located = self._asked(partial(self.members.locate, keys))
        except DirectoryUnavailable as error:
            if not self._directory_lost:
                self._directory_lost = True
                log.warning("%s; blocks of other nodes are not found until it answers", error)
            raise
        if self._directory_lost:
            self._directory_lost = False
            log.warning("the directory answers again")
        return self.placements.added_to(located, keys, time.monotonic())

    def _asked(self, question: Callable[[], T]) -> T:
        """The directory's answer. Raises DirectoryUnavailable, also when the deadline of the call
        comes before the directory's own timeout: a thread goes on waiting for the directory then.
        """
        wait_s = deadlines.left_s(math.inf)
        if wait_s >= self.members.patience_s:
            return question()
        try:
            asking = self._askers.submit(question)
        except RuntimeError as error:  # it was shut down
            raise ClientClosed(CLOSED) from error
        try:
            return asking.result(wait_s)
        except TimeoutError as error:
            asking.cancel()
            raise DirectoryUnavailable("it did not answer while there was time") from error

    # -- peers -----------------------------------------------------------------------------------

    def record(self, number: int) -> NodeRecord:
        """The directory's record of a node. Raises NodeUnavailable if it has none."""
        record = self.nodes().get(number)
        if record is None:
            raise NodeUnavailable(f"node {number} is not in the pool any more")
        return record

    def peer(self, number: int) -> Peer:
        """The connections to a node. Raises NodeUnavailable for one that can't be reached, and
        ClientClosed."""
        return self.peer_at(self.record(number))

    def peer_at(self, record: NodeRecord) -> Peer:
        """As `peer`: the connections to the node of this record."""
        retired: list[Peer] = []
        with self._lock:
            if self._closed:
                raise ClientClosed(CLOSED)
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
        except InvalidInput as error:  # the directory is only a hint
            raise NodeUnavailable(f"node {record.name}: {error}") from error
        return Peer(
            address,
            self._credentials,
            self._name,
            streams_max=self.options.streams_max,
            nixl=self.options.nixl,
        )

    def _retire(self) -> list[Peer]:
        """Remove the peers at addresses that no node has any more, if there are many; the caller
        holds the lock, and closes the peers when it has released it."""
        if len(self._peers) < len(self._records) + PEERS_SPARE:
            return []
        addresses = {record.address for record in self._records.values()}
        gone = [address for address in self._peers if address not in addresses]
        self.links.keep(set(self._records))
        return [self._peers.pop(address) for address in gone]

    def link_summary(self) -> dict[str, list[float]]:
        """[bandwidth in bytes/s, latency in s] of the links that were used, by the nodes' names."""
        records = self._records
        return {
            records[number].name: [link["bandwidth_bytes_s"], link["latency_s"]]
            for number, link in list(self.links.statistics().items())[-SUMMARY_MAX:]
            if number in records
        }
