"""The replication service of a node: it copies blocks from other nodes on request, evacuates its
own before the node leaves, and replicates pinned blocks again after the loss of a node.

Always the node that receives a block copies it (`node_copy.py`): only that node may write its
memory. The node that evacuates blocks sends the `Pull` requests for them, so no node needs a list
of all other nodes' blocks.
"""

from __future__ import annotations

import logging
import random
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from tiffin.messenger.budget import Priority

from ....deadlines import until_s
from ....errors import Draining, NodeUnavailable, NoRoom, TiffinError
from ....node.core import messages
from ....node.core.node_core import split_keys
from ...connection.node_link import LocalLink
from ..replica_choice import place
from .evacuation_chains import EvacuationChain, chains_of, members_of, resident_keys
from .node_copy import Copier
from .returning import Returning

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ....directory.base import Directory
    from ....node.core.records import Session
    from ....node.node import Node
    from ..verb_driver import VerbDriver

    ReplyTo = Callable[[messages.AnyReply], None]

log = logging.getLogger(__name__)

# Copies in parallel; each needs a stream and a thread. More only slow each other and the readers
# down.
COPIERS = 2
QUEUED_MAX = 256
# How often to count the holders of pinned blocks; a lost node is out of the directory in 10 s.
WATCH_S = 2.0
# The same while the node waits for its number, or for others to tell it what was removed.
RETURN_S = 0.1
# The most pinned blocks to watch; each costs 100 bytes and a key in a directory query every
# WATCH_S.
WATCHED_MAX = 65_536
ORDER_TIMEOUT_S = 60.0
# What a drained node offers and nobody takes it offers again after these pauses: a node that has
# just started, or a machine that is busy, did not answer in time.
OFFER_AGAIN_S = (0.5, 1.0, 2.0)


@dataclass(slots=True)
class PinWatch:
    """The number of replicas that each pinned block had, to detect a loss. Pure."""

    known: dict[bytes, int] = field(default_factory=dict)

    def lost(
        self, pinned: Sequence[bytes], holders: Sequence[Sequence[int]], me: int
    ) -> list[bytes]:
        """Pinned blocks with fewer live replicas than before that this node has to replicate: it
        has the lowest number among their holders."""
        found = []
        seen = dict.fromkeys(pinned[:WATCHED_MAX], 0)
        for key, numbers in zip(pinned[:WATCHED_MAX], holders, strict=False):
            before = self.known.get(key, 0)
            if me not in numbers:
                # This node has the block although the directory does not list it. So the directory
                # is being filled, perhaps for the second time: other holders may be missing too.
                seen[key] = max(before, 1)
                continue
            live = set(numbers)
            seen[key] = max(before, len(live))
            if len(live) < before and me == min(live):
                found.append(key)
        self.known = seen
        return found


class Caretaker:
    """Answers `Pull` and `Evacuate`, and watches pins, for one node of a pool."""

    def __init__(
        self, node: Node, directory: Directory, driver: VerbDriver, number: Callable[[], int]
    ) -> None:
        self._node = node
        self._directory = directory
        self._driver = driver
        self._number = number
        self._home = LocalLink(node, "caretaker", owns_node=False)
        self._dice = random.Random()
        self._watch = PinWatch()
        self.returning = Returning(node, directory, driver, number)
        self._queued = 0
        self._unanswered = False  # a node did not answer, or not why it copied nothing
        self._counting = threading.Lock()
        self._workers = ThreadPoolExecutor(COPIERS, thread_name_prefix="tiffin-copier")
        # Copies for which a reader comes at once do not wait for those that nobody waits for.
        self._fetchers = ThreadPoolExecutor(COPIERS, thread_name_prefix="tiffin-fetcher")
        # An evacuation waits for other nodes' copiers: it has a thread of its own, so that two
        # nodes that evacuate to each other do not deadlock.
        self._evacuator = ThreadPoolExecutor(1, thread_name_prefix="tiffin-evacuator")
        self._closing = threading.Event()
        node.handle(messages.Pull, self._pull)
        node.handle(messages.Evacuate, self._evacuate)
        self._thread = threading.Thread(target=self._run, name="tiffin-caretaker", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop the threads; cuts the copies in flight."""
        self._closing.set()
        self.returning.returned.set()
        self._driver.close()
        self._workers.shutdown(wait=True, cancel_futures=True)
        self._fetchers.shutdown(wait=True, cancel_futures=True)
        self._evacuator.shutdown(wait=True, cancel_futures=True)
        self._thread.join()
        self._home.close()

    # -- requests, under the node's lock -----------------------------------------------------------

    def _pull(self, session: Session, request: messages.Pull, reply: ReplyTo) -> None:
        # The time in the queue counts too: after the deadline the requester does not wait any more.
        deadline = time.monotonic() + request.timeout_s

        def work() -> int:
            if not self._node.core.takes_copies:  # it has just started
                self.returning.returned.wait(until_s(deadline))
            # Mostly no reader waits for a copy.
            priority = Priority.BACKGROUND if request.wait else Priority.PREFILL
            copier = Copier(self._driver.peer(request.source), self._node, self._home, priority)
            return copier.copy(request.keys, request.parent, request.depth, deadline)

        split_keys(request.keys)  # raises InvalidInput
        if self._node.draining:
            raise Draining(f"node {self._node.name} is being drained; copy to another")
        threads = self._workers if request.wait else self._fetchers
        self._begin(threads, work, request.id, reply if request.wait else None)
        if not request.wait:
            reply(messages.Done(request.id))

    def _evacuate(self, session: Session, request: messages.Evacuate, reply: ReplyTo) -> None:
        deadline = time.monotonic() + request.timeout_s
        self._begin(self._evacuator, lambda: self._empty(deadline), request.id, reply)

    def _begin(
        self,
        threads: ThreadPoolExecutor,
        work: Callable[[], int],
        request_id: int,
        reply: ReplyTo | None,
    ) -> None:
        if self._queued >= QUEUED_MAX:
            raise NodeUnavailable(f"{QUEUED_MAX} copies wait already; ask again later")
        if self._closing.is_set():
            raise NodeUnavailable(f"node {self._node.name} is being closed")
        self._count(1)

        def run() -> None:
            try:
                answer: messages.AnyReply = messages.Done(request_id, work())
            except TiffinError as error:
                log.info("a copy failed: %s", error)
                answer = messages.refusal(request_id, error)
            except Exception as error:
                log.exception("a copy failed unexpectedly")
                answer = messages.refusal(request_id, NodeUnavailable(repr(error)))
            finally:
                self._count(-1)
            if reply is not None:
                reply(answer)

        threads.submit(run)

    def _count(self, change: int) -> None:
        with self._counting:
            self._queued += change

    # -- handing over ------------------------------------------------------------------------------

    def _empty(self, deadline: float) -> int:
        """Evacuate every block; how many of them other nodes have then. A draining node gets new
        blocks only from writers that had reserved before: the loop goes on until there are none.
        What no node took for lack of an answer is offered again a few times."""
        elsewhere: set[bytes] = set()
        pauses = iter(OFFER_AGAIN_S)
        while rest := [key for key in resident_keys(self._node) if key not in elsewhere]:
            self._driver.nodes_now()  # a node that has just come is one to copy to
            self._unanswered = False
            handed = self._hand_over(chains_of(members_of(self._node, rest)), deadline, spare=True)
            elsewhere.update(handed)
            if not self._node.draining or self._over(deadline):
                break
            if handed:
                continue
            pause_s = next(pauses, None) if self._unanswered else None  # else there is no room
            if pause_s is None or self._closing.wait(min(pause_s, until_s(deadline))):
                break
        return len(elsewhere)

    def _over(self, deadline: float) -> bool:
        return time.monotonic() >= deadline or self._closing.is_set()

    def _hand_over(
        self, chains: Sequence[EvacuationChain], deadline: float, *, spare: bool
    ) -> list[bytes]:
        """Have other nodes copy these chains; the blocks that they have then. With `spare`, a chain
        whose blocks all have another holder is not copied, but counts."""
        handed: list[bytes] = []
        me = self._number()
        for chain in chains:
            if self._over(deadline):
                break
            names = split_keys(chain.keys)
            holders = self._directory.locate(names)
            if spare and all(set(numbers) - {me} for numbers in holders):
                handed += names
                continue
            without = {me, *(n for numbers in holders[:1] for n in numbers if not spare)}
            handed += names[: self._order(chain, without, deadline)]
        return handed

    def _order(self, chain: EvacuationChain, without: set[int], deadline: float) -> int:
        """Ask candidate nodes, the best first, to copy a chain from here: the next candidate gets
        the blocks that one has no room for. Returns how many were copied."""
        nodes, done = self._driver.nodes(), 0
        for target in place(nodes, 3, chain.nbytes, self._dice, without=without):
            left_s = min(ORDER_TIMEOUT_S, deadline - time.monotonic())
            if left_s <= 0:
                break
            rest = chain.after(done)
            pull = messages.Pull(0, rest.keys, rest.parent, rest.depth, self._number(), left_s)
            copied = 0
            try:
                copied = int(self._driver.ask(target, pull, left_s).count)
                self._unanswered |= not copied
            except (Draining, NoRoom) as error:
                log.info("node %s did not copy: %s", nodes[target].name, error)
            except TiffinError as error:
                self._unanswered = True
                log.warning("node %s did not copy: %s", nodes[target].name, error)
            done += copied
            if done == len(chain):
                break
        return done

    # -- pins --------------------------------------------------------------------------------------

    def _run(self) -> None:
        while not self._closing.wait(WATCH_S if self.returning.current else RETURN_S):
            try:
                self.returning.step(time.monotonic())
                self._look_after_pins()
            except TiffinError as error:
                log.debug("removals or pinned blocks were not looked after: %s", error)
            except Exception:
                log.exception("looking after removals and pins failed unexpectedly")

    def _look_after_pins(self) -> None:
        me = self._number()
        pinned = self._node.pinned_keys()[:WATCHED_MAX]
        if not me or not pinned:
            return
        lost = self._watch.lost(pinned, self._directory.locate(pinned), me)
        if not lost:
            return
        log.info("%d pinned blocks have lost a replica; making another", len(lost))
        chains = chains_of(members_of(self._node, lost))
        self._hand_over(chains, time.monotonic() + ORDER_TIMEOUT_S, spare=False)
