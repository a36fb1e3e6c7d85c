"""What a gateway tells the conductor of its requests: late, as everything that it is told."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

from tiffin.conductor.errors import UnknownRequest
from tiffin.conductor.records import RequestEvent

if TYPE_CHECKING:
    from collections.abc import Callable

    from tiffin.conductor.core import Conductor

    from ..clock import VirtualClock
    from ..instances.sim_request import SimRequest


class RequestReports:
    """Of the requests in `running`. `late_s` is asked for each report; `heard` is called after the
    conductor has heard one."""

    def __init__(
        self,
        core: Conductor,
        clock: VirtualClock,
        late_s: Callable[[], float],
        heard: Callable[[], None] = lambda: None,
    ) -> None:
        self._core, self._clock, self._late_s, self._heard = core, clock, late_s, heard
        self.running: dict[str, SimRequest] = {}
        self._told: dict[str, int] = {}  # by job: tokens after the first one

    def later(self, say: Callable[[float], None]) -> None:
        """Tell the conductor something."""
        self._clock.after(self._late_s(), lambda: say(self._clock.now_s))

    def event(self, job: SimRequest, kind: str, tokens: int = 0) -> None:
        """An event of a request, which says how long ago it was."""
        happened = self._clock.now_s

        def say(now: float) -> None:
            event = RequestEvent(job.name, kind, tokens, age_s=now - happened)
            with contextlib.suppress(UnknownRequest):  # it has expired meanwhile
                self._core.observe(event, now)
            self._heard()

        self.later(say)

    def begin(self, job: SimRequest) -> None:
        """A request was placed."""
        self.running[job.name] = job
        self._told[job.name] = 0

    def answered(self, job: SimRequest, tokens: int) -> None:
        """So many tokens have come after the first one; what was not told yet is."""
        if tokens > self._told[job.name]:
            self.event(job, "tokens", tokens - self._told[job.name])
            self._told[job.name] = tokens

    def finished(self, job: SimRequest) -> None:
        """The last token has come."""
        self.event(job, "tokens", max(0, job.trace.output_tokens - 1 - self._told[job.name]))
        self.event(job, "finished")
        self.drop(job)

    def drop(self, job: SimRequest) -> None:
        """Nothing more is told of a request."""
        del self.running[job.name], self._told[job.name]

    def keep_alive(self) -> None:
        """From now on, or the conductor would take long requests for lost."""
        now = self._clock.now_s
        for name in self.running:
            with contextlib.suppress(UnknownRequest):
                self._core.observe(RequestEvent(name, "alive"), now)
        self._clock.after(self._core.settings.core.decision_ttl_s / 3, self.keep_alive)
