"""A conductor that shares its state with peers, any of which can die. Pure.

    core = SharedConductor("host-a:4242:9f3c")
    for raw in core.bulletins(now): ...     # send to all peers, by `replicas/redis_stream.py`
    core.hear(raw, now)                     # handle a bulletin of any peer
    core.settle(now)                        # after all bulletins that had arrived

It decides alone, from its own state: nothing here blocks. Its peers learn of its decisions some
tens of milliseconds later; `docs/conductor/several.md` says what may differ until then.

The conductor that placed a request owns it. The others answer for it (`schedule` with the same id
gives the same decision) and pass its events on to the owner. If the owner is silent for too long,
it counts as dead, and the next conductor that gets a call about the request takes it over.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from dataclasses import dataclass
from math import inf, nextafter
from typing import TYPE_CHECKING, Any

from ..admission import admission
from ..admission.hedging import HedgedRoute
from ..core.conductor import Conductor, avoids
from ..core.pipeline import RefusedRequest, decide
from ..errors import ConductorError, Conflict, InvalidRequest, UnknownRequest
from ..pool.leader import FlipsElsewhere, LeaderLease
from ..records import (
    Decision,
    Load,
    Rejection,
    Request,
    RequestEvent,
    Role,
    Status,
)
from ..state.allowed_hosts import check_hosts
from ..state.input_checks import check_request
from .bulletins import (
    ROWS_MAX,
    SCHEMA_BYTES_MAX,
    EndedRequest,
    Happened,
    HeardBulletin,
    Instance,
    Placed,
    Rows,
    SentSchema,
    pack,
    unpack,
)
from .learnt_instances import News, learn
from .own_bulletins import OwnRows, Registry
from .remote_load import Elsewhere, PeerLoads, SharingSettings, rank, same_prompt
from .request_records import decision_of, flight_of, left_of, placed_word

if TYPE_CHECKING:
    from collections.abc import Callable

    from ..core.inflight_requests import InflightRequest
    from ..core.pipeline import Accepted
    from .bulletins import Word
    from .remote_load import RemoteEntry

# The most peers, since each conductor reads the bulletins of all others.
PEERS_MAX = 64
# The minimum interval between two sends of the full state, however many peers request it.
TELL_ALL_S = 1.0
# Passed-on events, kept until it is clear that the owner was alive to get them; some 200 bytes
# each.
PASSED_ON_MAX = 65_536
# The most events passed on in one interval; beyond, the reporting call gets UnknownRequest.
EVENTS_MAX = 16_384
SCHEMAS_MAX = 256


@dataclass(slots=True)
class _Peer:
    """Another conductor that is alive."""

    seq: int
    heard_at: float


class SharedConductor(Conductor):
    """A `Conductor` that shares its state with peers. Not thread-safe.

    `name` is unique for all time, so a restarted conductor has a new one. `unix_offset_s` is Unix
    time less `now`. The callback `wake` asks for an exchange at once; it must not block. Other
    arguments as of `Conductor`.
    """

    def __init__(
        self,
        name: str,
        *arguments: Any,
        sharing: SharingSettings | None = None,
        unix_offset_s: float = 0.0,
        wake: Callable[[], None] | None = None,
        **named: Any,
    ) -> None:
        super().__init__(*arguments, **named)
        if not 1 <= len(name) <= 256:
            raise InvalidRequest("a conductor's name has 1 to 256 characters")
        self.name = name
        self.sharing = sharing or SharingSettings()
        self.wake = wake
        self._unix_offset_s = unix_offset_s
        self._peers: dict[str, _Peer] = {}
        # No conductor leads until Redis grants the lease (`replicas/redis_stream.py`).
        self.lease = self.steering.lease = LeaderLease(name, self.sharing.lead_s)
        self.steering.elsewhere = FlipsElsewhere(self._peers, self.sharing.dead_s)
        self._loads = PeerLoads(self.cluster)
        self._rows = OwnRows(self.cluster, self.ledger, self.queues)
        self._registry = Registry(self.cluster, unix_offset_s, self._flips)
        self._elsewhere = Elsewhere()
        self._news = News()
        self._refused: dict[str, None] = {}  # peers' instances that can't be registered here
        self._begin_telling()
        # For our in-flight requests: when each was sent to peers last, the oldest first; how often
        # it was taken over; and for those taken over without keys, the previous owner's word.
        self._told_at: OrderedDict[str, float] = OrderedDict()
        self._claims: dict[str, int] = {}
        self._adopted: set[str] = set()
        self._keyless: dict[str, Placed] = {}
        self._schemas: dict[str, str] = {}
        self._passed_on: deque[tuple[float, RequestEvent]] = deque(maxlen=PASSED_ON_MAX)
        self._shared_counts = dict.fromkeys(
            ("heard", "ignored", "gaps", "deaths", "adopted", "yielded", "passed_on", "left_out"), 0
        )

    def _begin_telling(self) -> None:
        self._seq = 0
        self._spoke_at = -inf
        self._asks, self._asked_at = True, -inf
        self._tells_all, self._told_all_at = True, -inf
        # The contents of the next bulletins.
        self._begun: dict[str, None] = {}
        self._ended: list[str] = []
        self._events: list[Happened] = []
        self._heard: dict[str, Load] = {}
        self._changed: dict[str, None] = {}
        self._new_schemas: dict[str, None] = {}

    # -- what callers ask, as of a conductor alone -------------------------------------------------

    def schedule(self, request: Request, now: float) -> Decision | Rejection:
        """See `Conductor.schedule`. A request that another conductor has placed gets the same
        decision."""
        if self.ledger.get(request.id) is not None:
            self._check_adopted(request)
            claim = self._claims.get(request.id)
            outcome = super().schedule(request, now)
            if claim is not None and self.ledger.get(request.id) is not None:
                self._claims[request.id] = claim  # a new decision keeps the takeover count
            return outcome
        entry = self._elsewhere.get(request.id)
        if entry is None:
            return super().schedule(request, now)
        check_request(request)
        if not same_prompt(entry.placed, request):
            raise Conflict(f"request {request.id!r} is in flight with another prompt")
        return self._schedule_placed(entry, request, now)

    def _schedule_placed(
        self, entry: RemoteEntry, request: Request, now: float
    ) -> Decision | Rejection:
        """Schedule a request in flight elsewhere, as the core does with its own."""
        placed = entry.placed
        here = placed.prefill in self.cluster and placed.decode in self.cluster
        stays = here and not avoids(request, self._decision_of(placed, now))
        if stays and not self._is_silent(placed):
            kept = self._kept(entry, request, now)
            if kept is not None:
                return kept
        outcome = decide(self._parts, request, now)
        if isinstance(outcome, RefusedRequest):
            # If an instance is LOST here, its heartbeats may still reach the other conductors.
            kept = self._kept(entry, request, now) if stays else None
            if kept is not None:
                return kept
            found: Decision | Rejection = self._refuse(outcome)
        else:
            found = self._begin(outcome, now)
        # The owner gives the request up: by our higher claim, or by the cancellation passed on.
        self._elsewhere.pop(request.id)
        if isinstance(found, Decision):
            self._claims[request.id] = placed.claim + 1
        elif entry.owner in self._peers and len(self._events) < EVENTS_MAX:
            self._pass_on(RequestEvent(request.id, "cancelled"), now)
        return found

    def observe(self, event: RequestEvent, now: float) -> None:
        """See `Conductor.observe`. An event of a request that is not in flight here is passed on to
        the peers; if its owner is dead, the request is taken over. Raises UnknownRequest if no
        other conductor is alive, EVENTS_MAX events wait, or the takeover is impossible."""
        if event.kind == "finished" and event.request_id in self._adopted:
            flight = self.ledger.get(event.request_id)
            assert flight is not None
            flight.answered_tokens = 0  # not all were counted here: no sample of the answer length
        try:
            super().observe(event, now)
        except UnknownRequest:
            entry = self._elsewhere.get(event.request_id)
            if entry is not None and entry.owner not in self._peers:
                if self._adopt(entry, now) is None:
                    raise
                self.observe(event, now)
            elif not self._peers or len(self._events) >= EVENTS_MAX:
                raise
            else:
                self._pass_on(event, now)

    def recheck(self, request_id: str, now: float) -> Rejection | None:
        """See `Conductor.recheck`. Does nothing for another conductor's request."""
        if self.ledger.get(request_id) is None and self._peers:
            return None
        return super().recheck(request_id, now)

    def decision(self, request_id: str) -> Decision | Rejection | None:
        """See `Conductor.decision`; without candidates if another conductor made the decision."""
        found = super().decision(request_id)
        entry = self._elsewhere.find(request_id) if found is None else None
        return self._decision_of(entry.placed, inf) if entry is not None else found

    def heartbeat(self, instance: str, load: Load, now: float) -> None:
        """See `Conductor.heartbeat`."""
        self._hear_load(instance, load, now)
        if load != Load() or instance not in self._heard:
            self._heard[instance] = load

    def remove(self, instance: str, now: float) -> None:
        """See `Conductor.remove`."""
        self._loads.vacate(self.cluster.row(instance))
        super().remove(instance, now)
        self._heard.pop(instance, None)
        self.steering.elsewhere.pop(instance)

    def requests_at(self, instance: str) -> int:
        """See `Conductor.requests_at`; includes other conductors' requests."""
        return super().requests_at(instance) + self._loads.requests(self.cluster.row(instance))

    def schema(self, model: str, canonical: str) -> None:
        """Share a model's schema with the peers: they follow the events of instances that other
        conductors registered, and need the schema to compute keys. Beyond SCHEMAS_MAX schemas, or
        SCHEMA_BYTES_MAX of one, the peers learn it from the instances themselves."""
        if self._schemas.get(model) == canonical or len(canonical.encode()) > SCHEMA_BYTES_MAX:
            return
        if model in self._schemas or len(self._schemas) < SCHEMAS_MAX:
            self._schemas[model] = canonical
            self._new_schemas[model] = None

    def statistics(self) -> dict[str, Any]:
        """See `Conductor.statistics`; `sharing` beside."""
        numbers = {
            **self._shared_counts,
            "peers": len(self._peers),
            "requests_elsewhere": len(self._elsewhere),
        }
        return {**super().statistics(), "sharing": numbers}

    # -- speaking ----------------------------------------------------------------------------------

    def bulletins(self, now: float) -> list[bytes]:
        """The bulletins to send now; none if nothing changed and the last bulletin is recent."""
        whole = self._tells_all and now >= self._told_all_at + TELL_ALL_S
        asks = self._asks and now >= self._asked_at + TELL_ALL_S
        words = self._words(now, whole=whole)
        silent = now < self._spoke_at + self.sharing.dead_s / 4
        if not words and silent and not whole and not asks:
            return []
        packed, left_out = pack(self.name, self._seq, words, asks=asks, whole=whole)
        self._seq += len(packed)
        self._spoke_at = now
        self._shared_counts["left_out"] += left_out
        if whole:
            self._tells_all, self._told_all_at = False, now
        if asks:
            self._asks, self._asked_at = False, now
        return packed

    def interrupted(self) -> None:
        """Handle a lost connection, in which bulletins may be lost in both directions: the next
        bulletin has the full state, and requests it of all peers."""
        self._asks = self._tells_all = True

    def news(self) -> News:
        """The news from peers since the last call."""
        news, self._news = self._news, News()
        return news

    @property
    def peers(self) -> list[str]:
        """The names of the other conductors that are alive."""
        return list(self._peers)

    # -- hearing -----------------------------------------------------------------------------------

    def hear(self, raw: bytes, now: float) -> None:
        """Handle a bulletin of any conductor, also our own, which is ignored. Never raises: invalid
        bulletins and words are counted."""
        bulletin = unpack(raw)
        if bulletin is None:
            self._shared_counts["ignored"] += 1
            return
        by = bulletin.by
        if by == self.name or (by not in self._peers and len(self._peers) >= PEERS_MAX):
            return
        peer = self._peers.get(by)
        if peer is not None and bulletin.seq <= peer.seq:
            return  # a duplicate
        missed = peer is None or bulletin.seq > peer.seq + 1
        if missed and not bulletin.whole:
            self._shared_counts["gaps"] += peer is not None
            self._asks = True
        self._peers[by] = _Peer(bulletin.seq, now)
        self._shared_counts["heard"] += 1
        self._tells_all |= bulletin.asks
        if bulletin.whole:
            self._loads.forget(by, now)
        self._changed |= dict.fromkeys(self._registry.changed(now))
        for word in bulletin.words:
            try:
                self._take(by, word, now)
            except ConductorError as error:  # for example a profile that is not on this machine
                self._shared_counts["ignored"] += 1
                if isinstance(word, Instance):
                    self._refused[word.instance] = None
                    learn(self._news.refused, (word.instance, str(error)))

    def settle(self, now: float) -> None:
        """Call it after all bulletins that had arrived: peers silent for too long count as dead,
        and the load columns are updated."""
        late = now - self.sharing.dead_s
        for name in [name for name, peer in self._peers.items() if peer.heard_at <= late]:
            self._bury(name, now)
        while self._passed_on and self._passed_on[0][0] <= late - self.sharing.dead_s:
            self._passed_on.popleft()
        self._elsewhere.expire(now)
        self._loads.blend(now)

    def _take(self, by: str, word: Word, now: float) -> None:
        if isinstance(word, Rows):
            self._loads.tell(by, word.rows, now)
        elif isinstance(word, Placed):
            self._hear_placed(by, word, now)
        elif isinstance(word, EndedRequest):
            for request_id in word.request_ids:
                self._elsewhere.ended(by, request_id)
        elif isinstance(word, Happened):
            event = RequestEvent(word.request_id, word.kind, word.tokens, word.route)
            if self.ledger.get(event.request_id) is not None:
                self.observe(event, now)
                learn(self._news.events, event)
        elif isinstance(word, HeardBulletin):
            if word.instance in self.cluster:
                self._hear_load(word.instance, word.load, now)
            else:
                self._asks |= word.instance not in self._refused
        elif isinstance(word, Instance):
            self._refused.pop(word.instance, None)
            self._hear_instance(word, now)
        elif self._schemas.get(word.model) != word.canonical and (
            word.model in self._schemas or len(self._schemas) < SCHEMAS_MAX
        ):
            self._schemas[word.model] = word.canonical
            learn(self._news.schemas, (word.model, word.canonical))

    def _hear_placed(self, by: str, placed: Placed, now: float) -> None:
        """Another conductor has a request in flight. If it is in flight here too, one of the two
        conductors gives it up."""
        flight = self.ledger.get(placed.request_id)
        if flight is None:
            known = self._elsewhere.get(placed.request_id)
            if known is None and not placed.claim and placed.prefill in self.cluster:
                computed = max(placed.prompt_tokens - placed.cached_tokens, 0)
                self.steering.came(placed.model, placed.prompt_tokens, computed, now)
            self._elsewhere.put(by, placed, now)
        elif rank(self._placed(flight), self.name) > rank(placed, by):
            self._begun[placed.request_id] = None  # send ours again
        else:
            self._end(flight, now, None)
            self._elsewhere.put(by, placed, now)
            self._shared_counts["yielded"] += 1

    def _hear_load(self, instance: str, load: Load, now: float) -> None:
        super().heartbeat(instance, load, now)
        self._loads.report(self.cluster.row(instance), load, now)

    def _hear_instance(self, word: Instance, now: float) -> None:
        is_news = self._registry.is_news(word)
        if not is_news:
            if is_news is False:  # the sender has missed a later change: send it again
                self._changed[word.instance] = None
            return
        if word.spec is None:
            if word.instance in self.cluster:
                self.remove(word.instance, now)
                learn(self._news.left, word.instance)
            self._registry.settled(word.instance, word.changed_at)
            return
        role = Role(word.role) if word.role in tuple(Role) else word.spec.role
        if word.spec.id != word.instance:
            raise InvalidRequest(f"{word.instance!r} is registered as {word.spec.id!r}")
        check_hosts(word.spec, self.settings.instances.allowed_hosts)
        # A flip of ours that has ended, which the sender had not learnt; only we know its outcome.
        past = word.flip_by == self.name != self._flips().get(word.instance, ("", ""))[1]
        here = word.instance in self.cluster
        draining = word.draining
        if past:
            draining = here and bool(self.cluster.draining[self.cluster.row(word.instance)])
        if not here or self.cluster.spec(word.instance) != word.spec:
            self.register(word.spec, now)
            learn(self._news.joined, word.spec)
        row = self.cluster.row(word.instance)
        if self.cluster.role(row) is not role:
            self.cluster.set_role(row, role)
        self.cluster.assign(word.instance, on=not draining)
        self._hear_flip(word, now)
        self._registry.settled(word.instance, word.changed_at)
        if past:
            self._registry.settled(word.instance, nextafter(word.changed_at, inf))
            self._changed[word.instance] = None

    def _hear_flip(self, word: Instance, now: float) -> None:
        """Record which other conductor flips the instance, if any."""
        if word.flip_by == self.name:
            return
        role = Role(word.flip) if word.flip in tuple(Role) and word.flip_by else None
        self.steering.flips_elsewhere(word.instance, role, word.flip_by, now)
        if word.draining and role is None:
            self.steering.keep_out(word.instance, now)

    def _flips(self) -> dict[str, tuple[str, str]]:
        """For peers: each instance in a role flip, its new role, and the conductor's name."""
        flips = self.steering.flipping()
        return {name: (role.value, by or self.name) for name, (role, by) in flips.items()}

    def _bury(self, name: str, now: float) -> None:
        """Remove a dead conductor. This conductor handles the events it passed on to it in
        vain."""
        del self._peers[name]
        self._loads.forget(name, now)
        self._shared_counts["deaths"] += 1
        kept, self._passed_on = self._passed_on, deque(maxlen=PASSED_ON_MAX)
        taken: set[str] = set()
        for at, event in kept:
            entry = self._elsewhere.get(event.request_id)
            if event.request_id in taken or (entry is not None and entry.owner == name):
                taken.add(event.request_id)
                self._make_up(event, now)
            else:
                self._passed_on.append((at, event))

    def _make_up(self, event: RequestEvent, now: float) -> None:
        try:
            self.observe(event, now)
        except UnknownRequest:  # its instances have gone, too
            self._shared_counts["ignored"] += 1

    # -- requests of others ------------------------------------------------------------------------

    def _pass_on(self, event: RequestEvent, now: float) -> None:
        self._events.append(Happened(event.request_id, event.kind, event.tokens, event.route))
        self._passed_on.append((now, event))
        self._shared_counts["passed_on"] += 1

    def _is_silent(self, placed: Placed) -> bool:
        rows = map(self.cluster.row, left_of(placed))
        return any(self.cluster.status[row] is Status.LOST for row in rows)

    def _kept(self, entry: RemoteEntry, request: Request, now: float) -> Decision | None:
        """The existing decision, kept by the owner or taken over from a dead owner; None if a
        takeover is impossible."""
        if entry.owner in self._peers:
            return self._decision_of(entry.placed, now)
        flight = self._adopt(entry, now, request)
        return flight.decision if flight is not None else None

    def _check_adopted(self, request: Request) -> None:
        """Complete a request that was taken over without its keys, which arrive with this call.
        Raises Conflict if it has another prompt."""
        placed = self._keyless.get(request.id)
        flight = self.ledger.get(request.id)
        if placed is None or flight is None:
            return
        check_request(request)
        if not same_prompt(placed, request):
            raise Conflict(f"request {request.id!r} is in flight with another prompt")
        flight.request = request
        del self._keyless[request.id]

    def _adopt(
        self, entry: RemoteEntry, now: float, request: Request | None = None
    ) -> InflightRequest | None:
        """Take a request over; None if an instance has left, its queue is full, or the request's
        class of priority does not exist here.

        The request is no sample for the estimates of latency and of answer lengths: its earlier
        events were counted at another conductor.
        """
        placed = entry.placed
        if placed.prefill not in self.cluster or placed.decode not in self.cluster:
            return None
        at, ttl_s = self._local(placed.decided_at, now), self.settings.core.decision_ttl_s
        flight = flight_of(placed, request, self.cluster, decided_at=at, ttl_s=ttl_s, now=now)
        try:
            preempted = self.ledger.begin(flight, now)
        except ConductorError:  # a class of priority that does not exist here
            return None
        if preempted is None:
            return None
        self._make_way(preempted, placed.request_id, now)
        self._elsewhere.pop(placed.request_id)
        self._claims[placed.request_id] = placed.claim + 1
        self._adopted.add(placed.request_id)
        if request is None:
            self._keyless[placed.request_id] = placed
        self._begun[placed.request_id] = None
        self._shared_counts["adopted"] += 1
        self._expect(flight, placed, now)
        return flight

    def _expect(self, flight: InflightRequest, placed: Placed, now: float) -> None:
        """Reserve the expected decode of a request that was taken over, in its current phase."""
        output_tokens = max(sum(flight.shares.values()) - placed.prompt_tokens, 1)
        decode_s = admission.expected_decode_s(
            self.settings.admission, output_tokens, placed.predicted_tbt_s
        )
        context = placed.prompt_tokens + output_tokens // 2
        decided_at = self._local(placed.decided_at, now)
        ready_at = max(now, decided_at + placed.predicted_ttft_s)
        self.horizon.promise(placed.request_id, flight.decode_row, context, ready_at, decode_s, now)
        if placed.prefilled:
            self._prefilled(flight, HedgedRoute(placed.prefill, placed.decode), now)

    def _decision_of(self, placed: Placed, now: float) -> Decision:
        return decision_of(placed, self._local(placed.decided_at, now))

    def _local(self, unix_s: float, now: float) -> float:
        """Another machine's time on our clock; always in the past, whatever that machine's clock
        says."""
        return min(unix_s - self._unix_offset_s, nextafter(now, -inf))

    # -- words -------------------------------------------------------------------------------------

    def _words(self, now: float, *, whole: bool) -> list[Word]:
        self._changed |= dict.fromkeys(self._registry.changed(now))
        if whole:
            self._changed |= dict.fromkeys(self.cluster.names)
            self._new_schemas |= dict.fromkeys(self._schemas)
            self._begun |= dict.fromkeys(flight.request.id for flight in self.ledger)
        words: list[Word] = [self._registry.word(name) for name in self._changed]
        words += [SentSchema(model, self._schemas[model]) for model in self._new_schemas]
        words += [HeardBulletin(name, load) for name, load in self._heard.items()]
        words += self._placed_words(now)
        words += self._events
        gone = [name for name in self._ended if self.ledger.get(name) is None]
        words += [EndedRequest(gone[at : at + ROWS_MAX]) for at in range(0, len(gone), ROWS_MAX)]
        rows = self._rows.changed(now, self.settings.queue.classes[-1].name, whole=whole)
        words += [Rows(rows[at : at + ROWS_MAX]) for at in range(0, len(rows), ROWS_MAX)]
        self._changed, self._new_schemas, self._heard = {}, {}, {}
        self._events, self._ended = [], []
        return words

    def _placed_words(self, now: float) -> list[Word]:
        """Words for new in-flight requests, and renewals of those last sent half a TTL ago."""
        renew_at = now - self.settings.core.decision_ttl_s / 2
        while self._told_at and next(iter(self._told_at.values())) <= renew_at:
            self._begun[self._told_at.popitem(last=False)[0]] = None
        words: list[Word] = []
        for request_id in self._begun:
            flight = self.ledger.get(request_id)
            if flight is None:
                continue
            self._told_at[request_id] = now
            self._told_at.move_to_end(request_id)
            if flight.prefill_row >= 0 and flight.decode_row >= 0 and flight.shares:
                words.append(self._placed(flight))
        self._begun = {}
        return words

    def _placed(self, flight: InflightRequest) -> Placed:
        request_id = flight.request.id
        return placed_word(
            flight,
            self.cluster,
            claim=self._claims.get(request_id, 0),
            keyless=self._keyless.get(request_id),
            ttl_s=self.settings.core.decision_ttl_s,
            unix_offset_s=self._unix_offset_s,
        )

    # -- what happens inside -----------------------------------------------------------------------

    def _begin(self, accepted: Accepted, now: float) -> Decision | Rejection:
        outcome = super()._begin(accepted, now)
        if isinstance(outcome, Decision):
            self._begun[outcome.request_id] = None
            if len(self._begun) == self.sharing.burst and self.wake is not None:
                self.wake()
        return outcome

    def _end(self, flight: InflightRequest, now: float, why: str | None) -> None:
        super()._end(flight, now, why)
        request_id = flight.request.id
        if self._told_at.pop(request_id, None) is not None:
            self._ended.append(request_id)
        self._claims.pop(request_id, None)
        self._adopted.discard(request_id)
        self._keyless.pop(request_id, None)
