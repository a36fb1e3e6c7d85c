"""A conductor for the service's tests: the real one, which records its calls and can be made to
reject requests."""

from __future__ import annotations

import asyncio
import random
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from tiffin.conductor.core import Conductor
from tiffin.conductor.cost import latency_profiles
from tiffin.conductor.errors import InvalidRequest
from tiffin.conductor.events.index_updates import Added

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from tiffin.conductor.cost.latency_profiles import Profile
    from tiffin.conductor.records import (
        Decision,
        InstanceSpec,
        Load,
        Rejection,
        Request,
        RequestEvent,
    )

KEY = bytes(range(16))
MODEL = "llama-3-8b"


def profile(name: str) -> Profile:
    """The same profile for every name but one."""
    if name == "unknown":
        raise InvalidRequest("no profile 'unknown'")
    return latency_profiles.load("llama-3.1-8b.h100.tp1.vllm")


class Recorder(Conductor):
    """The real conductor, recording calls. `reject`: the answer to the next requests."""

    def __init__(self) -> None:
        super().__init__(dice=random.Random(1), profile=profile)
        self.reject: Rejection | None = None
        self.requests: dict[str, Request] = {}
        self.events: list[RequestEvent] = []
        self.loads: dict[str, Load] = {}
        self.registrations: list[InstanceSpec] = []

    def schedule(self, request: Request, now: float) -> Decision | Rejection:
        self.requests[request.id] = request
        if self.reject is not None:
            return self._logged(replace(self.reject, request_id=request.id, decided_at=now))
        return super().schedule(request, now)

    def observe(self, event: RequestEvent, now: float) -> None:
        counted = self.counted(event)
        super().observe(counted, now)
        self.events.append(counted)

    def register(self, spec: InstanceSpec, now: float) -> None:
        super().register(spec, now)
        self.registrations.append(spec)

    def heartbeat(self, instance: str, load: Load, now: float) -> None:
        super().heartbeat(instance, load, now)
        self.loads[instance] = load

    def hold(
        self, name: str, tier: str, keys: Sequence[bytes], now: float, *, parts: bool = False
    ) -> None:
        """Report these blocks, or parts of prompts' first blocks, as a feed does."""
        self.apply(Added(name, tier, keys, parts=parts), now)


def spec_body(**changes: Any) -> dict[str, Any]:
    """The body of an instance's registration."""
    return {"model": MODEL, "role": "mixed", "profile": "test", **changes}


def turns_of_others(work: Callable[[], Awaitable[object]]) -> int:
    """How often an event loop comes round to others until this work is done."""

    async def scenario() -> int:
        turns = 0

        async def others() -> None:
            nonlocal turns
            while True:
                turns += 1
                await asyncio.sleep(0)

        task = asyncio.create_task(others())
        await asyncio.sleep(0)
        await work()
        task.cancel()
        return turns

    return asyncio.run(scenario())
