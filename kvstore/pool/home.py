"""The way to the node on this host: how long it is waited for, and what happens when it is silent.

A home that hangs (SIGSTOP, swap, a disk that does not answer) keeps its socket open, so only time
tells. A request that it has to answer at once gets the pool's `hedge_s`, but not less than the
GRACE_S that a node may be late; one that may wait there, for room or for NVMe, is put in slices:
each slice that is answered shows that home is well, however long it takes in all. Who gets no
answer asks other nodes, and a thread listens until home is back: meanwhile nobody else waits for
it, and what it grants too late is given back.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import deque
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeVar, cast

import msgspec

from .. import verbs as local_verbs
from ..client import drive
from ..errors import (
    ClientClosed,
    DeadlineExceeded,
    DirectoryUnavailable,
    NodeUnavailable,
    TiffinError,
)
from ..link import GRACE_S, Gate, open_links, undo
from ..node import messages
from ..node.core import Status
from ..node.records import Reason
from .links import DOWN_MAX_S, DOWN_MIN_S

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray

    from ..keys import Prefix
    from ..link import Answer, Link
    from ..schema import Shard
    from ..verbs import PutResult, Verb
    from .engine import Engine
    from .plan import Costs
    from .verbs import Context

log = logging.getLogger(__name__)
T = TypeVar("T")

# The longest slice of a wait at home; what hangs in the middle of one costs as much.
SLICE_MAX_S = 0.5
# A commit of 256 blocks takes some 5 ms; one given up is written to another node once more. With
# GRACE_S, a put is late by 0.5 s at most.
COMMIT_S = 0.25
# A question to a silent home is listened to for so long (and GRACE_S); `close` waits for it.
LISTEN_S = 0.25

_MAY_WAIT = (messages.Lease, messages.Reserve, messages.Await)
# Of a stream that has begun at home: it is home's to say how far it is, and another node can go on
# with it only once all its blocks are committed.
_ONLY_HERE = (messages.Await, messages.Publish)
# What is done instead needs room at another node, which a draining one does not give.
_TAKES_ROOM = (messages.Reserve, messages.Commit)
# What is not asked for again: given up, it may have been carried out all the same.
_ONCE = (messages.Commit, messages.Remove)


class Turns:
    """One caller at a time, in the order in which they came. Who comes again goes to the end, so
    that those who wait at home in slices do not keep the others from it. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._queue: deque[threading.Lock] = deque()  # free: the first one's, whose turn it is

    def __len__(self) -> int:
        """How many have a turn or wait for one."""
        return len(self._queue)

    def enter(self) -> threading.Lock:
        """A ticket, for `wait` and `leave`."""
        ticket = threading.Lock()
        with self._lock:
            if self._queue:
                ticket.acquire()
            self._queue.append(ticket)
        return ticket

    def wait(self, ticket: threading.Lock, timeout_s: float) -> bool:
        """Whether its turn has come within this time; it keeps its place."""
        return ticket.acquire(timeout=timeout_s)

    def leave(self, ticket: threading.Lock) -> None:
        """The turn has ended, or is not waited for any more."""
        with self._lock:
            first = self._queue[0] is ticket
            self._queue.remove(ticket)
            if first and self._queue:
                self._queue[0].release()


class Home:
    """A `Link` to the home node that gives up on it when it is silent and others could answer.

    `call` raises DeadlineExceeded then, and NodeUnavailable at once until home has answered again.
    While no other node is in the pool, all have the patience of their `timeout_s`. Thread-safe;
    calls take turns.
    """

    def __init__(self, link: Link, number: Callable[[], int | None], engine: Engine) -> None:
        self.lost = False  # the last call got no answer
        self.away = False  # it is silent: only `_listen` asks it, and who has nobody else
        self._link = link
        self._find_number = number
        self._engine = engine
        self._share_s = max(0.0, engine.options.hedge_s - GRACE_S)  # links wait GRACE_S longer
        self._first_slice_s = min(SLICE_MAX_S, engine.options.hedge_s / 2)
        self._due = math.inf  # when the call under way should have been answered
        self.forget()
        self.gate = link.gate
        open_links.add(self)

    def forget(self) -> None:
        """In a forked child: the threads that held and listened are the parent's."""
        self._turns, self._state = Turns(), threading.Lock()
        self._closing, self.gate = threading.Event(), Gate()
        self._listener: threading.Thread | None = None
        self.away, self._due = False, math.inf

    # -- the link --------------------------------------------------------------------------------

    @property
    def number(self) -> int | None:
        """What the directory calls home now: another number after a restart."""
        return self._find_number()

    @property
    def memory(self) -> NDArray[Any]:
        """See `Link.memory`."""
        return self._link.memory

    def post(self, request: messages.Request) -> None:
        """See `Link.post`."""
        self._link.post(request)

    def close(self) -> None:
        """See `Link.close`. What a silent home has granted ends with the session, when it wakes."""
        with self._state:
            self._closing.set()
            listener = self._listener
        if listener is not None:
            listener.join()
        self._link.close()

    def call(self, request: messages.Request, timeout_s: float, *, patient: bool = False) -> Answer:
        """See `Link.call`. `patient`: wait for a silent home as well, nobody else could help."""
        end = time.monotonic() + timeout_s
        patient = patient or isinstance(request, _ONLY_HERE)
        once = isinstance(request, _ONCE)
        if not patient and (self.away or once):
            patient = not self._others(isinstance(request, _TAKES_ROOM))
        slice_s = self._first_slice_s
        given_up = False
        while True:
            began = time.monotonic()
            left_s = max(0.0, end - began)
            if isinstance(request, _MAY_WAIT):
                wait_s = min(left_s, slice_s)
                request = msgspec.structs.replace(request, timeout_s=wait_s)
            else:
                wait_s = left_s if patient else min(left_s, self._bound_s(request))
            try:
                answer = self._ask_once(request, wait_s, end, patient=patient)
            except (DeadlineExceeded, NodeUnavailable):
                if once or not self.away or time.monotonic() >= end:
                    raise
                patient = patient or not self._others(isinstance(request, _TAKES_ROOM))
                if not patient:
                    raise
                given_up = True
            else:
                waited = time.monotonic() - began >= wait_s
                ours = given_up and _is_busy(answer.reply)
                if not ours and (wait_s >= left_s or not (waited and _may_get_more(answer.reply))):
                    return answer
                given_up = False  # with this answer came the late ones, and were given back
                correction = undo(answer.reply)
                if correction is not None:
                    self.post(correction)
            slice_s = min(2 * slice_s, SLICE_MAX_S)

    def _bound_s(self, request: messages.Request) -> float:
        return COMMIT_S if isinstance(request, messages.Commit) else self._share_s

    def _ask_once(
        self, request: messages.Request, wait_s: float, end: float, *, patient: bool
    ) -> Answer:
        ticket = self._take_turn(end, patient=patient)
        began = time.monotonic()
        waits_s = wait_s if isinstance(request, _MAY_WAIT) else min(wait_s, self._share_s)
        self._due = began + waits_s + GRACE_S
        try:
            answer = self._link.call(request, wait_s)
        except ClientClosed:
            raise
        except (DeadlineExceeded, ConnectionError) as error:
            # What is refused at once costs nothing to ask again: the next call finds a restart.
            refused = isinstance(error, ConnectionError) and time.monotonic() - began < GRACE_S
            self._got_nothing(error, silent=not refused)
            raise
        except TiffinError:
            self._got_answer()
            raise
        finally:
            self._due = math.inf
            self._turns.leave(ticket)
        self._got_answer()
        return answer

    def _take_turn(self, end: float, *, patient: bool) -> threading.Lock:
        """Wait while home answers others in time; the ticket to leave with. Raises
        DeadlineExceeded, NodeUnavailable."""
        ticket = self._turns.enter()
        try:
            self._wait_for_turn(ticket, end, patient=patient)
        except BaseException:
            self._turns.leave(ticket)
            raise
        return ticket

    def _wait_for_turn(self, ticket: threading.Lock, end: float, *, patient: bool) -> None:
        while not self._turns.wait(ticket, self._nap_s(end, patient=patient)):
            now = time.monotonic()
            if now >= end + GRACE_S:
                raise DeadlineExceeded("calls of other threads took all the time at home")
            if now >= self._due and not patient:
                self._got_nothing("it has not answered another thread's call", silent=True)
                break
        else:
            if patient or not self.away:
                return
        raise NodeUnavailable(
            "home does not answer and is left alone until it does; if it hangs, restart it"
        )

    def _nap_s(self, end: float, *, patient: bool) -> float:
        """How long to wait for a turn before looking at the clock: it is another's call by then."""
        now = time.monotonic()
        until = end + GRACE_S if patient else min(self._due, end + GRACE_S)
        return max(0.0, min(GRACE_S, until - now))

    # -- its health ------------------------------------------------------------------------------

    def _others(self, takes_room: bool) -> bool:
        """Whether the pool has nodes beside home that could help, as far as is known."""
        try:
            nodes = self._engine.nodes()
        except DirectoryUnavailable:
            return False
        number = self.number
        down = self._engine.links.down(time.monotonic())
        home = nodes.get(number) if number is not None else None
        return any(
            not (takes_room and record.draining)
            # Of home itself the directory may have an old registration yet.
            and not (home and (record.host, record.socket) == (home.host, home.socket))
            for other, record in nodes.items()
            if other != number and other not in down
        )

    def _got_answer(self) -> None:
        self.lost = False
        with self._state:
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
        """Ask a silent home at once, in case it was only late, then after 0.5 s, doubled up to
        10 s, until it answers. With its answer comes whatever it granted too late."""
        while True:
            rest_s = DOWN_MIN_S
            while self.away and not self._answers():
                if self._closing.wait(rest_s):
                    return
                rest_s = min(2 * rest_s, DOWN_MAX_S)
            # What was asked before may wait there for a slice yet: take that answer as well.
            if self._closing.wait(SLICE_MAX_S):
                return
            self._answers()
            with self._state:
                if not self.away:
                    self._listener = None
                    return

    def _answers(self) -> bool:
        """Ask one question with an empty answer; whether there is no reason to ask again."""
        question = messages.Match(0, b"")
        try:
            self._ask_once(question, LISTEN_S, time.monotonic() + LISTEN_S, patient=True)
        except ClientClosed:
            return True
        except TiffinError as error:
            log.debug("home is still silent: %s", error)
        return not self.away

    # -- what is done there ----------------------------------------------------------------------

    def ask(self, verb: Verb[T], otherwise: T) -> T:
        """The verb's result at home; `otherwise` if home does not answer: others may."""
        try:
            return drive(verb, self)
        except (ConnectionError, DeadlineExceeded):
            return otherwise

    def reserve(self, verb: Verb[T], *, patient: bool) -> T | None:
        """`local_verbs.reserve` at home; None if home does not answer and others may take it.
        `patient` if it can't go elsewhere. Raises what home met if nobody else is there."""
        try:
            return drive(verb, self.patient if patient else self)
        except (ConnectionError, DeadlineExceeded):
            if patient or not self._others(takes_room=True):
                raise
            return None

    def put(
        self,
        prefix: Prefix,
        payloads: Sequence[Any],
        timeout_s: float,
        shard: Shard | None = None,
        *,
        patient: bool = False,
    ) -> PutResult:
        """`local_verbs.put` at home; `patient` if it can't go elsewhere."""
        verb = local_verbs.put(prefix, payloads, self.memory.nbytes, timeout_s, shard)
        return drive(verb, self.patient if patient else self)

    @property
    def patient(self) -> Link:
        """The same link for what lies at home and is to be had nowhere else, such as slots."""
        return cast("Link", _Patient(self))  # its gate is only ever looked at

    def shunned(self, context: Context) -> Context:
        """`context` with home's port taken for dead as well: one process is behind both."""
        return replace(context, costs=_Elsewhere(context.costs, self.number))


@dataclass(frozen=True, slots=True)
class _Patient:
    """A `Link` whose calls wait for a silent home."""

    home: Home

    @property
    def gate(self) -> Gate:
        """See `Link.gate`."""
        return self.home.gate

    @property
    def memory(self) -> NDArray[Any]:
        """See `Link.memory`."""
        return self.home.memory

    def call(self, request: messages.Request, timeout_s: float) -> Answer:
        """See `Link.call`."""
        return self.home.call(request, timeout_s, patient=True)

    def post(self, request: messages.Request) -> None:
        """See `Link.post`."""
        self.home.post(request)

    def close(self) -> None:
        """See `Link.close`."""
        self.home.close()


@dataclass(frozen=True, slots=True)
class _Elsewhere:
    """`Costs` of which one node is taken for dead."""

    costs: Costs
    without: int | None

    def seconds(self, node: int, nbytes: int) -> float:
        """See `Costs.seconds`."""
        return math.inf if node == self.without else self.costs.seconds(node, nbytes)


def _is_busy(reply: messages.AnyReply) -> bool:
    """Whether somebody writes these blocks: we ourselves, if we had asked before in vain."""
    return isinstance(reply, messages.Reserved) and Status.BUSY in reply.statuses


def _may_get_more(reply: messages.AnyReply) -> bool:
    """Whether a longer wait may end better: who waited a slice in vain asks for another."""
    if isinstance(reply, messages.Leased):
        return reply.reason in (Reason.DEADLINE, Reason.NO_ROOM)
    if isinstance(reply, messages.Reserved):
        return reply.reason == Reason.NO_ROOM and not reply.statuses
    return isinstance(reply, messages.Awaited) and not reply.ready
