"""The link to the home node (the node on this host): its timeouts, and what happens when it is
silent.

A home node that hangs (SIGSTOP, swap, a disk that does not answer) keeps its socket open, so only a
timeout detects it. A request that the node has to answer at once gets the pool's `hedge_s`, but not
less than the GRACE_S that a node may be late. A request that may wait at the node, for room or for
NVMe, is sent in slices of its timeout: each slice that the node answers shows that it is healthy,
however long the request takes in all. A caller without an answer asks other nodes; one thread polls
the home node until it answers again. Until then no call that another node could serve waits for it,
and the link gives back every lease or reservation that it grants too late.
"""

from __future__ import annotations

import logging
import threading
import time
from typing import TYPE_CHECKING

import msgspec

from tiffin.messenger.health import Health
from tiffin.messenger.tcp.pending_connect import calling

from ....deadlines import GRACE_S
from ....errors import (
    ClientBusy,
    ClientClosed,
    DeadlineExceeded,
    NodeUnavailable,
    TiffinError,
)
from ....node.core import messages
from ....node.core.records import Reason
from ...connection.connection import GIVEN_UP
from ...connection.lease_lifetime import undo
from ...connection.node_link import CallGate, open_links

if TYPE_CHECKING:
    from collections.abc import Callable

    from ...connection.connection import NodeAnswer
    from ...connection.node_link import NodeLink
    from ...connection.region_mapping import Mapping
    from ..peers import Peers

log = logging.getLogger(__name__)

# The longest slice of a wait at home; a node that hangs within a slice delays the call by as much.
SLICE_MAX_S = 0.5
# The timeout of a commit: one of 256 blocks takes some 5 ms. After the timeout, the put writes the
# blocks to another node once more. With GRACE_S, a put is late by 0.5 s at most.
COMMIT_S = 0.25
# The timeout of one poll of a silent home node (GRACE_S comes on top); `close` waits for it.
LISTEN_S = 0.25

_MAY_WAIT = (messages.Lease, messages.Reserve, messages.Await)
# Requests of a layer stream that has begun at home: only the home node knows its progress, and
# another node can take the stream over only once all its blocks are committed.
_ONLY_HERE = (messages.Await, messages.Publish)
# Requests whose replacement needs room at another node, which a draining node does not give.
_TAKES_ROOM = (messages.Reserve, messages.Commit)
# Requests that are not retried: the node may have carried one out although it timed out.
_ONCE = (messages.Commit, messages.Remove)


class HomeLink:
    """A `NodeLink` to the home node that gives up on it when it is silent and other nodes could
    answer.

    The call that finds it silent raises DeadlineExceeded; later calls raise NodeUnavailable at once
    until the home node has answered again. While the pool has no other node, each call waits for
    its whole `timeout_s`. Thread-safe.
    """

    def __init__(self, link: NodeLink, number: Callable[[], int | None], peers: Peers) -> None:
        self.lost = False  # the last call got no answer
        self._health = Health()  # as `_listen` finds it, which a silence of one call starts
        # Whether it is silent: then only `_listen` and calls that no other node could serve ask it.
        self.away = False
        self._link = link
        self._find_number = number
        self._peers = peers
        self._share_s = max(0.0, peers.options.hedge_s - GRACE_S)  # links wait GRACE_S longer
        self._first_slice_s = min(SLICE_MAX_S, peers.options.hedge_s / 2)
        self.forget()
        self.gate = link.gate
        open_links.add(self)

    def forget(self) -> None:
        """In a forked child: start with new locks, since the threads that held them and the
        listener are the parent's."""
        self._state = threading.Lock()
        self._closing, self.gate = threading.Event(), CallGate()
        self._listener: threading.Thread | None = None
        self.away = False

    # -- the link --------------------------------------------------------------------------------

    @property
    def number(self) -> int | None:
        """The home node's number in the directory; a restart changes it."""
        return self._find_number()

    @property
    def mapping(self) -> Mapping:
        """See `NodeLink.mapping`."""
        return self._link.mapping

    def post(self, request: messages.Request) -> None:
        """See `NodeLink.post`."""
        self._link.post(request)

    def close(self) -> None:
        """See `NodeLink.close`. A silent home node ends its leases and reservations with the
        session, when it wakes."""
        with self._state:
            self._closing.set()
            listener = self._listener
        if listener is not None:
            listener.join()
        self._link.close()

    def call(
        self, request: messages.Request, timeout_s: float, *, patient: bool = False
    ) -> NodeAnswer:
        """See `NodeLink.call`. `patient`: wait for a silent home node as well, because no other
        node could serve the request."""
        end = time.monotonic() + timeout_s
        patient = patient or isinstance(request, _ONLY_HERE)
        once = isinstance(request, _ONCE)
        if not patient and (self.away or once):
            patient = not self._others(isinstance(request, _TAKES_ROOM))
        slice_s = self._first_slice_s
        while True:
            if calling().was_cut:
                raise ClientClosed(GIVEN_UP)
            began = time.monotonic()
            left_s = max(0.0, end - began)
            if isinstance(request, _MAY_WAIT):
                wait_s = min(left_s, slice_s)
                request = msgspec.structs.replace(request, timeout_s=wait_s)
            else:
                wait_s = left_s if patient else min(left_s, self._bound_s(request))
            try:
                answer = self._ask_once(request, wait_s, patient=patient)
            except (DeadlineExceeded, NodeUnavailable):
                if once or not self.away or time.monotonic() >= end:
                    raise
                patient = patient or not self._others(isinstance(request, _TAKES_ROOM))
                if not patient:
                    raise
            else:
                waited = time.monotonic() - began >= wait_s
                if wait_s >= left_s or not (waited and _may_get_more(answer.reply)):
                    return answer
                correction = undo(answer.reply)
                if correction is not None:
                    self.post(correction)
            slice_s = min(2 * slice_s, SLICE_MAX_S)

    def _bound_s(self, request: messages.Request) -> float:
        return COMMIT_S if isinstance(request, messages.Commit) else self._share_s

    def _ask_once(self, request: messages.Request, wait_s: float, *, patient: bool) -> NodeAnswer:
        if self.away and not patient:
            raise NodeUnavailable(
                "home does not answer and is left alone until it does; if it hangs, restart it"
            )
        began = time.monotonic()
        try:
            answer = self._link.call(request, wait_s)
        except (ClientBusy, ClientClosed):
            raise
        except (DeadlineExceeded, ConnectionError) as error:
            if calling().was_cut:  # no sign of a silent node
                raise
            # A retry of a connection that is refused at once costs nothing: the next call finds a
            # restarted node.
            refused = isinstance(error, ConnectionError) and time.monotonic() - began < GRACE_S
            self._got_nothing(error, silent=not refused)
            raise
        except TiffinError:
            self._got_answer()
            raise
        self._got_answer()
        return answer

    # -- its health ------------------------------------------------------------------------------

    def _others(self, takes_room: bool) -> bool:
        """Whether the pool has other healthy nodes that could serve a request, as far as this
        client knows. With `takes_room`, draining nodes do not count."""
        try:
            nodes = self._peers.nodes()
        except NodeUnavailable:
            return False
        number = self.number
        down = self._peers.links.down(time.monotonic())
        home = nodes.get(number) if number is not None else None
        return any(
            not (takes_room and record.draining)
            # The directory may still have an old registration of the home node itself.
            and not (home and (record.host, record.socket) == (home.host, home.socket))
            for other, record in nodes.items()
            if other != number and other not in down
        )

    def _got_answer(self) -> None:
        self.lost = False
        with self._state:
            self._health.answered()
            back, self.away = self.away, False
        if back:
            log.warning("home answers again")

    def _got_nothing(self, why: object, *, silent: bool) -> None:
        log.log(logging.DEBUG if self.lost else logging.WARNING, "no home: %s", why)
        self.lost = True
        with self._state:
            self.away = silent and not self._closing.is_set()
            if self.away and self._listener is None:
                self._listener = threading.Thread(
                    target=self._listen, name="tiffin-home", daemon=True
                )
                try:
                    self._listener.start()
                except RuntimeError as error:  # this process can have no more threads
                    log.warning("nobody listens for home, each call asks it: %s", error)
                    self._listener, self.away = None, False

    def _listen(self) -> None:
        """Poll a silent home node at once, in case it was only late, then with the rests of its
        `Health` until it answers. The link gives back first what the node granted too late."""
        while True:
            while self.away and not self._answers():
                now = time.monotonic()
                self._health.failed(now)
                if self._closing.wait(self._health.retry_at - now):
                    return
            with self._state:
                if not self.away:
                    self._listener = None
                    return

    def _answers(self) -> bool:
        """Send one request whose answer is empty; whether there is no reason to poll again."""
        question = messages.Match(0, b"")
        try:
            self._ask_once(question, LISTEN_S, patient=True)
        except ClientClosed:
            return True
        except TiffinError as error:
            log.debug("home is still silent: %s", error)
        return not self.away


def _may_get_more(reply: messages.AnyReply) -> bool:
    """Whether a further slice may bring a better answer: the node ran out of time or room."""
    if isinstance(reply, messages.Leased):
        return reply.reason in (Reason.DEADLINE, Reason.NO_ROOM)
    if isinstance(reply, messages.Reserved):
        return reply.reason == Reason.NO_ROOM and not reply.statuses
    return isinstance(reply, messages.Awaited) and not reply.ready
