"""Follows the KV events of engines that publish them over ZeroMQ as vLLM does (SGLang too).

One thread for all engines: it subscribes, requests replays, folds events and passes updates on. An
engine that is not running (yet, or any more) costs nothing; ZeroMQ reconnects by itself. Correct
results need neither complete nor timely events: `sequence_numbers.py` detects missing ones.

Nothing here listens; connections go out to the addresses that the engines' operators configure. The
protocol has no authentication of its own: any process that answers at such an address can claim
what is cached there, which costs time and never gives a client wrong bytes.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections import Counter
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any

import zmq
from zmq.utils.monitor import recv_monitor_message

from tiffin.kvstore.errors import TiffinError
from tiffin.messenger.log_rate_limit import Ration

from ..errors import ConductorError, InvalidRequest
from ..state.prefix_index import TIERS
from .block_regrouper import EngineRemoved, EngineStored, Folder
from .index_updates import Added, Cleared, Doubted, Gone, Heard, Removed, slices
from .sequence_numbers import Apply, Current, Doubt, Numbering, ReplayRequest, Restarted
from .update_inbox import InboxClosed
from .vllm_events import PAYLOAD_BYTES_MAX, BadEvents, EventReader, unsalted

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from .block_regrouper import Change, EngineChain
    from .index_updates import Update
    from .sequence_numbers import Step
    from .vllm_events import Event

log = logging.getLogger(__name__)
log.addFilter(Ration())

# The most publishers: as many engines as instances; a socket or two each.
PUBLISHERS_MAX = 16_384
# Batches that ZeroMQ queues here; the publisher drops more, and their numbers are missed here.
_WAITING_BATCHES_MAX = 10_000
# Messages from one socket before the other engines' sockets have their turn.
_TURN = 64
# The interval between checks for overdue replays and for quiet publishers.
_LOOK_S = 0.5
# How long a publisher may be away before operators are told.
_DEAF_S = 15.0
_CONNECTED, _LOST = int(zmq.EVENT_HANDSHAKE_SUCCEEDED), int(zmq.EVENT_DISCONNECTED)
_SCHEMES = ("tcp://", "ipc://")
_END = b"\xff" * 8


@dataclass(frozen=True, slots=True)
class EventPublisher:
    """An engine that publishes events: `name` is its instance's id. `endpoint` is the address of
    its publications and `replay` that of its replays ("" if it has none), as seen from here; for
    rank n of a data-parallel engine, its ports plus n, and a name of its own. `chain` computes the
    keys of its model."""

    name: str
    endpoint: str
    chain: EngineChain
    replay: str = ""
    topic: str = ""
    namespace_of: Callable[[str, str], str | None] = unsalted
    counts_copies: bool = True


class _Engine:
    """One publisher, its sockets, and the state of its blocks."""

    def __init__(self, publisher: EventPublisher, context: zmq.Context[Any], now: float) -> None:
        self.publisher = publisher
        self.folder = Folder(publisher.chain, counts_copies=publisher.counts_copies)
        self.reader = EventReader(publisher.namespace_of)
        self.numbering = Numbering(replays=bool(publisher.replay), now=now)
        self.counts: Counter[str] = Counter()
        self.left_out: Counter[str] = Counter()  # events that do not count, by what they are
        self.tiers = {"hbm"}  # tiers that it reported; others may be a node's of the same name
        self._context = context
        self.live = self._socket(zmq.SUB)
        # Since when nobody answers there as a publisher does.
        self.deaf_since: float | None = now
        self._ears: zmq.Socket[bytes] | None = None
        try:
            self._ears = self.live.get_monitor_socket(_CONNECTED | _LOST)
            self.live.setsockopt(zmq.SUBSCRIBE, publisher.topic.encode())
            self.live.connect(publisher.endpoint)  # once somebody listens for what comes of it
            self.replay: zmq.Socket[bytes] | None = None
            if publisher.replay:
                self.replay = self._connect(zmq.DEALER, publisher.replay)
        except BaseException:
            self._close_live()
            raise

    def close(self) -> None:
        self._close_live()
        if self.replay is not None:
            self.replay.close()

    def _close_live(self) -> None:
        if self._ears is not None:  # the context waits for the end of every socket
            self.live.disable_monitor()
            self._ears.close(linger=0)
        self.live.close()

    def listen(self, now: float) -> None:
        """Find out whether the publisher is connected."""
        assert self._ears is not None
        with contextlib.suppress(zmq.Again):
            while True:
                event = recv_monitor_message(self._ears, zmq.NOBLOCK)["event"]
                self.deaf_since = None if event == _CONNECTED else now

    def reconnect_replay(self) -> None:
        """Replace the replay connection, since late messages of an old replay would be taken for
        the next one's. Raises ZMQError, and then the old connection remains."""
        if self.replay is not None:
            fresh = self._connect(zmq.DEALER, self.publisher.replay)
            self.replay.close()
            self.replay = fresh

    def _connect(self, kind: int, endpoint: str) -> zmq.Socket[bytes]:
        socket = self._socket(kind)
        try:
            socket.connect(endpoint)
        except zmq.ZMQError:
            socket.close()
            raise
        return socket

    def _socket(self, kind: int) -> zmq.Socket[bytes]:
        socket: zmq.Socket[bytes] = self._context.socket(kind)
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.RCVHWM, _WAITING_BATCHES_MAX)
        socket.setsockopt(zmq.MAXMSGSIZE, PAYLOAD_BYTES_MAX)
        socket.setsockopt(zmq.RECONNECT_IVL, 100)
        socket.setsockopt(zmq.RECONNECT_IVL_MAX, 5000)
        # Heartbeats detect a host that vanishes without closing its connection.
        socket.setsockopt(zmq.HEARTBEAT_IVL, 5000)
        socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, 15_000)
        return socket


class VllmFeed:
    """Follows publishers and passes updates to `apply`, from a thread of its own. Thread-safe.

    `apply` may block; when it raises InboxClosed, the feed ends (close the inbox first). `close`
    returns when the feed has ended.
    """

    def __init__(self, apply: Callable[[Update], None]) -> None:
        self._apply = apply
        self._context: zmq.Context[Any] = zmq.Context()
        # One socket or two per engine and two for its monitor, and some of its own.
        self._context.setsockopt(zmq.MAX_SOCKETS, 4 * PUBLISHERS_MAX + 16)
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._orders: SimpleQueue[EventPublisher | str] = SimpleQueue()
        self._lock = threading.Lock()
        self._names: set[str] = set()
        self._closing = False
        self._engines: dict[str, _Engine] = {}
        self._sockets: dict[zmq.Socket[bytes], _Engine] = {}
        self._poller = zmq.Poller()
        self._poller.register(self._wake, zmq.POLLIN)
        self._thread = threading.Thread(target=self._run, name="vllm-feed", daemon=True)
        self._thread.start()

    def follow(self, publisher: EventPublisher) -> None:
        """Follow this publisher; it replaces one of the same name. Raises InvalidRequest for an
        endpoint that is no address to connect to, and for too many publishers."""
        for endpoint in filter(None, (publisher.endpoint, publisher.replay)):
            _check_endpoint(endpoint)
        if not publisher.endpoint:
            raise InvalidRequest(f"{publisher.name!r} has no endpoint to subscribe to")
        with self._lock:
            if publisher.name not in self._names and len(self._names) >= PUBLISHERS_MAX:
                raise InvalidRequest(f"{PUBLISHERS_MAX} engines are followed, which is the limit")
            self._names.add(publisher.name)
            self._order(publisher)

    def unfollow(self, name: str) -> None:
        """Stop following a publisher; its blocks are gone. Unknown names are ignored."""
        with self._lock:
            if name in self._names:
                self._names.discard(name)
                self._order(name)

    @property
    def alive(self) -> bool:
        """Whether the thread runs. If False before `close`, the index of the engines grows
        stale."""
        return self._thread.is_alive()

    def statistics(self) -> dict[str, dict[str, int]]:
        """Per publisher: counters, and the numbers of known and of waiting parts."""
        with self._lock:
            return {name: _numbers(engine) for name, engine in self._engines.items()}

    def left_out(self) -> dict[str, dict[str, int]]:
        """Per publisher, the events that do not count, by what they are."""
        with self._lock:
            return {
                name: dict(engine.left_out)
                for name, engine in self._engines.items()
                if engine.left_out
            }

    def unheard(self) -> dict[str, str]:
        """The publishers to which there is no connection for some time, and their endpoints."""
        late = time.monotonic() - _DEAF_S
        with self._lock:
            return {
                name: engine.publisher.endpoint
                for name, engine in self._engines.items()
                if engine.deaf_since is not None and engine.deaf_since < late
            }

    def close(self) -> None:
        """End; idempotent."""
        with self._lock:
            if not self._closing:
                self._closing = True
                os.eventfd_write(self._wake, 1)
        self._thread.join()
        with self._lock:
            if self._wake >= 0:
                os.close(self._wake)
                self._wake = -1

    def __enter__(self) -> VllmFeed:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # -- the thread --------------------------------------------------------------------------------

    def _order(self, order: EventPublisher | str) -> None:
        self._orders.put(order)
        if not self._closing:
            os.eventfd_write(self._wake, 1)

    def _run(self) -> None:
        try:
            look_at = time.monotonic() + _LOOK_S
            while not self._closing:
                left_s = max(0.0, look_at - time.monotonic())
                self._turn([socket for socket, _ in self._poller.poll(int(1000 * left_s) + 1)])
                if time.monotonic() >= look_at:
                    look_at = time.monotonic() + _LOOK_S
                    for engine in list(self._engines.values()):
                        with self._spared(engine):
                            self._look(engine)
        except InboxClosed:
            log.debug("nobody takes updates any more")
        except Exception:  # `alive` is False from now on
            log.exception("engines are followed no more: their feed has ended unexpectedly")
        finally:
            with self._lock:
                engines, self._engines = self._engines, {}
            for engine in engines.values():
                engine.close()
            self._context.term()

    def _turn(self, ready: Iterable[Any]) -> None:
        for socket in ready:
            if socket == self._wake:
                with contextlib.suppress(BlockingIOError):
                    os.eventfd_read(self._wake)
                self._take_orders()
                continue
            engine = self._sockets.get(socket)
            if engine is not None:
                with self._spared(engine):
                    self._receive(engine, socket)

    @contextlib.contextmanager
    def _spared(self, engine: _Engine) -> Iterator[None]:
        """An exception from one engine does not end the feed of the others."""
        try:
            yield
        except InboxClosed:
            raise
        except Exception:
            engine.counts["faults"] += 1
            log.exception("following %s failed unexpectedly", engine.publisher.name)
            self._doubt(engine)

    def _take_orders(self) -> None:
        while True:
            try:
                order = self._orders.get_nowait()
            except Empty:
                return
            name = order if isinstance(order, str) else order.name
            self._leave(name)
            if isinstance(order, EventPublisher):
                self._begin(order)

    def _begin(self, publisher: EventPublisher) -> None:
        now = time.monotonic()
        try:
            engine = _Engine(publisher, self._context, now)
        except (zmq.ZMQError, UnicodeEncodeError) as error:
            log.warning("%s cannot be followed at %s: %s", publisher.name, publisher, error)
            with self._lock:
                self._names.discard(publisher.name)
            return
        with self._lock:
            self._engines[publisher.name] = engine
        self._register(engine)
        self._carry_out(engine, engine.numbering.begin(now))

    def _leave(self, name: str) -> None:
        engine = self._engines.get(name)
        if engine is None:
            return
        with self._lock:
            del self._engines[name]
        self._unregister(engine)
        engine.close()
        self._apply(Gone(name, sorted(engine.tiers)))

    def _register(self, engine: _Engine) -> None:
        for socket in (engine.live, engine.replay):
            if socket is not None:
                self._sockets[socket] = engine
                self._poller.register(socket, zmq.POLLIN)

    def _unregister(self, engine: _Engine) -> None:
        for socket in (engine.live, engine.replay):
            if socket is not None:
                del self._sockets[socket]
                self._poller.unregister(socket)

    def _receive(self, engine: _Engine, socket: zmq.Socket[bytes]) -> None:
        for _ in range(_TURN):
            try:
                frames = socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            steps = self._steps(engine, frames, replay=socket is engine.replay)
            self._carry_out(engine, steps)
            if socket.closed:
                return

    def _steps(self, engine: _Engine, frames: Sequence[bytes], *, replay: bool) -> list[Step]:
        """The steps for a message: frames before the last two are a topic, or an empty one."""
        if len(frames) < 2 or len(frames[-2]) != 8:
            engine.counts["malformed"] += 1
            return []
        now, numbering = time.monotonic(), engine.numbering
        if frames[-2] == _END:
            return numbering.replay_ended(now) if replay else []
        seq = int.from_bytes(frames[-2], "big")
        if replay:
            engine.counts["replayed"] += 1
            return numbering.replayed(seq, frames[-1], now)
        return numbering.live(seq, frames[-1], now)

    def _look(self, engine: _Engine) -> None:
        engine.listen(time.monotonic())
        was_asking = engine.numbering.asking
        steps = engine.numbering.look(time.monotonic())
        if was_asking and not engine.numbering.asking:
            engine.counts["unanswered"] += 1
            self._unregister(engine)
            try:
                engine.reconnect_replay()
            finally:
                self._register(engine)
        self._carry_out(engine, steps)

    def _carry_out(self, engine: _Engine, steps: Sequence[Step]) -> None:
        name = engine.publisher.name
        for step in steps:
            if isinstance(step, Apply):
                self._fold(engine, step)
            elif isinstance(step, ReplayRequest):
                self._ask(engine, step.seq)
            elif isinstance(step, Doubt):
                engine.counts["gaps"] += 1
                self._doubt(engine)
            elif isinstance(step, Restarted):
                engine.counts["restarts"] += 1
                self._reset(engine)
            elif isinstance(step, Current):
                self._apply(Heard(name, "hbm", engine.numbering.expected - 1))

    def _ask(self, engine: _Engine, seq: int) -> None:
        assert engine.replay is not None
        engine.counts["asked"] += 1
        with contextlib.suppress(zmq.Again):  # not connected: there will be no answer in time
            engine.replay.send_multipart([b"", seq.to_bytes(8, "big")], zmq.NOBLOCK)

    def _doubt(self, engine: _Engine) -> None:
        for tier in TIERS:
            keys = engine.folder.keys(tier)
            for part in slices(keys) if keys else ():
                self._apply(Doubted(engine.publisher.name, tier, part))
        parts = engine.folder.starts.keys()
        for part in slices(parts) if parts else ():
            self._apply(Doubted(engine.publisher.name, TIERS[0], part, parts=True))

    def _reset(self, engine: _Engine) -> None:
        engine.folder.reset()
        self._apply(Cleared(engine.publisher.name, sorted(engine.tiers)))

    def _fold(self, engine: _Engine, batch: Apply) -> None:
        name = engine.publisher.name
        engine.counts["batches"] += 1
        try:
            events = engine.reader.read(batch.payload)
        except BadEvents as error:
            engine.counts["malformed"] += 1
            log.warning("batch %d of %s: %s", batch.seq, name, error)
            self._doubt(engine)  # the batch may have contained removals
            return
        refused = [why for event in events if (why := self._fold_event(engine, event))]
        self._note_left_out(engine)
        if refused:  # once per batch: a doubt covers all known blocks
            log.warning("batch %d of %s: %d refused: %s", batch.seq, name, len(refused), refused[0])
            self._doubt(engine)
            return
        self._apply(Heard(name, "hbm", batch.seq))

    def _note_left_out(self, engine: _Engine) -> None:
        """Say once of each kind of events that they do not count."""
        found = engine.reader.left_out | engine.folder.refused_sizes
        for what in found.keys() - engine.left_out.keys():
            log.warning(
                "%s of %s are not understood, and not in the index", what, engine.publisher.name
            )
        engine.left_out = found

    def _fold_event(self, engine: _Engine, event: Event) -> Exception | None:
        """Apply an event and pass its changes of keys on; returns the error if it was refused."""
        engine.counts["events"] += 1
        try:
            if isinstance(event, EngineStored):
                changes = engine.folder.stored(event, time.monotonic())
            elif isinstance(event, EngineRemoved):
                changes = engine.folder.removed(event)
            else:
                self._reset(engine)
                return None
        except InboxClosed:
            raise
        except (ConductorError, TiffinError) as error:
            engine.counts["refused"] += 1
            return error
        self._hand_on(engine, changes)
        return None

    def _hand_on(self, engine: _Engine, changes: Sequence[Change]) -> None:
        for change in changes:
            engine.tiers.add(change.tier)
            kind = Added if change.added else Removed
            for part in slices(change.keys):
                self._apply(kind(engine.publisher.name, change.tier, part, parts=change.parts))


def _check_endpoint(endpoint: str) -> None:
    if not endpoint.startswith(_SCHEMES) or "*" in endpoint or len(endpoint) > 1024:
        raise InvalidRequest(
            f"{endpoint[:100]!r} is no endpoint to connect to; as in tcp://host:5557 or ipc:///path"
        )


def _numbers(engine: _Engine) -> dict[str, int]:
    counts = engine.folder.counts
    return {
        **{
            name: engine.counts[name]
            for name in (
                "batches",
                "events",
                "malformed",
                "refused",
                "faults",
                "gaps",
                "restarts",
                "asked",
                "replayed",
                "unanswered",
            )
        },
        "parts": len(engine.folder),
        "part_keys": len(engine.folder.starts),
        "waiting_parts": engine.folder.waiting_parts,
        **{name: getattr(counts, name) for name in counts.__slots__},
    }
