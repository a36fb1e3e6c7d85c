"""Simulated instances take the roles that the conductor gives them, some time after its call."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from tiffin.conductor.pool.role_flip import SetRole, Verify

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from tiffin.conductor.core import Conductor
    from tiffin.conductor.pool.role_flip import Action
    from tiffin.conductor.records import Role

    from ..clock import VirtualClock

# Without this label the conductor takes it that an instance needs no call. Without others it asks
# for nothing else: all blocks are in the memory of the node, and requests are waited for.
CALLED = {"role_url": "simulated"}


class RoleChanges:
    """`flip_s`: from the conductor's call until an empty instance has its new role, when `taken` is
    called with its name and the role."""

    def __init__(
        self,
        core: Conductor,
        clock: VirtualClock,
        flip_s: float,
        taken: Callable[[str, Role], None] = lambda name, role: None,
    ) -> None:
        self._core, self._clock, self._flip_s, self._taken = core, clock, flip_s, taken

    def carry_out(self, actions: Iterable[Action]) -> None:
        """What the conductor's tick asks for."""
        for action in actions:
            if isinstance(action, SetRole):
                self._clock.after(self._flip_s, partial(self._has_role, action))
            elif isinstance(action, Verify):
                steering, now = self._core.steering, self._clock.now_s
                self.carry_out(steering.verified(action.instance, now))

    def _has_role(self, action: SetRole) -> None:
        self._taken(action.instance, action.role)
        self.carry_out(self._core.steering.committed(action.instance, self._clock.now_s))
