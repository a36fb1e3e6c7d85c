"""The latency columns of all instances: their profiles' coefficients times what was observed. Pure.

`cost/calibration.py` has the factors, `cost/prefill_shape.py` corrects what is not one factor for
all prefills. Here events of requests become observations of the hardware, which compare like with
like: nothing that is due to the load may look like slow hardware.

**Prefill**: the seconds from `prefill_began` to `prefill_done` (or the first token, where the same
instance decodes), less those of loading blocks from the node's tiers, against the profile for the
tokens that were computed. A prefill that may have loaded much does not count: also of blocks that
are guessed to be in the instance's HBM, since an engine without a cache of its own loads them. From
an engine that does not tell when it begins, only requests count that had nothing to wait for: those
that came to an empty queue, and fetch nothing.

**Decode**: a request that has got `count` tokens has been through `count` steps. By the profile,
`N = ∫ dt / step(t)` of them would have been in that time, and N / count is the factor. `step(t)` is
that of the batch and the context which the instance told in its heartbeats, or else, of those that
this conductor placed there. The time until a request's first report counts only if the end of its
hand-over was told and the instance had room for it: else it waited.

**Both on one instance**: a prompt takes time from the decodes, whole between two steps or in chunks
within them. So an interval between two reports of a request is

    seconds = decode factor · seconds of its steps + prefill factor · seconds of prompts meanwhile

by the profile, and several of them tell both factors (`cost/shared_time.py`). One with a prompt
that may have loaded much does not count either.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, NamedTuple

from ..cost.latency_model import decode_step_s, prefill_s
from ..cost.prefill_shape import PrefillShape
from ..cost.shared_time import SharedTime

if TYPE_CHECKING:
    from ..cost.calibration import Calibration
    from ..cost.latency_profiles import Profile
    from ..cost.transfer_model import TransferModel
    from ..records import Load
    from ..state.instance_table import Cluster
    from .inflight_requests import InflightRequest

    Latency = tuple[float, ...]

_COLUMNS = ("c0", "c1", "c2", "d0", "d1", "d2")

# An interval of fewer steps errs by more than 1.6% in the mean: it begins in the midst of one.
_STEPS_MIN = 32
# Of an interval with both kinds of work, one that is a smaller part is not told by it.
_PART_MIN = 0.1
# Of a prefill's seconds, how much loading may be: it is not observed, but estimated.
_LOAD_SHARE_MAX = 0.05
# Factors that nobody observes change slowly: some instances per tick are enough.
_PER_TICK = 16


class DecodeMark(NamedTuple):
    """A time, and what the instance would have done until then by its profile: decode `steps`, and
    seconds of prefill, if it had done only one of them."""

    at: float
    steps: float
    prefill_s: float


@dataclass(slots=True)
class _Work:
    """What an instance has done by its profile until `at`. `step_s`: of a decode step since then.
    `load_told`: its batch and their context, if it reports them, which are the same since
    `still_since`. The running prefill, of `running_s` by the profile, began at `began_at`, and
    prefills take `stretch` times that: more if decodes go on meanwhile. Until `loads_until` a
    prefill may have loaded much."""

    at: float
    step_s: float
    load_told: tuple[int, int] | None = None
    still_since: float = 0.0
    steps: float = 0.0
    prefill_s: float = 0.0
    began_at: float = 0.0
    running_s: float = 0.0
    loads_until: float = 0.0
    stretch: float = 1.0
    observed_until: float = 0.0  # the decode factor, by intervals that do not overlap
    shared: SharedTime = field(default_factory=SharedTime)

    def step(self, step_s: float, now: float) -> None:
        """From now on a step takes so long."""
        if now > self.at:
            self.steps += (now - self.at) / self.step_s
            self.at = now
        self.step_s = step_s

    def prefilled(self, began_at: float | None, compute_s: float, now: float) -> None:
        """A prefill has ended."""
        self.prefill_s += compute_s
        self.running_s = 0.0
        if began_at is not None and now > began_at:
            self.stretch = (now - began_at) / compute_s

    def mark(self, now: float) -> DecodeMark:
        """What it has done until now."""
        running_s = min(max(now - self.began_at, 0.0) / self.stretch, self.running_s)
        steps = self.steps + max(now - self.at, 0.0) / self.step_s
        return DecodeMark(now, steps, self.prefill_s + running_s)


class CalibratedProfiles:
    """Latency of the instances of a cluster, before and after calibration. Not thread-safe."""

    def __init__(
        self, cluster: Cluster, transfers: TransferModel, calibration: Calibration
    ) -> None:
        self._cluster = cluster
        self._transfers = transfers
        self._calibration = calibration
        # By instance, before calibration; the one that was corrected longest ago is the first.
        self._latency: OrderedDict[str, Latency] = OrderedDict()
        self._works: dict[str, _Work] = {}
        self._shapes: dict[str, PrefillShape] = {}  # by profile

    # -- instances ---------------------------------------------------------------------------------

    def register(self, instance: str, profile: Profile, now: float) -> None:
        """Take the profile of a registered instance."""
        self._latency[instance] = profile.latency
        self._works.setdefault(instance, _Work(now, profile.decode[0]))
        name = self._cluster.spec(instance).profile
        if name not in self._shapes or self._shapes[name].profile != profile.prefill:
            self._shapes[name] = PrefillShape(profile.prefill, profile.tokens_max)
        self._correct(instance, now)

    def forget(self, instance: str) -> None:
        """Drop an instance that is removed."""
        self._calibration.forget(instance)
        self._latency.pop(instance, None)
        self._works.pop(instance, None)

    def latency(self, instance: str) -> Latency:
        """(c0, c1, c2, d0, d1, d2) of a registered instance, before calibration."""
        return self._latency[instance]

    def heartbeat(self, instance: str, load: Load, now: float) -> None:
        """Take the batch that an instance reports."""
        if load.running is not None and load.context_tokens is not None:
            work = self._works[instance]
            load_told = load.running, load.context_tokens
            if load_told != work.load_told:
                work.load_told, work.still_since = load_told, now
            work.step(self._step_s(instance, load.running, load.context_tokens), now)

    def tick(self, now: float) -> None:
        """Let factors that nobody observes return to their profiles', and fit what was observed: of
        some instances each time, as a thousand would take milliseconds."""
        for shape in self._shapes.values():
            shape.fit()
        for instance in list(self._latency)[:_PER_TICK]:
            self._correct(instance, now)

    # -- requests ----------------------------------------------------------------------------------

    def prefill_began(self, flight: InflightRequest, computed_tokens: int, now: float) -> None:
        """A prefill begins, and computes so many tokens (0: not told)."""
        if flight.prefill_row < 0 or flight.prefill_began_at is not None:
            return
        flight.prefill_began_at = now
        if computed_tokens:
            flight.prefill_tokens_told = computed_tokens
        work = self._works[self._cluster.name(flight.prefill_row)]
        work.began_at, work.running_s = now, self._compute_s(flight)
        work.loads_until = math.inf if self._loads(flight) else min(work.loads_until, now)

    def prefill_done(self, flight: InflightRequest, kind: str, now: float) -> None:
        """A prefill by its decision's route has ended, by an event of this kind: observe it, once.
        A first token that another instance gives comes later than that."""
        elsewhere = kind == "first_token" and flight.prefill_row != flight.decode_row
        if flight.prefill_row < 0 or flight.prefill_observed or elsewhere:
            return
        flight.prefill_observed = True
        instance = self._cluster.name(flight.prefill_row)
        compute_s, loads = self._compute_s(flight), self._loads(flight)
        work = self._works[instance]
        work.loads_until = now if loads else min(work.loads_until, now)
        began_at = flight.prefill_began_at
        work.prefilled(began_at, compute_s, now)
        if began_at is None and flight.alone:
            began_at = flight.decided_at
        if began_at is None or loads:
            return
        if self._had_no_decodes(work, flight.prefill_row, began_at):
            observed_s = now - began_at - self._load_s(flight)[0]
            self._observe(instance, "prefill", compute_s, observed_s, now)
            usual = self._calibration.prefill.median(instance)
            if self._calibration.enabled and usual is not None and observed_s > 0:
                prompt = flight.request.prompt_tokens
                cached = prompt - _computed_tokens(flight)
                self._shape(instance).observe(prompt, cached, observed_s / usual)

    def handed_over(self, flight: InflightRequest, now: float) -> None:
        """A request can decode now: observe its steps from here on, if it need not wait."""
        row, cluster = flight.decode_row, self._cluster
        if row < 0 or flight.decode_mark is not None or len(flight.shares) != 1:
            return
        room = cluster.own_kv_used_tokens[row] <= cluster.kv_capacity_tokens[row]
        if room and cluster.own_batch[row] <= cluster.batch_max[row]:
            flight.decode_mark = self._works[cluster.name(row)].mark(now)

    def tokens(self, flight: InflightRequest, count: int, now: float) -> None:
        """A request was given `count` more tokens: observe the steps of an interval."""
        row, before = flight.decode_row, flight.decode_mark
        if row < 0 or len(flight.shares) != 1:  # a spread context's step is its slowest member's
            flight.decode_mark = None
            return
        instance = self._cluster.name(row)
        work = self._works[instance]
        if work.load_told is None:
            cluster = self._cluster
            batch, context = cluster.own_batch.item(row), cluster.own_context_tokens.item(row)
            work.step(self._step_s(instance, batch, context), now)
        mark, tokens = work.mark(now), flight.decode_tokens + count
        if before is not None and mark.steps - before.steps < _STEPS_MIN:
            flight.decode_tokens = tokens  # until several reports make an interval
            return
        flight.decode_mark, flight.decode_tokens = mark, 0
        sure_from = max(work.observed_until, work.loads_until)
        if before is not None and tokens and before.at >= sure_from:
            work.observed_until = now
            self._interval(instance, tokens, before, mark)

    # -- inside ------------------------------------------------------------------------------------

    def _had_no_decodes(self, work: _Work, row: int, since: float) -> bool:
        """Whether an instance has given nobody a token since then: what it tells of its decodes is
        still the same, or there are none."""
        if work.load_told is not None:
            return work.still_since <= since
        return not self._cluster.own_batch[row]

    def _interval(self, instance: str, count: int, before: DecodeMark, now: DecodeMark) -> None:
        """Observe an interval of `count` decode steps, and of the prefills meanwhile."""
        seconds = now.at - before.at
        steps_s = count * seconds / (now.steps - before.steps)
        prompts_s = now.prefill_s - before.prefill_s
        if not prompts_s:
            self._observe(instance, "decode", steps_s, seconds, now.at)
            return
        x, z, profile = prompts_s / seconds, steps_s / seconds, self._cluster.spec(instance).profile
        prefill = self._calibration.prefill.factor(instance, profile, now.at)
        decode = self._calibration.decode.factor(instance, profile, now.at)
        a, b = self._works[instance].shared.observe(x, z, (prefill, decode))
        if x >= _PART_MIN:
            self._observe(instance, "prefill", 1.0, a, now.at)
        if z >= _PART_MIN:
            self._observe(instance, "decode", 1.0, b, now.at)

    def _observe(
        self,
        instance: str,
        kind: Literal["prefill", "decode"],
        profile_s: float,
        observed_s: float,
        now: float,
    ) -> None:
        factors = self._calibration.prefill if kind == "prefill" else self._calibration.decode
        profile = self._cluster.spec(instance).profile
        factors.observe(instance, profile, profile_s, observed_s, now)
        self._correct(instance, now)

    def _compute_s(self, flight: InflightRequest) -> float:
        """Seconds to compute a prompt, by the profile as it was corrected."""
        c0, c1, c2 = self._shape(self._cluster.name(flight.prefill_row)).coefficients
        prompt = flight.request.prompt_tokens
        return float(prefill_s(c0, c1, c2, prompt, prompt - _computed_tokens(flight)))

    def _loads(self, flight: InflightRequest) -> bool:
        """Whether loading may have been much of a prefill."""
        return self._load_s(flight)[1] > _LOAD_SHARE_MAX * self._compute_s(flight)

    def _load_s(self, flight: InflightRequest) -> tuple[float, float]:
        """Seconds to load the blocks that are not in the instance's own HBM, as from DRAM: as is
        expected, and at most. Blocks that are only guessed to be in HBM may come from the node."""
        row, spec = flight.prefill_row, self._cluster.specs[flight.prefill_row]
        assert spec is not None
        cached = flight.request.prompt_tokens - _computed_tokens(flight)
        expected = max(flight.hbm_blocks * spec.block_tokens, flight.part_tokens)
        sure = flight.reported_tokens if spec.node else expected
        block_s = self._cluster.block_bytes.item(row) / (
            self._transfers.settings.dram_bandwidth_bytes_s
        )
        token_s = block_s / spec.block_tokens
        return max(cached - expected, 0) * token_s, max(cached - sure, 0) * token_s

    def _step_s(self, instance: str, batch: int, context: int) -> float:
        """Seconds of a decode step, by the profile."""
        d0, d1, d2 = self._latency[instance][3:]
        return decode_step_s(d0, d1, d2, batch, context)

    def _shape(self, instance: str) -> PrefillShape:
        return self._shapes[self._cluster.spec(instance).profile]

    def _correct(self, instance: str, now: float) -> None:
        """Set an instance's latency columns to its profile's coefficients times its factors."""
        row, profile = self._cluster.row(instance), self._cluster.spec(instance).profile
        prefill = self._calibration.prefill.factor(instance, profile, now)
        decode = self._calibration.decode.factor(instance, profile, now)
        factors = (prefill, prefill, prefill, decode, decode, decode)
        latency = (*self._shape(instance).coefficients, *self._latency[instance][3:])
        values = zip(_COLUMNS, latency, factors, strict=True)
        for name, value, factor in values:
            getattr(self._cluster, name)[row] = value * factor
        self._cluster.prefill_error[row] = self._calibration.prefill.error(instance)
        self._latency.move_to_end(instance)


def _computed_tokens(flight: InflightRequest) -> int:
    """Tokens of a prompt that are computed: what the engine told, or what was expected."""
    prompt = flight.request.prompt_tokens
    expected = prompt - flight.decision.cached_tokens
    return min(flight.prefill_tokens_told or expected, prompt)
