"""Makes the lines of a recording from what the service is told and decides. Pure: takes `now`.

What it does while a request is decided is a few assignments; whoever takes the lines (`put`) hashes
and writes them elsewhere.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec

from ..records import Decision, Rejection
from ..state.request_ids import parted
from .lines import HeaderLine, InstanceLine, LeftLine, RequestLine, SettingsLine

if TYPE_CHECKING:
    from collections.abc import Callable

    from ..core.conductor import Conductor
    from ..core.settings import Settings
    from ..records import InstanceSpec, Request, RequestEvent
    from .lines import Line

    # Takes a line, and the keys of its blocks, whose ids are still to be made.
    Put = Callable[[Line, tuple[bytes, ...]], None]

# Requests that have not ended; of more, the oldest are forgotten. The core lets a request expire
# that it hears nothing of, so only a pool with so many at a time gets there.
OPEN_MAX = 100_000
# Digits of times: microseconds.
_DIGITS = 6


@dataclass(slots=True)
class _Open:
    request: Request
    arrived_at: float
    decision: Decision
    decisions: int = 1
    prefilled_at: float | None = None
    first_token_at: float | None = None
    last_token_at: float | None = None
    tokens: int = 0  # after the first one


class Recorder:
    """Records one conductor. For the event loop's thread. Times count from the first `begin`."""

    def __init__(self, put: Put, open_max: int = OPEN_MAX) -> None:
        self._put, self._open_max = put, open_max
        self._began_at = 0.0
        self._open: dict[str, _Open] = {}
        self._settings: Settings | None = None
        self._specs: dict[str, InstanceSpec] = {}
        self._version = -1

    def begin(self, settings: Settings, now: float, unix_s: float) -> None:
        """The recording begins at `now`, which is `unix_s`."""
        self._began_at, self._settings = now, settings
        self._put(HeaderLine(began_at=unix_s, settings=msgspec.to_builtins(settings)), ())

    def look(self, core: Conductor, now: float) -> None:
        """Record what has changed of settings and instances. Cheap if nothing has."""
        if core.settings is not self._settings:
            self._settings = core.settings
            settings = msgspec.to_builtins(core.settings)
            self._put(SettingsLine(at_s=self._s(now), settings=settings), ())
        if core.cluster.version == self._version:
            return
        self._version = core.cluster.version
        specs = {spec.id: spec for spec in core.cluster.specs if spec is not None}
        for gone in self._specs.keys() - specs.keys():
            self._put(LeftLine(at_s=self._s(now), id=gone), ())
        for spec in specs.values():
            if self._specs.get(spec.id) != spec:
                self._put(self._instance(core, spec, now), ())
        self._specs = specs

    def scheduled(self, request: Request, outcome: Decision | Rejection, now: float) -> None:
        """A new decision about a request."""
        known = self._open.get(request.id)
        if isinstance(outcome, Rejection):
            arrived_at = now if known is None else known.arrived_at
            self._open.pop(request.id, None)
            self._rejected(_Open(request, arrived_at, _nowhere(request)), outcome)
        elif known is None:
            if len(self._open) >= self._open_max:
                del self._open[next(iter(self._open))]
            self._open[request.id] = _Open(request, now, outcome)
        else:  # one of its instances has gone, or was excluded: what it has done there is lost
            again = _Open(request, known.arrived_at, outcome, known.decisions + 1)
            self._open[request.id] = again

    def observed(self, event: RequestEvent, now: float) -> None:
        """An event of a request."""
        one = self._open.get(event.request_id)
        if one is None:
            return
        if event.kind == "prefill_done" and one.prefilled_at is None:
            one.prefilled_at = now
        elif event.kind == "first_token" and one.first_token_at is None:
            one.first_token_at = one.last_token_at = now
        elif event.kind in ("tokens", "finished", "cancelled") and event.tokens:
            one.tokens, one.last_token_at = one.tokens + event.tokens, now
        if event.kind in ("finished", "cancelled"):
            self._end(event.request_id, event.kind)

    def rejected(self, rejection: Rejection) -> None:
        """A request that was placed is rejected after all."""
        one = self._open.pop(rejection.request_id, None)
        if one is not None:
            self._rejected(one, rejection)

    def expired(self, request_id: str) -> None:
        """Nobody has said what became of a request."""
        self._end(request_id, "expired")

    def end(self) -> None:
        """The recording ends: what is in flight is written as it stands."""
        for name in list(self._open):
            self._end(name, "unfinished")

    def _end(self, name: str, outcome: str) -> None:
        one = self._open.pop(name, None)
        if one is not None:
            self._write(one, outcome)

    def _rejected(self, one: _Open, why: Rejection) -> None:
        self._write(one, "rejected", why.reason, why.predicted_ttft_s, why.predicted_tbt_s)

    def _write(
        self,
        one: _Open,
        outcome: str,
        reason: str = "",
        ttft_s: float | None = None,
        tbt_s: float | None = None,
    ) -> None:
        request, decision = one.request, one.decision
        if not reason:
            ttft_s, tbt_s = decision.predicted_ttft_s, decision.predicted_tbt_s
        line = RequestLine(
            arrival_s=self._s(one.arrived_at),
            id=parted(request.id)[1],
            tenant=request.tenant,
            model=request.model,
            priority=request.priority,
            prompt_tokens=request.prompt_tokens,
            ttft_objective_s=request.objectives.ttft_s,
            tbt_objective_s=request.objectives.tbt_s,
            output_tokens_expected=request.output_tokens,
            output_tokens_max=request.output_tokens_max,
            outcome=outcome,
            reason=reason,
            decisions=one.decisions,
            policy=decision.policy,
            prefill=decision.prefill,
            decode=decision.decode,
            cached_tokens=decision.cached_tokens,
            predicted_ttft_s=ttft_s,
            predicted_tbt_s=tbt_s,
            prefilled_s=_between_s(one.arrived_at, one.prefilled_at),
            ttft_s=_between_s(one.arrived_at, one.first_token_at),
            tbt_s=_tbt_s(one),
            output_tokens=one.tokens + (one.first_token_at is not None),
        )
        self._put(line, request.keys)

    def _instance(self, core: Conductor, spec: InstanceSpec, now: float) -> InstanceLine:
        return InstanceLine(
            at_s=self._s(now),
            id=spec.id,
            model=spec.model,
            role=core.cluster.role(core.cluster.row(spec.id)).value,
            node=spec.node,
            profile=spec.profile,
            latency=core.latency(spec.id),
            block_tokens=spec.block_tokens,
            block_bytes=spec.block_bytes,
            kv_capacity_tokens=spec.kv_capacity_tokens,
            batch_max=spec.batch_max,
            fetches=spec.fetches,
        )

    def _s(self, at: float) -> float:
        return round(at - self._began_at, _DIGITS)


def _nowhere(request: Request) -> Decision:
    return Decision(request.id, "", "", "", 0.0, 0.0, 0, 0)


def _between_s(begin: float, end: float | None) -> float | None:
    return None if end is None else round(end - begin, _DIGITS)


def _tbt_s(one: _Open) -> float | None:
    first, last = one.first_token_at, one.last_token_at
    if first is None or last is None or not one.tokens:
        return None
    return round((last - first) / one.tokens, _DIGITS)
