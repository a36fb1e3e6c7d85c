"""An instance that can do both: prompts are computed between the steps of its decodes.

A prompt goes before the next step, whole, as in vLLM without chunked prefill: it delays the next
token of all that decode here. With one kind of work only, it is an instance of that kind.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tiffin.conductor.cost.latency_model import prefill_s

from .decode_instance import DecodeInstance

if TYPE_CHECKING:
    from collections.abc import Callable

    from tiffin.conductor.cost.latency_profiles import Profile

    from ..clock import VirtualClock
    from .sim_request import SimRequest


class MixedInstance(DecodeInstance):
    """`began` is called with each prompt that is to be computed now, `prefilled` when it has been,
    `done` with each answer. `choose`: which of the waiting prompts is next, by name; without it
    they are computed in order of arrival."""

    def __init__(
        self,
        name: str,
        clock: VirtualClock,
        profile: Profile,
        capacity_tokens: int,
        batch_max: int,
        began: Callable[[SimRequest], None],
        prefilled: Callable[[MixedInstance, SimRequest], None],
        done: Callable[[SimRequest], None],
        choose: Callable[[MixedInstance], str | None] | None = None,
        comes_back_s: Callable[[int], float] | None = None,
    ) -> None:
        super().__init__(name, clock, profile, capacity_tokens, batch_max, done, comes_back_s)
        self._prefill, self._prompt_began, self._prefilled = profile.prefill, began, prefilled
        self._choose = choose
        self._prompts: dict[str, SimRequest] = {}
        self._computing: SimRequest | None = None

    @property
    def queued(self) -> int:
        """Prompts that wait or are computed."""
        return len(self._prompts) + (self._computing is not None)

    @property
    def queued_tokens(self) -> int:
        """Their tokens."""
        jobs = [*self._prompts.values(), *([self._computing] if self._computing else [])]
        return sum(job.trace.prompt_tokens for job in jobs)

    @property
    def decoding(self) -> int:
        """Requests that decode here, or wait for room."""
        return self.batch + len(self._waiting)

    def enqueue(self, job: SimRequest) -> None:
        """A prompt arrives."""
        self._prompts[job.name] = job
        if self._run_ends is not None:
            self._cut()
        elif self._computing is None:
            self._run()

    def _run(self) -> None:
        """Compute the next prompt, if there is one; else let the decodes go on."""
        if self._computing is not None:
            return  # somebody joins meanwhile
        if not self._prompts:
            super()._run()
            return
        name = self._choose(self) if self._choose is not None else None
        if name is None or name not in self._prompts:
            name = next(iter(self._prompts))
        job = self._computing = self._prompts.pop(name)
        self._prompt_began(job)
        tokens, cached = job.trace.prompt_tokens, job.cached_tokens
        job.compute_s = float(prefill_s(*self._prefill, tokens, cached))
        self._clock.after(job.compute_s, self._computed)

    def _computed(self) -> None:
        job, self._computing = self._computing, None
        assert job is not None
        self._prefilled(self, job)
        self._run()
