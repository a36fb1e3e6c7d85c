"""The feed of the pool's kvstore nodes: polls each node for its blocks and sends index updates.

Membership comes from the directory, blocks from the nodes themselves (`node_cursor.py` makes the
requests), because the directory's locations are a summary, and may be lost. A few threads share all
nodes; a node that does not answer occupies one of them for some seconds, rarely.
"""

from __future__ import annotations

import heapq
import itertools
import logging
import random
import threading
import time
from typing import TYPE_CHECKING, Any

from tiffin.kvstore.client.connection.connection import raise_refusal
from tiffin.kvstore.client.pool.remote.peer import Peer, as_ours
from tiffin.kvstore.credentials import parse_address
from tiffin.kvstore.errors import ClientClosed, InvalidInput, ProtocolError, TiffinError
from tiffin.messenger.errors import MessengerError
from tiffin.messenger.log_rate_limit import Ration

from .index_updates import NODE_TIERS, Gone
from .node_cursor import NodeCursor
from .update_inbox import InboxClosed

if TYPE_CHECKING:
    from collections.abc import Callable

    from tiffin.kvstore.client.pool.members import Members
    from tiffin.kvstore.credentials import Credentials
    from tiffin.kvstore.directory.base import NodeRecord
    from tiffin.messenger.tcp.stream import Stream

    from .index_updates import NodeNews

log = logging.getLogger(__name__)
log.addFilter(Ration())

# 100 nodes polled ten times a second take a tenth of a core; several threads, so that nodes that
# hang do not stop the polls of the others.
THREADS = 4
MEMBERSHIP_S = 1.0
# Timeout of one answer. A page of an inventory is a MiB: 80 ms at 100 Mb/s.
ANSWER_S = 3.0
CONNECT_S = 2.0
# The pause of a thread after an unexpected exception.
FAULT_S = 1.0


class _Node:
    """One node: its address, its connection and its cursor. Used by one thread at a time.

    It has a single stream, so that another stream object means a new connection.
    """

    def __init__(self, record: NodeRecord, credentials: Credentials, now: float) -> None:
        self.number = record.number
        self.address = record.address
        self.cursor = NodeCursor(record.name, now, random.Random(record.name))
        self.error = ""
        self.left = False  # it has left the pool; the thread that polls it now closes it
        self._peer = Peer(parse_address(record.address), credentials, "conductor", streams_max=1)
        self._stream: Stream | None = None

    def ask(self) -> list[NodeNews]:
        """Send one request and receive its answer. Raises TiffinError."""
        deadline = time.monotonic() + ANSWER_S
        peer = self._peer
        with as_ours(peer.label), peer.stream(deadline, CONNECT_S) as stream:
            if stream is not self._stream:
                self.cursor.connected()
                self._stream = stream
            request = self.cursor.request()
            peer.queue(stream, request)
            stream.flush(deadline)
            reply = peer.receive(stream, request, deadline)
        return self.cursor.answered(raise_refusal(reply), time.monotonic())

    def is_of(self, record: NodeRecord) -> bool:
        """Whether this is the node of the same registration, at the same address."""
        return (self.number, self.address) == (record.number, record.address)

    def cut(self) -> None:
        """Cut the connection, so that a thread that waits for an answer fails at once."""
        self._peer.cut()

    def close(self) -> None:
        self._peer.close()
        self._stream = None


class NodesFeed:
    """Follows all nodes of `members` and passes updates to `apply`, from threads of its own.

    Updates of one node come in order; updates of several nodes come from several threads at once.
    `apply` may block; when it raises InboxClosed, the feed ends (close the inbox first). `close`
    returns when the feed has ended; the caller closes `members` after it. The feed reads the
    membership every `membership_s`.
    """

    def __init__(
        self,
        members: Members,
        credentials: Credentials,
        apply: Callable[[NodeNews], None],
        *,
        threads: int = THREADS,
        membership_s: float = MEMBERSHIP_S,
    ) -> None:
        credentials.client_context()  # an error raises here, and not at the first connection
        self._members = members
        self._credentials = credentials
        self._apply = apply
        self._membership_s = membership_s
        self._changed = threading.Condition()
        self._closing = False
        self._ended = threading.Event()
        self._nodes: dict[str, _Node] = {}
        self._members_at = time.monotonic()  # the next membership check; inf while one runs
        # A heap of the nodes that no thread is polling, by due time; numbers break ties.
        self._due: list[tuple[float, int, _Node]] = []
        self._ties = itertools.count()
        self._asked: set[_Node] = set()
        self._leaving: set[str] = set()  # names of nodes that left during a poll of them
        self._directory_error = ""
        self._threads = [
            threading.Thread(target=self._run, name=f"nodes-feed-{number}", daemon=True)
            for number in range(threads)
        ]
        for thread in self._threads:
            thread.start()

    @property
    def alive(self) -> bool:
        """Whether all threads run. If False before `close`, the index of the nodes grows stale."""
        return all(thread.is_alive() for thread in self._threads)

    def statistics(self) -> dict[str, Any]:
        """For operators: per node whether it is followed, and the last error."""
        with self._changed:
            nodes = {
                name: {
                    "address": node.address,
                    "synced": node.cursor.synced,
                    "resyncs": node.cursor.resyncs,
                    "failures": node.cursor.failures,
                    "error": node.error,
                }
                for name, node in self._nodes.items()
            }
            return {"directory_error": self._directory_error, "nodes": nodes}

    def behind(self) -> tuple[str, list[str]]:
        """The directory's last error, "" if there is none, and the nodes whose inventory is not
        complete yet."""
        with self._changed:
            nodes = [name for name, node in self._nodes.items() if not node.cursor.synced]
            return self._directory_error, nodes

    def close(self) -> None:
        """End; idempotent."""
        self._end()
        for thread in self._threads:
            thread.join()
        with self._changed:
            nodes, self._nodes = list(self._nodes.values()), {}
        for node in nodes:
            node.close()

    def __enter__(self) -> NodesFeed:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # -- the threads -------------------------------------------------------------------------------

    def _end(self) -> None:
        with self._changed:
            self._closing = True
            self._ended.set()
            self._changed.notify_all()
            asked = list(self._asked)
        for node in asked:
            node.cut()

    def _run(self) -> None:
        while True:
            job = self._next_job()
            if job is None:
                return
            try:
                job()
            except InboxClosed:
                log.debug("nobody takes updates any more")
                self._end()
            except Exception:  # the feed goes on with the other nodes
                log.exception("following nodes failed unexpectedly")
                self._ended.wait(FAULT_S)

    def _next_job(self) -> Callable[[], None] | None:
        """Wait for the next job that is due, and return it. None after `close`."""
        with self._changed:
            while not self._closing:
                now = time.monotonic()
                if now >= self._members_at:
                    self._members_at = float("inf")
                    return self._look_at_members
                if self._due and now >= self._due[0][0]:
                    node = heapq.heappop(self._due)[2]
                    self._asked.add(node)
                    return lambda: self._follow(node)
                next_at = min(self._members_at, self._due[0][0] if self._due else float("inf"))
                self._changed.wait(None if next_at == float("inf") else next_at - now)
            return None

    def _follow(self, node: _Node) -> None:
        try:
            updates = self._ask(node)
            if not node.left:
                for update in updates:
                    self._apply(update)
        finally:
            with self._changed:
                self._asked.discard(node)
                left = node.left  # if it leaves later, the membership check closes it
                if not left:
                    heapq.heappush(self._due, (node.cursor.due_at, next(self._ties), node))
                    self._changed.notify()
            if left:
                self._bury(node)

    def _ask(self, node: _Node) -> list[NodeNews]:
        try:
            updates = node.ask()
        except (TiffinError, MessengerError) as error:
            if not node.error and not self._closing:
                log.warning("%s is not followed: %s", node.cursor.name, error)
            return self._failed(node, error)
        except Exception as error:  # back off, as if the node did not answer
            log.exception("asking %s failed unexpectedly", node.cursor.name)
            return self._failed(node, error)
        if node.error:
            log.info("%s is followed again", node.cursor.name)
            node.error = ""
        return updates

    def _failed(self, node: _Node, error: Exception) -> list[NodeNews]:
        node.error = f"{type(error).__name__}: {error}"
        foreseen = isinstance(error, TiffinError | MessengerError)
        if not foreseen or isinstance(error, ProtocolError):
            node.cut()  # the state of this connection is unknown
        return node.cursor.failed(time.monotonic())

    # -- membership --------------------------------------------------------------------------------

    def _look_at_members(self) -> None:
        try:
            records = self._members.nodes()
        except ClientClosed:
            log.warning("the directory was closed: who is in the pool stays as it was")
            return
        except TiffinError as error:
            self._look_again(error)
            return
        except Exception as error:
            log.exception("the directory failed unexpectedly")
            self._look_again(error)
            return
        try:
            gone, idle = self._update(_newest(records))
            for node in idle:
                node.close()
            for name in gone:
                self._apply(Gone(name, NODE_TIERS))
        finally:
            self._look_again()

    def _look_again(self, error: Exception | None = None) -> None:
        with self._changed:
            if error is not None:
                if not self._directory_error:
                    log.warning("the directory does not answer: %s", error)
                self._directory_error = f"{type(error).__name__}: {error}"
            self._members_at = time.monotonic() + self._membership_s
            self._changed.notify()

    def _update(self, records: dict[str, NodeRecord]) -> tuple[list[str], list[_Node]]:
        """Follow new nodes, and nodes that have registered again, from the beginning. Returns the
        names of nodes that have left, and the nodes to close."""
        now = time.monotonic()
        gone, idle = [], []
        with self._changed:
            if self._directory_error:
                log.warning("the directory answers again")
            self._directory_error = ""
            for name, node in list(self._nodes.items()):
                record = records.get(name)
                if record is not None and node.is_of(record):
                    continue
                del self._nodes[name]
                node.left = True
                if node in self._asked:
                    self._leaving.add(name)
                    continue
                idle.append(node)
                if record is None:
                    gone.append(name)
            self._due = [entry for entry in self._due if not entry[2].left]
            heapq.heapify(self._due)
            for name, record in records.items():
                if name not in self._nodes and name not in self._leaving and not self._closing:
                    node = _Node(record, self._credentials, now)
                    self._nodes[name] = node
                    heapq.heappush(self._due, (now, next(self._ties), node))
            self._changed.notify_all()
        return gone, idle

    def _bury(self, node: _Node) -> None:
        """Close a node that left during a poll. Only now may another node of its name be followed:
        the new node's first update has to come after this node's last."""
        node.close()
        self._apply(Gone(node.cursor.name, NODE_TIERS))
        with self._changed:
            self._leaving.discard(node.cursor.name)
            self._members_at = min(self._members_at, time.monotonic())
            self._changed.notify()


def _newest(records: dict[int, NodeRecord]) -> dict[str, NodeRecord]:
    """The latest registration of each name, without those whose address is not usable."""
    newest: dict[str, NodeRecord] = {}
    for number in sorted(records):
        record = records[number]
        try:
            parse_address(record.address)
        except InvalidInput:
            continue  # it has no TCP port, or not a valid one
        newest[record.name] = record
    return newest
