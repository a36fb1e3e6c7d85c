"""Calls that wait for the release of a held request."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable


@dataclass(slots=True)
class _Hold:
    ended: asyncio.Event = field(default_factory=asyncio.Event)
    waiting: int = 0  # calls


class ReleaseWaiters:
    """Who waits for which request, by name; several calls may wait for one. For one event loop."""

    def __init__(self) -> None:
        self._holds: dict[str, _Hold] = {}

    def __len__(self) -> int:
        return len(self._holds)

    async def wait(self, name: str, seconds: float) -> None:
        """Wait until `wake` names this request, at most `seconds`."""
        hold = self._holds.setdefault(name, _Hold())
        hold.waiting += 1
        try:
            async with asyncio.timeout(seconds):
                await hold.ended.wait()
        except TimeoutError:
            pass
        finally:
            hold.waiting -= 1
            if not hold.waiting and self._holds.get(name) is hold:
                del self._holds[name]

    def wake(self, names: Iterable[str]) -> None:
        """The holds of these requests have ended."""
        for name in names:
            hold = self._holds.pop(name, None)
            if hold is not None:
                hold.ended.set()

    def wake_all(self) -> None:
        """Let nobody wait any longer."""
        self.wake(list(self._holds))
