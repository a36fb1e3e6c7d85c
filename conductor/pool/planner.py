"""How many instances of which role: ratio, scale, role flips, and why. Pure.

Once per interval the planner takes the observed demand, forecasts the next interval's demand,
computes what one instance can serve within the objectives (`capacity_model.py`), and decides:

- *ratio*: of the present instances, how many should prefill;
- *scale*: how many instances there should be, within the budget;
- *flip*: which instance should change its role now, if any.

Scale is advice: an external autoscaler or operator starts and stops instances. In the mode `act`,
`Flips` carries out a flip. Flapping must be avoided, because each flip drains an instance and loses
its cache. So a flip has to be due (the fleet would be fuller than `flip_above`), worth it (the
fleet serves `margin` more afterwards), planned in `confirm` intervals in a row, and later than
`cooldown_s` after the last one. Since a flip has to improve capacity, not load, noise in the load
does not turn the ratio back and forth: a flip back would make the fleet serve less.

Every number behind a decision is in `FleetPlan.reasons`, in every mode: `advise` reports what `act`
would do.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Literal, NamedTuple

import msgspec
from msgspec import Meta

from ..records import Role
from ..state.sliced_work import finished
from .capacity_model import Capacity, Goals, RoleRates, Workload, best_split, capacity
from .demand_forecast import DemandForecast, DemandQuestion
from .prompt_sums import NO_PROMPTS, PromptMoments, PromptSums
from .role_flip import Flips, FlipSettings

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from ..state.sliced_work import Work
    from .role_flip import Action, FleetMember

# Instances whose capacity is computed in one piece: half a millisecond.
_MEMBERS_AT_ONCE = 32
# Instances whose flip is evaluated in one piece: a fifth of a millisecond.
_FLIPS_AT_ONCE = 256

Factor = Annotated[float, Meta(gt=0, le=1)]


class PlannerSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The planner's objectives, and the thresholds for its flips."""

    mode: Literal["off", "advise", "act"] = "advise"
    """`advise` only says what `act` would do."""

    interval_s: Annotated[float, Meta(ge=1, le=86_400)] = 180.0
    """Between plans; Dynamo's default."""

    window: Annotated[int, Meta(ge=1, le=10_000)] = 50
    """Intervals that forecasts look back on; Dynamo's default."""

    predictor: Literal["constant", "linear", "holt-winters"] = "constant"
    """See `demand_forecast.py`."""

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


class PlanReason(NamedTuple):
    """One number behind a plan, and its source."""

    name: str
    value: float
    unit: str
    why: str


@dataclass(frozen=True, slots=True)
class FleetPlan:
    """A plan for one model's instances. `prefill`, `decode` and `mixed` count the ready instances
    of each role; `best_prefill` of those that are not mixed should prefill. `instances_wanted` is
    the advised number of instances; `flip` is (instance, new role), `flip_now` whether it is
    carried out, and `held_back` why not."""

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
    reasons: tuple[PlanReason, ...] = ()
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
class ObservedDemand:
    """The demand in one interval: sums over the requests that were offered in it. The factors are
    the calibration's."""

    seconds: float
    prompts: PromptSums = NO_PROMPTS
    output_tokens: float = 0.0
    answered: int = 0
    prefill_factor: float = 1.0
    decode_factor: float = 1.0


class Meter:
    """Accumulates the demand of the current interval."""

    def __init__(self, now: float) -> None:
        self._prompts = NO_PROMPTS
        self._begin(now)

    def came(self, prompts: PromptSums) -> None:
        """Count requests that were offered, by their sums."""
        self._prompts = self._prompts.plus(prompts)

    def answered(self, output_tokens: int) -> None:
        """Count a request that has ended, with so many output tokens."""
        self._answered += 1
        self._output += output_tokens

    def close(
        self, now: float, *, prefill_factor: float = 1.0, decode_factor: float = 1.0
    ) -> ObservedDemand:
        """End the current interval and begin the next; returns the one that ended."""
        found = ObservedDemand(
            max(now - self._began_at, 1e-9),
            self._prompts,
            self._output,
            self._answered,
            prefill_factor,
            decode_factor,
        )
        self._begin(now)
        return found

    def _begin(self, now: float) -> None:
        self._began_at = now
        self._prompts = NO_PROMPTS
        self._answered, self._output = 0, 0.0


class _Means(NamedTuple):
    """Means per request over one interval, and its request rate; then the fields of
    `PromptMoments`."""

    rate: float
    prompt_tokens: float
    output_tokens: float
    computed: float
    quadratic: float
    computed_squared: float
    computed_quadratic: float
    quadratic_squared: float


class Planner:
    """Plans for one model's instances. `flips` has this conductor's flips; `elsewhere` names
    instances that other conductors flip. Not thread-safe."""

    def __init__(
        self, settings: PlannerSettings | None = None, elsewhere: Collection[str] = ()
    ) -> None:
        self.settings = settings or PlannerSettings()
        self.flips = Flips(self.settings.flips, elsewhere)
        self._flipped_elsewhere_at = -math.inf
        self._history: deque[_Means] = deque(maxlen=self.settings.window)
        self._factors = (1.0, 1.0)
        # Why the last forecast is the constant predictor's, though another one is configured.
        self.forecast_error = ""
        # The wanted flip (old role, new role), and for how many intervals in a row it was wanted.
        self._wish: tuple[Role, Role] | None = None
        self._wished = 0
        # How many instances were wanted in each of the last `confirm` intervals.
        self._wanted: deque[int] = deque(maxlen=self.settings.confirm)

    def configure(self, settings: PlannerSettings) -> None:
        """Apply changed settings; the new time limits also hold for the next steps of flips that
        are under way."""
        self.settings = settings
        self.flips.settings = settings.flips
        self._history = deque(self._history, maxlen=settings.window)
        self._wanted = deque(self._wanted, maxlen=settings.confirm)

    def observe(self, interval: ObservedDemand) -> None:
        """Add the interval that has ended to the history. An idle interval only lowers the rate:
        the means per request stay as they were."""
        self._factors = interval.prefill_factor, interval.decode_factor
        last = self._history[-1] if self._history else _Means(*([0.0] * len(_Means._fields)))
        prompts, seconds = interval.prompts, interval.seconds
        if not prompts.requests:
            self._history.append(last._replace(rate=0.0))
            return
        output = interval.output_tokens / interval.answered if interval.answered else 0.0
        self._history.append(
            _Means(
                prompts.requests / seconds,
                prompts.prompt_tokens / prompts.requests,
                output or last.output_tokens,
                *prompts.moments(),
            )
        )

    def flipped_elsewhere(self, now: float) -> None:
        """Record that another conductor's flip has ended: it starts the cooldown as our own do."""
        self._flipped_elsewhere_at = now

    def question(self) -> DemandQuestion:
        """The forecast that the next plan needs."""
        columns = tuple(zip(*self._history, strict=True))
        return DemandQuestion(self.settings.predictor, columns, self.settings.season_intervals)

    def plan(
        self,
        fleet: Sequence[FleetMember],
        now: float,
        *,
        leads: bool = True,
        forecast: DemandForecast | None = None,
    ) -> FleetPlan | None:
        """See `planning`, which does this in pieces."""
        return finished(self.planning(fleet, now, leads=leads, forecast=forecast))

    def planning(
        self,
        fleet: Sequence[FleetMember],
        now: float,
        *,
        leads: bool = True,
        forecast: DemandForecast | None = None,
    ) -> Work[FleetPlan | None]:
        """The plan of one interval; call it once per interval, after `observe`. `forecast` is the
        answer to `question`; without it the forecast is computed here. None if there is no basis
        for a plan: no ready instance, or no request was ever seen, or the mode is `off`. If the
        predictor fails, the constant predictor replaces it for this interval, and `forecast_error`
        says why. A conductor that does not lead begins no flip, but is ready to begin one as soon
        as it leads."""
        ready = [member for member in fleet if member.ready]
        if self.settings.mode == "off" or not ready or not self._history:
            return None
        rate, work = self._expected(forecast)
        if not work.prompt_tokens:
            return None
        goals = Goals(self.settings.ttft_s, self.settings.tbt_s, self.settings.utilisation_max)
        capacities = yield from _capacities(ready, work, goals)
        rates = RoleRates.of((member.role, capacities[member.id]) for member in ready)
        serves = rates.served()
        yield
        load = rate / serves if serves else math.inf if rate else 0.0
        mean = _mean(list(capacities.values()))
        needed = self._needed(rate, mean)
        wanted = self._scale(len(ready), needed, ready)
        counts = {role: sum(m.role is role for m in ready) for role in Role}
        flippable = counts[Role.PREFILL] + counts[Role.DECODE]
        least = (self.settings.flips.prefill_min, self.settings.flips.decode_min)
        yield
        flip, after = yield from self._best_flip(ready, capacities, rates)
        yield
        reasons = [
            *self._reasons(rate, work, mean, needed),
            PlanReason("serves", serves, "requests/s", "all instances in their roles"),
            PlanReason("load", load, "", f"expected over served; flips begin at {self._above:g}"),
        ]
        if flip is not None:
            why = f"after the best flip; it has to be {1 + self.settings.margin:g} of now"
            reasons.append(PlanReason("serves_after_flip", after, "requests/s", why))
        held_back = self._held_back(flip, load, serves, after, ready, now)
        if flip is not None and not held_back and not leads:
            held_back = "this conductor does not lead"
        actions: list[Action] = []
        flip_now = flip is not None and not held_back
        if flip is not None and flip_now:
            why = f"serves {after:.2f} requests/s instead of {serves:.2f}, {rate:.2f} expected"
            actions = self.flips.begin(*flip, fleet, now, why)
            self._wish, self._wished = None, 0
        return FleetPlan(
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

    def _expected(self, forecast: DemandForecast | None) -> tuple[float, Workload]:
        """Requests per second, and the average request, in the next interval."""
        found = forecast or self.question().answer()
        self.forecast_error = found.error
        rate, prompt, output, *means = found.values
        moments, (prefill, decode) = PromptMoments(*means), self._factors
        work = Workload(
            prompt,
            min(moments.computed, prompt),
            output,
            prefill_factor=prefill,
            decode_factor=decode,
            moments=moments,
        )
        return rate, work

    def _needed(self, rate: float, mean: Capacity) -> tuple[float, float]:
        """How many average instances prefill and decode need, each filled up to `flip_above`."""
        rate = rate / self._above
        return rate / mean.prefill_rate, rate / mean.decode_rate

    def _scale(self, now: int, needed: tuple[float, float], ready: Sequence[FleetMember]) -> int:
        """How many instances there should be. Scaling up takes effect at once, scaling down only
        as far as the last `confirm` intervals agree, or at once if over the budget. The result
        respects the roles' minimum and, above all, the budget."""
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
        self._wanted.append(wanted)
        if own.instances_max and now > own.instances_max:
            return wanted
        agreed = max(self._wanted) if len(self._wanted) == own.confirm else now
        return max(wanted, min(now, agreed))

    def _best_flip(
        self,
        ready: Sequence[FleetMember],
        capacities: dict[str, Capacity],
        rates: RoleRates,
    ) -> Work[tuple[tuple[str, Role] | None, float]]:
        """The flip after which the fleet serves most, if that is more than now, and what it serves
        then; of equal candidates the instance with the fewest requests. Mixed instances are never
        flipped."""
        serves = rates.served()
        best: tuple[float, int, str] | None = None
        choice: tuple[str, Role] | None = None
        for at, member in enumerate(ready):
            if at % _FLIPS_AT_ONCE == _FLIPS_AT_ONCE - 1:
                yield
            if member.role is Role.MIXED:
                continue
            new = Role.DECODE if member.role is Role.PREFILL else Role.PREFILL
            after = rates.flipped(capacities[member.id], new).served()
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
        fleet: Sequence[FleetMember],
        now: float,
    ) -> str:
        """Why a flip does not begin now; "" if it does."""
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
        self, rate: float, work: Workload, mean: Capacity, needed: tuple[float, float]
    ) -> list[PlanReason]:
        own = self.settings
        by = f"{own.predictor} over {len(self._history)} intervals"
        if self.forecast_error:
            by = f"the last interval; {own.predictor} failed: {self.forecast_error}"
        misses = "; an idle instance misses it" if mean.unattainable else ""
        return [
            PlanReason("rate", rate, "requests/s", by),
            PlanReason("prompt", work.prompt_tokens, "tokens", by),
            PlanReason("computed", work.computed_tokens, "tokens", f"of the prompt; {by}"),
            PlanReason("output", work.output_tokens, "tokens", by),
            PlanReason("prefill", mean.prefill_s, "s", f"one prompt, x {work.prefill_factor:g}"),
            PlanReason(
                "prefill_rate",
                mean.prefill_rate,
                "requests/s",
                f"one instance at a mean TTFT of {own.ttft_s:g} s"
                + (misses if "ttft" in mean.unattainable else ""),
            ),
            PlanReason("batch", mean.batch, "requests", f"a step is {mean.step_s * 1e3:.1f} ms"),
            PlanReason(
                "decode_rate",
                mean.decode_rate,
                "requests/s",
                f"one instance at {own.tbt_s:g} s between tokens"
                + (misses if "tbt" in mean.unattainable else ""),
            ),
            PlanReason("prefill_needed", needed[0], "instances", f"filled to {self._above:g}"),
            PlanReason("decode_needed", needed[1], "instances", f"filled to {self._above:g}"),
        ]


def _capacities(
    members: Sequence[FleetMember], work: Workload, goals: Goals
) -> Work[dict[str, Capacity]]:
    """The capacity of each instance. Equal instances are computed once; a thousand different ones,
    as calibration makes them, take 10 ms, and so many pieces."""
    known: dict[tuple[object, ...], Capacity] = {}
    found: dict[str, Capacity] = {}
    for at, member in enumerate(members):
        if at % _MEMBERS_AT_ONCE == _MEMBERS_AT_ONCE - 1:
            yield
        like = (member.latency, member.kv_capacity_tokens, member.batch_max)
        one = known.get(like)
        if one is None:
            one = known[like] = capacity(member, work, goals)
        found[member.id] = one
    return found


def _mean(capacities: list[Capacity]) -> Capacity:
    """The capacity of the average instance."""
    count = len(capacities)
    return Capacity(
        sum(one.prefill_rate for one in capacities) / count,
        sum(one.decode_rate for one in capacities) / count,
        sum(one.prefill_s for one in capacities) / count,
        round(sum(one.batch for one in capacities) / count),
        sum(one.step_s for one in capacities) / count,
        tuple(sorted({name for one in capacities for name in one.unattainable})),
    )
