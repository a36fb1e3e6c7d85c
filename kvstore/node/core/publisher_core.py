"""The decisions of a node's publisher: which update the directory gets next. Pure.

In order of priority:

    doubts       keys that the directory listed for this node and that a reader did not find here;
                 the publisher checks and removes them
    events       changes as they come, coalesced: a block that was added and removed between two
                 batches is never published
    a round      republishes the whole inventory, slice by slice, at a bounded rate: after each
                 registration, after each outage, and every ten minutes, because a directory may
                 lose any entry

Two rules keep the directory's view equal to the node's:

1. Steps run one after the other. A slice of a round, or a doubt, is compared with the node
   (`Check`) after all earlier events were read and before any later one is: so an entry that is
   stale by the time it is published is corrected by an event that is published after it.
2. A batch whose outcome is unknown (a timeout) is retried unchanged, before any other batch.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from enum import Enum
from itertools import islice
from typing import TYPE_CHECKING

from tiffin.messenger.health import Health

from ...directory.base import HEARTBEAT_S, PUBLISH_KEYS_MAX
from ...errors import InvalidInput
from ...format.header import KEY_BYTES
from .node_core import split_keys

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from .event_log import NodeEvents

# Limit on queued doubts; further ones are dropped, because readers will raise them again.
DOUBTS_MAX = 16_384

# Upper bound on the share of time that a round spends on requests: if some hundred nodes all
# republish after a restart of Redis, no request waits longer for its answer than `TIMEOUT_S`.
ROUND_SHARE = 0.1


@dataclass(frozen=True, slots=True)
class PublisherOptions:
    """The publisher's intervals, rates and limits.

    `poll_s` is the age of an event when it is published. `republish_keys_s` is the maximum rate of
    rounds, in keys per second: 50,000 keys are about 0.2 s of Redis' time; a million blocks are
    published again after 20 s, or later if Redis is slow. Periodic rounds spread over half of
    `republish_s`. `pending_max` bounds the changes queued while the directory is unreachable;
    beyond it, registering under a new number and publishing the whole inventory is cheaper.
    """

    heartbeat_s: float = HEARTBEAT_S
    poll_s: float = 0.05
    batch_keys: int = PUBLISH_KEYS_MAX
    republish_keys_s: float = 50_000.0
    republish_s: float = 600.0
    pending_max: int = 65_536
    retry_first_s: float = 0.1
    retry_max_s: float = 1.0

    def __post_init__(self) -> None:
        if not 1 <= self.batch_keys <= PUBLISH_KEYS_MAX:
            raise InvalidInput(f"batch_keys is 1 to {PUBLISH_KEYS_MAX}, not {self.batch_keys}")
        if self.pending_max < 2 * self.batch_keys:
            raise InvalidInput(f"pending_max is at least two batches, not {self.pending_max}")
        for name in (
            "heartbeat_s",
            "poll_s",
            "republish_keys_s",
            "republish_s",
            "retry_first_s",
            "retry_max_s",
        ):
            if not getattr(self, name) > 0:
                raise InvalidInput(f"{name} must be positive, not {getattr(self, name)}")


@dataclass(frozen=True, slots=True)
class Register:
    """Register the node to get a new number; report `registered`."""


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """Send a heartbeat, which keeps the number valid; report `heard`."""

    number: int


@dataclass(frozen=True, slots=True)
class Withdraw:
    """Withdraw this number, which voids all it published; report `withdrawn`."""

    number: int


@dataclass(frozen=True, slots=True)
class Poll:
    """Ask the node for events after `seq`; report `polled`."""

    seq: int
    limit: int


@dataclass(frozen=True, slots=True)
class TakeInventory:
    """Ask the node for its inventory; report `inventoried`."""


@dataclass(frozen=True, slots=True)
class Check:
    """Ask the node which of `keys` (joined) it has; report `checked`."""

    keys: bytes


@dataclass(frozen=True, slots=True)
class PublishStep:
    """Arguments of `Directory.publish`; report `published`."""

    number: int
    added: list[bytes]
    removed: list[bytes]
    first_seq: int


@dataclass(frozen=True, slots=True)
class Wait:
    """Nothing to do before `until`."""

    until: float


Step = Register | Heartbeat | Withdraw | Poll | TakeInventory | Check | PublishStep | Wait


class _Change(Enum):
    """The pending change of one key; implies what the directory lists for the key now."""

    ADD = 1  # the directory does not list the key: a removal cancels this change
    ADD_AGAIN = 2  # the directory may list the key already: a removal must be published
    REMOVE = 3


class PublisherCore:
    """The state machine of a publisher. Pure: no I/O, no clock, no lock.

    `next` returns one step. The caller carries it out and reports its end with the method that the
    step names, or with `failed` when the directory did not answer. One step at a time.
    """

    def __init__(
        self, options: PublisherOptions | None = None, jitter: Callable[[], float] = random.random
    ) -> None:
        self.options = options or PublisherOptions()
        self.number = 0
        self.healthy = False
        # The node's events: read up to `_seq`, of `_newest_seq`.
        self._seq = self._newest_seq = 0
        self._poll_at = 0.0
        # Set when a slice of a round was compared with the node and not all events are read since:
        # the slice may already contain a change whose event is still to be read.
        self._foretold = False
        # Changes to publish, oldest first, and the batch that is in flight (or to be retried).
        self._pending: dict[bytes, _Change] = {}
        self._batch: PublishStep | None = None
        self._next_seq = 1
        self._sent_at = 0.0
        self._doubts: dict[bytes, None] = {}
        self._checking_doubts = False
        # The round: joined keys, its progress, its rate, and when its next slice and the next round
        # may begin.
        self._round = b""
        self._round_offset = 0
        self._round_rate = self.options.republish_keys_s
        self._round_due = False
        self._round_urgent = True
        self._slice_at = 0.0
        self._next_round_at = 0.0
        self._starting = True  # nothing has been published under this number yet
        self._withdraw = 0
        self._heartbeat_at = 0.0
        self._health = Health(self.options.retry_first_s, self.options.retry_max_s, jitter)
        self._outage = False  # whether a step has failed since the last answered heartbeat

    # -- what next -------------------------------------------------------------------------------

    def next(self, now: float) -> Step:
        """The next step; repeated calls without a report return the same step again."""
        if self.number and not self._starting and now >= self._poll_at:
            step = self._poll()
            if step is not None:
                return step
        if self._health.rests(now):
            return Wait(min(self._health.retry_at, self._next_poll()))
        return self._keep_registered(now) or self._say(now) or self._wait(now)

    def _poll(self) -> Poll | None:
        limit = self.options.batch_keys
        if self._health.well:
            return Poll(self._seq, limit) if len(self._pending) < limit else None
        if len(self._pending) + limit > self.options.pending_max:
            self._start_over(withdraw=True)
            return None
        return Poll(self._seq, limit)

    def _keep_registered(self, now: float) -> Step | None:
        if self._withdraw:
            return Withdraw(self._withdraw)
        if not self.number:
            return Register()
        if now >= self._heartbeat_at:
            return Heartbeat(self.number)
        return None

    def _say(self, now: float) -> Step | None:
        if self._starting or self._round_due:
            return TakeInventory()
        if self._batch is not None:
            self._sent_at = now
            return self._batch
        if self._doubts:
            self._checking_doubts = True
            return Check(b"".join(islice(self._doubts, self.options.batch_keys)))
        if self._pending:
            self._batch = self._take_pending()
            self._sent_at = now
            return self._batch
        if self._round_offset < len(self._round) and now >= self._slice_at:
            self._checking_doubts = False
            end = self._round_offset + self.options.batch_keys * KEY_BYTES
            return Check(self._round[self._round_offset : end])
        return None

    def _wait(self, now: float) -> Step:
        if now >= self._next_round_at and self._round_offset >= len(self._round):
            self._order_round(urgent=False)
            return TakeInventory()
        times = [self._next_poll(), self._heartbeat_at]
        if self._round_offset < len(self._round):
            times.append(self._slice_at)
        else:
            times.append(self._next_round_at)
        return Wait(min(times))

    def _next_poll(self) -> float:
        return self._poll_at if self.number and not self._starting else float("inf")

    def _take_pending(self) -> PublishStep:
        keys = list(islice(self._pending, self.options.batch_keys))
        added: list[bytes] = []
        removed: list[bytes] = []
        for key in keys:
            (removed if self._pending.pop(key) is _Change.REMOVE else added).append(key)
        return self._number_batch(added, removed)

    def _number_batch(self, added: list[bytes], removed: list[bytes]) -> PublishStep:
        batch = PublishStep(self.number, added, removed, self._next_seq)
        self._next_seq += len(added) + len(removed)
        return batch

    def _start_over(self, *, withdraw: bool) -> None:
        """Start over: register under a new number and publish the whole inventory under it.

        Once events are lost, the publisher cannot tell which entries of the directory are stale. A
        new number voids all entries of the old one without listing them.
        """
        self._withdraw = self.number if withdraw else 0
        self.number = 0
        self._batch = None
        self._pending = {}
        self._doubts = {}
        self._round, self._round_offset = b"", 0
        self._starting = True

    def _order_round(self, *, urgent: bool) -> None:
        self._round_due = True
        self._round_urgent = urgent

    # -- reports ---------------------------------------------------------------------------------

    def registered(self, number: int, now: float) -> None:
        """Report of `Register`: the directory gave this number."""
        self._answered()
        self.number = number
        self._next_seq = 1
        self._heartbeat_at = now + self.options.heartbeat_s
        self._outage = False
        self._order_round(urgent=True)

    def heard(self, alive: bool, now: float) -> None:
        """Report of `Heartbeat`; `alive` if the directory still knows the number."""
        self._answered()
        self._heartbeat_at = now + self.options.heartbeat_s
        if not alive:
            self._start_over(withdraw=False)
        elif self._outage:
            # The directory may have lost entries during its outage.
            self._order_round(urgent=True)
        self._outage = False

    def withdrawn(self) -> None:
        """Report of `Withdraw`."""
        self._answered()
        self._withdraw = 0

    def polled(self, events: NodeEvents | None, now: float) -> None:
        """Report of `Poll`: the node's events, or None for a gap."""
        if events is None:
            self._start_over(withdraw=True)
            return
        keys = split_keys(events.keys)
        for tier, is_news, key in zip(events.tiers, events.news, keys, strict=True):
            if not is_news:
                continue  # the directory lists nodes, not their tiers
            if tier:
                news = not self._foretold and key not in self._pending
                self._pending[key] = _Change.ADD if news else _Change.ADD_AGAIN
            elif self._pending.get(key) is _Change.ADD:
                del self._pending[key]
            else:
                self._pending[key] = _Change.REMOVE
        self._seq, self._newest_seq = events.last_seq, events.newest_seq
        behind = self._seq < self._newest_seq
        self._poll_at = now if behind else now + self.options.poll_s
        self._foretold = self._foretold and behind

    def inventoried(self, seq: int, keys: bytes, now: float) -> None:
        """Report of `TakeInventory`: the joined keys of the node's blocks after event `seq`."""
        if self._starting:
            # Nothing was published under this number: the inventory covers all earlier events.
            self._seq = self._newest_seq = seq
            self._pending = {}
            self._starting = False
        options = self.options
        self._round, self._round_offset, self._round_due = keys, 0, False
        self._round_rate = options.republish_keys_s
        if not self._round_urgent:
            calm = len(keys) / KEY_BYTES / (options.republish_s / 2)
            self._round_rate = max(min(calm, self._round_rate), 1.0)
        self._slice_at = now
        self._next_round_at = now + options.republish_s

    def checked(self, keys: bytes, here: bytes) -> None:
        """Report of `Check(keys)`: the node's answer, one byte per key."""
        split = split_keys(keys)
        if self._checking_doubts:
            for key, is_here in zip(split, here, strict=True):
                self._doubts.pop(key, None)
                if not is_here:
                    known = self._pending.get(key)
                    # The directory lists the key: that is why the reader asked this node.
                    if known is None:
                        self._pending[key] = _Change.REMOVE
                    elif known is _Change.ADD:
                        self._pending[key] = _Change.ADD_AGAIN
            return
        assert not self._pending  # changes go before slices, so that no key is in both
        self._round_offset += len(keys)
        self._foretold = True
        added = [key for key, is_here in zip(split, here, strict=True) if is_here]
        if added:
            self._batch = self._number_batch(added, [])

    def published(self, now: float) -> None:
        """Report of `PublishStep`: the directory has accepted the batch."""
        self._answered()
        assert self._batch is not None
        keys = len(self._batch.added) + len(self._batch.removed)
        self._batch = None
        pause = (now - self._sent_at) * (1 / ROUND_SHARE - 1)
        self._slice_at = now + max(keys / self._round_rate, pause)

    def failed(self, now: float) -> None:
        """Report that the directory did not answer a step; starts or extends the back-off."""
        self.healthy = False
        self._health.failed(now)
        self._outage = True
        self._heartbeat_at = now  # after the outage, first check that the number is still valid

    def _answered(self) -> None:
        self.healthy = True
        self._health.answered()

    # -- from readers ----------------------------------------------------------------------------

    def doubt(self, keys: Sequence[bytes]) -> None:
        """Queue doubts: the directory sent readers here for `keys`, which they did not find."""
        if self.number:
            room = DOUBTS_MAX - len(self._doubts)
            self._doubts.update(dict.fromkeys(keys[: max(room, 0)]))

    @property
    def lag(self) -> int:
        """The number of the node's changes that are not yet published."""
        said = self._batch
        sending = len(said.added) + len(said.removed) if said is not None else 0
        return len(self._pending) + sending + self._newest_seq - self._seq
