"""How many instances of which role: ratio, scale, role flips, and why. Pure.

Once per interval the planner looks at what came, forecasts what will come, computes what one
instance can serve within the objectives (`sizing.py`), and compares:

- *ratio*: of the instances that there are, how many should prefill;
- *scale*: how many instances there should be, within the budget;
- *flip*: which instance should change its role now, if any.

Scale is advice: instances come and go by somebody else's hand. A flip is carried out by `Flips`, in
the mode `act`. What must not happen is flapping: flips cost a drained instance and its cache each.
So a flip has to be due (the fleet would be fuller than `flip_above`), worth it (it serves `margin`
more afterwards), asked for in `confirm` intervals in a row, and later than `cooldown_s` after the
last one. Since capacity, not load, is what a flip has to improve, noise in the load does not turn
the ratio back and forth: going back would make the fleet serve less.

Every number that decided is in `Plan.reasons`, in every mode: `advise` says what `act` would do.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Literal, NamedTuple

import msgspec
from msgspec import Meta

from .errors import ConductorError
from .flips import Flips, FlipSettings
from .forecast import forecast
from .records import Role
from .sizing import Capacity, Goals, Work, best_split, capacity, fleet_rate, flipped

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from .flips import Action, Member

Factor = Annotated[float, Meta(gt=0, le=1)]


class PlannerSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What is planned for, and how readily."""

    mode: Literal["off", "advise", "act"] = "advise"
    """`advise` only says what `act` would do."""

    interval_s: Annotated[float, Meta(ge=1, le=86_400)] = 180.0
    """Between plans; Dynamo's default."""

    window: Annotated[int, Meta(ge=1, le=10_000)] = 50
    """Intervals that forecasts look back on; Dynamo's default."""

    predictor: Literal["constant", "linear", "holt-winters"] = "constant"
    """See `forecast.py`."""

    season_intervals: Annotated[int, Meta(ge=0, le=10_000)] = 0
    """Intervals per season for `holt-winters`; 0 for none."""

    ttft_s: Annotated[float, Meta(gt=0, le=3600)] = 10.0
    """Mean TTFT to plan for (Mooncake's P:D experiment, FAST '25, figure 15)."""

    tbt_s: Annotated[float, Meta(gt=0, le=60)] = 0.1
    """Time between tokens to plan for (the same)."""

    utilisation_max: Factor = 0.9
    """A prefill instance is not planned fuller, whatever the TTFT would allow."""

    flip_above: Factor = 0.8
    """Below this load of the fleet nothing is flipped, and scale aims at it."""

    margin: Annotated[float, Meta(ge=0.01, le=10)] = 0.1
    """How much more a fleet has to serve after a flip."""

    confirm: Annotated[int, Meta(ge=1, le=100)] = 3
    """Intervals in a row that have to ask for the same flip, or for fewer instances."""

    cooldown_s: Annotated[float, Meta(ge=0, le=86_400)] = 600.0
    """After the end of a flip, before the next."""

    instances_max: Annotated[int, Meta(ge=0, le=16_384)] = 0
    """The most instances that may be advised; 0 for no limit."""

    flips: FlipSettings = FlipSettings()
    """How a flip goes on, and how many instances each role keeps."""


class Reason(NamedTuple):
    """One number behind a plan, and where it comes from."""

    name: str
    value: float
    unit: str
    why: str


@dataclass(frozen=True, slots=True)
class Plan:
    """What should be done. `prefill`, `decode` and `mixed` are ready now; `best_prefill` of those
    that are not mixed should prefill. `instances_wanted` should there be; `flip` is (instance, new
    role), and `flip_now` whether it is carried out; `held_back` says why not."""

    at: float
    mode: Literal["off", "advise", "act"]
    prefill: int
    decode: int
    mixed: int
    load: float
    serves_rate: float
    best_prefill: int
    instances_wanted: int
    flip: tuple[str, Role] | None = None
    flip_now: bool = False
    held_back: str = ""
    reasons: tuple[Reason, ...] = ()
    actions: tuple[Action, ...] = field(default=(), repr=False)

    def __str__(self) -> str:
        lines = [
            f"load {self.load:.2f} of {self.serves_rate:.2f} requests/s; "
            f"P:D {self.prefill}:{self.decode}, best {self.best_prefill}:"
            f"{self.prefill + self.decode - self.best_prefill}; "
            f"{self.prefill + self.decode + self.mixed} instances, {self.instances_wanted} wanted"
        ]
        if self.flip is not None:
            does = "flip" if self.flip_now else f"would flip ({self.held_back})"
            lines.append(f"{does}: {self.flip[0]} to {self.flip[1]}")
        lines += [f"  {r.name} = {r.value:.4g} {r.unit}: {r.why}" for r in self.reasons]
        return "\n".join(lines)


@dataclass(frozen=True, slots=True)
class Observed:
    """One interval. Sums over the requests that came in it; factors are the calibration's."""

    seconds: float
    requests: int
    prompt_tokens: float = 0.0
    computed_tokens: float = 0.0
    computed_tokens_squared: float = 0.0
    output_tokens: float = 0.0
    answered: int = 0
    prefill_factor: float = 1.0
    decode_factor: float = 1.0


class Meter:
    """Adds up requests until the interval ends."""

    def __init__(self, now: float) -> None:
        self._begin(now)

    def came(self, prompt_tokens: int, computed_tokens: int) -> None:
        """A request was scheduled; so many tokens of its prompt are not cached."""
        self._requests += 1
        self._prompt += prompt_tokens
        self._computed += computed_tokens
        self._squared += float(computed_tokens) ** 2

    def answered(self, output_tokens: int) -> None:
        """A request has ended, with so many tokens."""
        self._answered += 1
        self._output += output_tokens

    def close(
        self, now: float, *, prefill_factor: float = 1.0, decode_factor: float = 1.0
    ) -> Observed:
        """The interval that ends now; the next one begins."""
        found = Observed(
            max(now - self._began_at, 1e-9),
            self._requests,
            self._prompt,
            self._computed,
            self._squared,
            self._output,
            self._answered,
            prefill_factor,
            decode_factor,
        )
        self._begin(now)
        return found

    def _begin(self, now: float) -> None:
        self._began_at = now
        self._requests = self._answered = 0
        self._prompt = self._computed = self._squared = self._output = 0.0


class _Means(NamedTuple):
    """Per request, of one interval."""

    rate: float
    prompt_tokens: float
    computed_tokens: float
    output_tokens: float
    variation: float


class Planner:
    """Plans for one model's instances. `flips` are those under way; `elsewhere` names instances
    that others flip. Not thread-safe."""

    def __init__(
        self, settings: PlannerSettings | None = None, elsewhere: Collection[str] = ()
    ) -> None:
        self.settings = settings or PlannerSettings()
        self.flips = Flips(self.settings.flips, elsewhere)
        self._flipped_elsewhere_at = -math.inf
        self._history: deque[_Means] = deque(maxlen=self.settings.window)
        self._factors = (1.0, 1.0)
        # Why the last forecast is the constant predictor's, though another was asked for.
        self.forecast_error = ""
        # The same wish, so many intervals in a row.
        self._wish: tuple[Role, Role] | None = None
        self._wished = self._fewer = 0

    def configure(self, settings: PlannerSettings) -> None:
        """From now on; flips under way go on by the new times."""
        self.settings = settings
        self.flips.settings = settings.flips
        self._history = deque(self._history, maxlen=settings.window)

    def observe(self, interval: Observed) -> None:
        """What came in the interval that has ended. An idle one counts for the rate alone: what
        requests are like is as it was."""
        self._factors = interval.prefill_factor, interval.decode_factor
        last = self._history[-1] if self._history else _Means(0.0, 0.0, 0.0, 0.0, 1.0)
        count, seconds = interval.requests, interval.seconds
        if not count:
            self._history.append(last._replace(rate=0.0))
            return
        mean = interval.computed_tokens / count
        variance = max(0.0, interval.computed_tokens_squared / count - mean * mean)
        output = interval.output_tokens / interval.answered if interval.answered else 0.0
        self._history.append(
            _Means(
                count / seconds,
                interval.prompt_tokens / count,
                mean,
                output or last.output_tokens,
                math.sqrt(variance) / mean if mean else 0.0,
            )
        )

    def flipped_elsewhere(self, now: float) -> None:
        """A flip by somebody else has ended: the next one waits as it does after our own."""
        self._flipped_elsewhere_at = now

    def plan(self, fleet: Sequence[Member], now: float, *, leads: bool = True) -> Plan | None:
        """What to do, once per interval, after `observe`. None if there is nothing to plan by: no
        ready instance, or no request was ever seen. Where the predictor fails, the constant one
        stands in for this interval, and `forecast_error` says why. Who does not lead begins no
        flip, and is ready to as soon as it leads."""
        ready = [member for member in fleet if member.ready]
        if self.settings.mode == "off" or not ready or not self._history:
            return None
        rate, work = self._expected()
        if not work.prompt_tokens:
            return None
        goals = Goals(self.settings.ttft_s, self.settings.tbt_s, self.settings.utilisation_max)
        capacities = {member.id: capacity(member, work, goals) for member in ready}
        serves = fleet_rate((member.role, capacities[member.id]) for member in ready)
        load = rate / serves if serves else math.inf if rate else 0.0
        mean = _mean(list(capacities.values()))
        needed = self._needed(rate, mean)
        wanted = self._scale(len(ready), needed, ready)
        counts = {role: sum(m.role is role for m in ready) for role in Role}
        flippable = counts[Role.PREFILL] + counts[Role.DECODE]
        least = (self.settings.flips.prefill_min, self.settings.flips.decode_min)
        flip, after = self._best_flip(ready, capacities, serves)
        reasons = [
            *self._reasons(rate, work, mean, needed),
            Reason("serves", serves, "requests/s", "all instances in their roles"),
            Reason("load", load, "", f"expected over served; flips begin at {self._above:g}"),
        ]
        if flip is not None:
            why = f"after the best flip; it has to be {1 + self.settings.margin:g} of now"
            reasons.append(Reason("serves_after_flip", after, "requests/s", why))
        held_back = self._held_back(flip, load, serves, after, ready, now)
        if flip is not None and not held_back and not leads:
            held_back = "this conductor does not lead"
        actions: list[Action] = []
        flip_now = flip is not None and not held_back
        if flip is not None and flip_now:
            why = f"serves {after:.2f} requests/s instead of {serves:.2f}, {rate:.2f} expected"
            actions = self.flips.begin(*flip, fleet, now, why)
            self._wish, self._wished = None, 0
        return Plan(
            now,
            self.settings.mode,
            counts[Role.PREFILL],
            counts[Role.DECODE],
            counts[Role.MIXED],
            load,
            serves,
            best_split(flippable, *needed, least),
            wanted,
            flip,
            flip_now,
            held_back,
            tuple(reasons),
            tuple(actions),
        )

    # -- parts -------------------------------------------------------------------------------------

    @property
    def _above(self) -> float:
        return self.settings.flip_above

    def _expected(self) -> tuple[float, Work]:
        """Requests per second, and what they are like, in the next interval."""
        columns = [list(column) for column in zip(*self._history, strict=True)]
        self.forecast_error = ""
        try:
            found = self._forecast(self.settings.predictor, columns)
        except (ConductorError, ValueError, ArithmeticError, LookupError) as error:
            # Its library is missing, or has found no fit: LinAlgError is a ValueError.
            self.forecast_error = str(error) or type(error).__name__
            found = self._forecast("constant", columns)
        rate, prompt, computed, output, variation = found
        return rate, Work(prompt, min(computed, prompt), output, variation, *self._factors)

    def _forecast(self, predictor: str, columns: list[list[float]]) -> list[float]:
        return [forecast(predictor, one, self.settings.season_intervals) for one in columns]

    def _needed(self, rate: float, mean: Capacity) -> tuple[float, float]:
        """Average instances that prefill and decode would take, filled up to `flip_above`."""
        rate = rate / self._above
        return rate / mean.prefill_rate, rate / mean.decode_rate

    def _scale(self, now: int, needed: tuple[float, float], ready: Sequence[Member]) -> int:
        """How many instances there should be. More at once, fewer only after `confirm` intervals;
        never beyond the budget, never below what the roles keep."""
        own, least = (
            self.settings,
            (self.settings.flips.prefill_min, self.settings.flips.decode_min),
        )
        if all(member.role is Role.MIXED for member in ready):
            wanted = max(math.ceil(round(sum(needed), 9)), *least, 1)
        else:
            whole = [math.ceil(round(count, 9)) for count in needed]
            wanted = max(whole[0], least[0]) + max(whole[1], least[1])
        if own.instances_max:
            wanted = min(wanted, own.instances_max)
        over_budget = bool(own.instances_max) and now > own.instances_max
        self._fewer = self._fewer + 1 if wanted < now else 0
        if wanted < now and self._fewer < own.confirm and not over_budget:
            return now
        return wanted

    def _best_flip(
        self,
        ready: Sequence[Member],
        capacities: dict[str, Capacity],
        serves: float,
    ) -> tuple[tuple[str, Role] | None, float]:
        """The flip after which the fleet serves most, if that is more; of equals the instance with
        the fewest requests. Mixed ones are what they are."""
        # Of those that are alike the one with the fewest requests, or a thousand take a second.
        alike: dict[tuple[Role, Capacity], Member] = {}
        for member in sorted(ready, key=lambda m: (m.requests, m.id)):
            if member.role is not Role.MIXED:
                alike.setdefault((member.role, capacities[member.id]), member)
        best: tuple[float, int, str] | None = None
        choice: tuple[str, Role] | None = None
        for member in alike.values():
            new = Role.DECODE if member.role is Role.PREFILL else Role.PREFILL
            after = flipped(ready, capacities, member.id, new)
            rank = (-after, member.requests, member.id)
            if after > serves and (best is None or rank < best):
                best, choice = rank, (member.id, new)
        return choice, serves if best is None else -best[0]

    def _held_back(
        self,
        flip: tuple[str, Role] | None,
        load: float,
        serves: float,
        after: float,
        fleet: Sequence[Member],
        now: float,
    ) -> str:
        """Why a flip is not begun now; "" if it is."""
        own = self.settings
        due = flip is not None and load > self._above and after >= serves * (1 + own.margin)
        if not due:
            self._wish, self._wished = None, 0
        if flip is None:
            return ""
        if load <= self._above:
            return f"a load of {load:.2f} needs no flip"
        if not due:
            return f"it would serve only {after - serves:.2f} requests/s more"
        wish = next(m.role for m in fleet if m.id == flip[0]), flip[1]
        self._wished = self._wished + 1 if wish == self._wish else 1
        self._wish = wish
        if self._wished < own.confirm:
            return f"asked for {self._wished} of {own.confirm} times"
        last = max((f.until for f in self.flips.ended), default=-math.inf)
        last = max(last, self._flipped_elsewhere_at)
        if now < last + own.cooldown_s:
            return "the last flip was too short ago"
        obstacle = self.flips.may_begin(*flip, fleet)
        if obstacle:
            return obstacle
        return "" if own.mode == "act" else "only advice is asked for"

    def _reasons(
        self, rate: float, work: Work, mean: Capacity, needed: tuple[float, float]
    ) -> list[Reason]:
        own = self.settings
        by = f"{own.predictor} over {len(self._history)} intervals"
        if self.forecast_error:
            by = f"the last interval; {own.predictor} failed"
        misses = "; an idle instance misses it" if mean.unattainable else ""
        return [
            Reason("rate", rate, "requests/s", by),
            Reason("prompt", work.prompt_tokens, "tokens", by),
            Reason("computed", work.computed_tokens, "tokens", f"of the prompt; {by}"),
            Reason("output", work.output_tokens, "tokens", by),
            Reason("prefill", mean.prefill_s, "s", f"one prompt, x {work.prefill_factor:g}"),
            Reason(
                "prefill_rate",
                mean.prefill_rate,
                "requests/s",
                f"one instance at a mean TTFT of {own.ttft_s:g} s"
                + (misses if "ttft" in mean.unattainable else ""),
            ),
            Reason("batch", mean.batch, "requests", f"a step is {mean.step_s * 1e3:.1f} ms"),
            Reason(
                "decode_rate",
                mean.decode_rate,
                "requests/s",
                f"one instance at {own.tbt_s:g} s between tokens"
                + (misses if "tbt" in mean.unattainable else ""),
            ),
            Reason("prefill_needed", needed[0], "instances", f"filled to {self._above:g}"),
            Reason("decode_needed", needed[1], "instances", f"filled to {self._above:g}"),
        ]


def _mean(capacities: list[Capacity]) -> Capacity:
    """The average instance."""
    count = len(capacities)
    return Capacity(
        sum(one.prefill_rate for one in capacities) / count,
        sum(one.decode_rate for one in capacities) / count,
        sum(one.prefill_s for one in capacities) / count,
        round(sum(one.batch for one in capacities) / count),
        sum(one.step_s for one in capacities) / count,
        tuple(sorted({name for one in capacities for name in one.unattainable})),
    )
