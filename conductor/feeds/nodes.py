"""Follows the kvstore nodes of a pool: which blocks each of them has.

Membership comes from the directory, blocks from the nodes themselves (`cursor.py` says what is
asked): the directory's locations are a summary, and may be lost. A few threads share all nodes; a
node that does not answer occupies one of them for some seconds, rarely.
"""

from __future__ import annotations

import heapq
import itertools
import logging
import random
import threading
import time
from typing import TYPE_CHECKING, Any

from tiffin.kvstore.credentials import parse_address
from tiffin.kvstore.errors import ClientClosed, InvalidInput, ProtocolError, TiffinError
from tiffin.kvstore.link import raise_refusal
from tiffin.kvstore.pool.peer import Peer, as_ours
from tiffin.messenger.errors import MessengerError
from tiffin.messenger.ration import Ration

from .cursor import NodeCursor
from .inbox import InboxClosed
from .updates import NODE_TIERS, Gone

if TYPE_CHECKING:
    from collections.abc import Callable

    from tiffin.kvstore.credentials import Credentials
    from tiffin.kvstore.directory.base import NodeRecord
    from tiffin.kvstore.pool.members import Members
    from tiffin.messenger.stream import Stream

    from .updates import Update

log = logging.getLogger(__name__)
log.addFilter(Ration())

# With 100 nodes asked ten times a second, a tenth of a core; more threads are for nodes that hang.
THREADS = 4
MEMBERSHIP_S = 1.0
# A page of an inventory is a MiB: 80 ms at 100 Mb/s.
ANSWER_S = 3.0
CONNECT_S = 2.0
# A thread rests so long after something that nobody foresaw.
FAULT_S = 1.0


class _Node:
    """One node: where it is, and how far it is followed. Used by one thread at a time.

    It has a single stream, so that a stream that was not there before is a new connection.
    """

    def __init__(self, record: NodeRecord, credentials: Credentials, now: float) -> None:
        self.number = record.number
        self.address = record.address
        self.cursor = NodeCursor(record.name, now, random.Random(record.name))
        self.error = ""
        self.left = False  # the pool; whoever has it now closes it
        self._peer = Peer(parse_address(record.address), credentials, "conductor", streams_max=1)
        self._stream: Stream | None = None

    def ask(self) -> list[Update]:
        """One request and its answer. Raises TiffinError."""
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
        """Whether it is this registration, at this address."""
        return (self.number, self.address) == (record.number, record.address)

    def cut(self) -> None:
        """Whoever waits for it learns that now."""
        self._peer.cut()

    def close(self) -> None:
        self._peer.close()
        self._stream = None


class NodesFeed:
    """Follows all nodes of `members` and hands updates to `apply`, from threads of its own.

    Updates of one node come in order, of several nodes from several threads at once. `apply` may
    wait; when it raises InboxClosed, the feed ends (close the inbox first). `close` returns when it
    has ended; `members` are the caller's to close after it. Membership is looked at every
    `membership_s`.
    """

    def __init__(
        self,
        members: Members,
        credentials: Credentials,
        apply: Callable[[Update], None],
        *,
        threads: int = THREADS,
        membership_s: float = MEMBERSHIP_S,
    ) -> None:
        credentials.client_context()  # raises now what would be raised with the first connection
        self._members = members
        self._credentials = credentials
        self._apply = apply
        self._membership_s = membership_s
        self._changed = threading.Condition()
        self._closing = False
        self._ended = threading.Event()
        self._nodes: dict[str, _Node] = {}
        self._members_at = time.monotonic()  # when to look next; infinite while somebody does
        # Nodes that nobody is asking, the one that is due first first; numbers break ties.
        self._due: list[tuple[float, int, _Node]] = []
        self._ties = itertools.count()
        self._asked: set[_Node] = set()
        self._leaving: set[str] = set()  # names of those who left while they were asked
        self._directory_error = ""
        self._threads = [
            threading.Thread(target=self._run, name=f"nodes-feed-{number}", daemon=True)
            for number in range(threads)
        ]
        for thread in self._threads:
            thread.start()

    @property
    def alive(self) -> bool:
        """Whether nodes are followed. If not before `close`, what is known of them grows old."""
        return all(thread.is_alive() for thread in self._threads)

    def statistics(self) -> dict[str, Any]:
        """For people: per node whether it is followed, and why not."""
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
            except Exception:  # the other nodes are followed all the same
                log.exception("following nodes failed unexpectedly")
                self._ended.wait(FAULT_S)

    def _next_job(self) -> Callable[[], None] | None:
        """What is due; waits for it. None at the end."""
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
                left = node.left  # later, it is closed by who sees that it has left
                if not left:
                    heapq.heappush(self._due, (node.cursor.due_at, next(self._ties), node))
                    self._changed.notify()
            if left:
                self._bury(node)

    def _ask(self, node: _Node) -> list[Update]:
        try:
            updates = node.ask()
        except (TiffinError, MessengerError) as error:
            if not node.error and not self._closing:
                log.warning("%s is not followed: %s", node.cursor.name, error)
            return self._failed(node, error)
        except Exception as error:  # asked less and less, as if it did not answer
            log.exception("asking %s failed unexpectedly", node.cursor.name)
            return self._failed(node, error)
        if node.error:
            log.info("%s is followed again", node.cursor.name)
            node.error = ""
        return updates

    def _failed(self, node: _Node, error: Exception) -> list[Update]:
        node.error = f"{type(error).__name__}: {error}"
        foreseen = isinstance(error, TiffinError | MessengerError)
        if not foreseen or isinstance(error, ProtocolError):
            node.cut()  # what else is on this connection cannot be told
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
                self._directory_error = f"{type(error).__name__}: {error}"
            self._members_at = time.monotonic() + self._membership_s
            self._changed.notify()

    def _update(self, records: dict[str, NodeRecord]) -> tuple[list[str], list[_Node]]:
        """Follow new nodes, and those that have registered anew, from the beginning. Returns the
        names that have left, and what is to be closed."""
        now = time.monotonic()
        gone, idle = [], []
        with self._changed:
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
        """It left while it was asked. Only now may another one of its name be followed: its first
        word has to come after this one's last."""
        node.close()
        self._apply(Gone(node.cursor.name, NODE_TIERS))
        with self._changed:
            self._leaving.discard(node.cursor.name)
            self._members_at = min(self._members_at, time.monotonic())
            self._changed.notify()


def _newest(records: dict[int, NodeRecord]) -> dict[str, NodeRecord]:
    """By name, of each the latest registration, and of those only who can be asked."""
    newest: dict[str, NodeRecord] = {}
    for number in sorted(records):
        record = records[number]
        try:
            parse_address(record.address)
        except InvalidInput:
            continue  # it has no TCP port, or not one that is to be believed
        newest[record.name] = record
    return newest
