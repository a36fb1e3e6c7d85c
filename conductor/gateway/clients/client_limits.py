"""Rates, concurrency and daily quotas of all clients. Pure: it decides and counts, and takes `now`.

    enter(client, now) -> Visit      refused: too many at a time, or in a minute, or today
    visit.prompt(tokens, now)        refused: too many tokens in a minute, or today
    visit.leave(answered, now)       what it was; the answer's tokens are charged

A client is the name that the token file gives to a key, or else the key itself.
"""

from __future__ import annotations

import contextlib
import math
from collections import Counter
from typing import TYPE_CHECKING

from ...wire.answers import Refusal
from .token_bucket import TokenBucket

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from .client_settings import ClientSettings

_DAY_S = 86_400.0
_MINUTE_S = 60.0
# When a client comes back that has too many requests under way: one of them may have ended.
_CONCURRENT_RETRY_S = 1.0


class _Client:
    """What one client has used. `name` is that of the configuration, or "" for those without."""

    __slots__ = ("day", "name", "requests", "running", "settings", "today", "tokens")

    def __init__(self, name: str, settings: ClientSettings) -> None:
        self.name = name
        self.settings = settings
        self.running = 0
        self.requests: TokenBucket | None = None
        self.tokens: TokenBucket | None = None
        self.day = -1
        self.today = [0, 0]  # requests and tokens


class ClientLimits:
    """See the module. `wall` gives the Unix time, for days. `share` of the rates and of the
    concurrency is granted here: 1/n in each of n processes. For one event loop."""

    def __init__(
        self,
        settings: Mapping[str, ClientSettings],
        default: ClientSettings,
        *,
        wall: Callable[[], float],
        share: float = 1.0,
    ) -> None:
        self._settings, self._default = settings, default
        self._wall, self._share = wall, share
        self._clients: dict[str, _Client] = {}
        # What has been used today since `spent` was last called, by client.
        self._spent: dict[str, list[int]] = {}
        # Since the start, by client (those of the configuration by name, all others as "") and by
        # kind: "requests", "prompt_tokens", "answer_tokens", or a limit that refused a request.
        self.totals: Counter[tuple[str, str]] = Counter()

    def settings_of(self, client: str) -> ClientSettings:
        """The settings of a client; the default ones if it is not named in the configuration."""
        return self._settings.get(client, self._default)

    def reload(
        self, settings: Mapping[str, ClientSettings], default: ClientSettings, now: float
    ) -> None:
        """Go on with other settings. What was used stays used."""
        self._settings, self._default = settings, default
        for name, client in self._clients.items():
            client.name = name if name in settings else ""
            client.settings = self.settings_of(name)
            self._fit(client, now)

    def enter(self, client: str, now: float) -> Visit:
        """A request of this client. Raises Refusal (429) if it has too many."""
        state = self._state(client, now)
        with self._counted(state):
            self._check(state, now)
        if state.requests is not None:
            state.requests.take(1, now)
        state.running += 1
        self._count(client, state, "requests", 1)
        return Visit(self, client, state)

    def spent(self) -> dict[str, tuple[int, int]]:
        """Requests and tokens that were used since the last call, by client, for the keeper of
        daily quotas."""
        spent, self._spent = self._spent, {}
        return {client: (requests, tokens) for client, (requests, tokens) in spent.items()}

    def unspend(self, spent: Mapping[str, tuple[int, int]]) -> None:
        """Give back what `spent` returned: it could not be kept."""
        for client, (requests, tokens) in spent.items():
            counts = self._spent.setdefault(client, [0, 0])
            counts[0] += requests
            counts[1] += tokens

    def keep(self, day: int, used: Mapping[str, tuple[int, int]], now: float) -> None:
        """Set what clients have used on this day in all processes, `spent` included."""
        for client, (requests, tokens) in used.items():
            state = self._state(client, now)
            more = self._spent.get(client, (0, 0))
            state.day, state.today = day, [requests + more[0], tokens + more[1]]

    @property
    def day(self) -> int:
        """The number of today, UTC, since 1970."""
        return int(self._wall() // _DAY_S)

    # -- inside ------------------------------------------------------------------------------------

    def _check(self, state: _Client, now: float) -> None:
        settings, today = state.settings, self._today(state)
        most = settings.concurrent_requests
        if most is not None and state.running >= max(1, math.floor(most * self._share)):
            raise _limited(
                "concurrent_requests",
                f"{state.running} requests are under way",
                _CONCURRENT_RETRY_S,
            )
        self._check_day("requests", settings.requests_per_day, today[0])
        self._check_day("tokens", settings.tokens_per_day, today[1])
        _check_rate("requests_per_minute", state.requests, now)
        _check_rate("tokens_per_minute", state.tokens, now)

    def _charge(self, client: str, state: _Client, kind: str, tokens: int, now: float) -> None:
        if state.tokens is not None:
            state.tokens.take(tokens, now)
        self._count(client, state, kind, tokens)

    def _check_tokens(self, state: _Client, now: float) -> None:
        with self._counted(state):
            self._check_day("tokens", state.settings.tokens_per_day, self._today(state)[1])
            _check_rate("tokens_per_minute", state.tokens, now)

    @contextlib.contextmanager
    def _counted(self, state: _Client) -> Iterator[None]:
        """Count a refusal by its limit."""
        try:
            yield
        except Refusal as refusal:
            self.totals[state.name, str(refusal.param)] += 1
            raise

    def _count(self, client: str, state: _Client, kind: str, amount: int) -> None:
        self.totals[state.name, kind] += amount
        number = 0 if kind == "requests" else 1
        for counts in (self._today(state), self._spent.setdefault(client, [0, 0])):
            counts[number] += amount

    def _state(self, client: str, now: float) -> _Client:
        state = self._clients.get(client)
        if state is None:
            name = client if client in self._settings else ""
            state = self._clients[client] = _Client(name, self.settings_of(client))
            self._fit(state, now)
        return state

    def _fit(self, state: _Client, now: float) -> None:
        settings = state.settings
        state.requests = self._bucket(state.requests, settings.requests_per_minute, settings, now)
        state.tokens = self._bucket(state.tokens, settings.tokens_per_minute, settings, now)

    def _bucket(
        self,
        before: TokenBucket | None,
        per_minute: int | None,
        settings: ClientSettings,
        now: float,
    ) -> TokenBucket | None:
        if per_minute is None:
            return None
        rate_s = per_minute * self._share / _MINUTE_S
        if before is None:
            return TokenBucket(rate_s, rate_s * settings.burst_s, now)
        before.resize(rate_s, rate_s * settings.burst_s, now)
        return before

    def _today(self, state: _Client) -> list[int]:
        if state.day != self.day:
            state.day, state.today = self.day, [0, 0]
        return state.today

    def _check_day(self, what: str, most: int | None, used: int) -> None:
        if most is not None and used >= most:
            left_s = _DAY_S - self._wall() % _DAY_S
            raise _limited(f"{what}_per_day", f"{used} {what} were used today (UTC)", left_s)


class Visit:
    """One request of a client, from `enter` on; it ends with `leave`."""

    __slots__ = ("_client", "_left", "_limits", "_state")

    def __init__(self, limits: ClientLimits, client: str, state: _Client) -> None:
        self._limits, self._client, self._state = limits, client, state
        self._left = False

    def prompt(self, tokens: int, now: float) -> None:
        """Its prompt has this many tokens. Raises Refusal (429) if the client has used too many."""
        self._limits._check_tokens(self._state, now)
        self._limits._charge(self._client, self._state, "prompt_tokens", tokens, now)

    def limits_left(self, now: float) -> dict[str, str]:
        """OpenAI's headers about the rates that this client has."""
        state, told = self._state, dict[str, str]()
        for kind, bucket in (("requests", state.requests), ("tokens", state.tokens)):
            if bucket is not None:
                bucket.wait_s(now)  # fills it
                told[f"x-ratelimit-limit-{kind}"] = str(round(bucket.rate_s * _MINUTE_S))
                told[f"x-ratelimit-remaining-{kind}"] = str(max(0, math.floor(bucket.level)))
        return told

    def leave(self, answered: int, now: float) -> None:
        """It has ended, with so many tokens of an answer. Idempotent."""
        if not self._left:
            self._left = True
            self._state.running -= 1
            self._limits._charge(self._client, self._state, "answer_tokens", answered, now)


def _check_rate(limit: str, bucket: TokenBucket | None, now: float) -> None:
    wait_s = 0.0 if bucket is None else bucket.wait_s(now)
    if wait_s > 0:
        raise _limited(limit, "this key's rate is used up", wait_s)


def _limited(limit: str, why: str, retry_after_s: float) -> Refusal:
    message = f"{why}, and {limit} is a limit of this key: try again later"
    return Refusal(429, "rate_limit_exceeded", message, param=limit, retry_after_s=retry_after_s)
