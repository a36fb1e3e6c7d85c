"""The gateway of a simulated cluster, which sends a request when the conductor has released it."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from tiffin.conductor.core import Conductor

    from ..clock import VirtualClock

# How often the conductor's service looks at its clock (`conductor/service/server.py`).
TICK_S = 0.1


class HoldingGateway:
    """It hears of a release `late_s` late. `preempted` is called with the name of a request that
    had to leave a full queue, and the reason."""

    def __init__(
        self,
        core: Conductor,
        clock: VirtualClock,
        late_s: Callable[[], float],
        preempted: Callable[[str, str], None],
    ) -> None:
        self._core, self._clock, self._late_s = core, clock, late_s
        self._preempted = preempted
        self._held: dict[str, Callable[[], None]] = {}

    def send(self, name: str, start: Callable[[], None]) -> None:
        """Call `start`, which sends the request to its instance, as soon as it is released."""
        if self._core.dispatch.holds(name):
            self._held[name] = start
        else:
            start()
        self.look()

    def look(self) -> None:
        """The conductor says which holds have ended."""
        for name in self._core.dispatch.ended():
            flies = self._core.ledger.get(name) is not None
            if name in self._held and flies and not self._core.dispatch.holds(name):
                self._clock.after(self._late_s(), self._held.pop(name))
        for rejection in self._core.put_out():
            if self._held.pop(rejection.request_id, None) is not None:
                self._preempted(rejection.request_id, rejection.reason)

    def tick(self) -> None:
        """From now on, the conductor looks at its clock every `TICK_S`."""
        self._core.dispatch.tick(self._clock.now_s)
        self.look()
        self._clock.after(TICK_S, self.tick)
