"""Carries out what steering wants done: orders to nodes, and roles to instances.

An instance that can change its role while it runs says where it is told, in the label `role_url`:

    POST role_url   {"role": "decode"}      take this role; a success means that it has
    GET  role_url   -> {"role": "decode"}   what it does now: asked to verify

Whoever has no such label is taken to do what it is sent. Failures are reported, not repeated: only
`flips.py` knows what is to follow.
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Any

import httpx
import msgspec

from .errors import ConductorError, UnknownInstance
from .flips import Assign, SetRole
from .orders import NodeSpace

if TYPE_CHECKING:
    from collections.abc import Sequence

    from .api.service import Service
    from .feeding import Feeding
    from .flips import Action

log = logging.getLogger("tiffin.conductor")

ROLE_LABEL = "role_url"
# What steering decides is for minutes; nodes renew what the directory knows about as often.
STEER_S = 1.0
_ANSWER_BYTES_MAX = 64 << 10


class Acting:
    """For one service, in its event loop. Use it in an `async with`."""

    def __init__(self, service: Service, feeding: Feeding) -> None:
        self._service, self._core, self._feeding = service, service.core, feeding
        self._http = httpx.AsyncClient(trust_env=False, follow_redirects=False)
        self._calls: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> Acting:
        self._service.act = self.act
        return self

    async def __aexit__(self, *_: object) -> None:
        self._service.act = None
        for call in self._calls:
            call.cancel()
        await asyncio.gather(*self._calls, return_exceptions=True)
        await self._http.aclose()

    async def run(self) -> None:
        """Steer, until it is cancelled."""
        while True:
            await self.step()
            await asyncio.sleep(STEER_S)

    async def step(self) -> None:
        """One look at the pool, and what follows from it."""
        records = await self._feeding.records()
        now, core = self._service.clock(), self._core
        for record in records or ():
            core.links(record.name, record.links)
        for outcome in self._feeding.finished():
            core.steering.ended(outcome, now)
        spaces = (
            None
            if records is None
            else {
                record.name: NodeSpace(
                    record.name, record.capacity_bytes, record.free_bytes, record.draining
                )
                for record in records
            }
        )
        steered = core.steering.tick(spaces, now)
        self._feeding.carry_out(steered.orders)
        self.act(steered.actions)

    def act(self, actions: Sequence[Action]) -> None:
        """Tell instances, without waiting for them."""
        for action in actions:
            call = asyncio.get_running_loop().create_task(self._call(action))
            self._calls.add(call)
            call.add_done_callback(self._calls.discard)

    async def _call(self, action: Action) -> None:
        error = await self._try(action)
        if error:
            log.warning("%s: role %s: %s", action.instance, _role(action), error)
        steering, now = self._core.steering, self._service.clock()
        try:
            report = steering.committed if isinstance(action, SetRole) else steering.verified
            self.act(report(action.instance, now, error))
        except ConductorError as gone:  # it left while it was asked
            log.info("%s: %s", action.instance, gone)

    async def _try(self, action: Action) -> str:
        """Do it; what went wrong, or ""."""
        flips = self._core.settings.planner.flips
        try:
            url = self._core.cluster.spec(action.instance).labels.get(ROLE_LABEL, "")
            if isinstance(action, SetRole):
                answer = await self._ask("POST", url, flips.commit_s, {"role": action.role})
                return "" if answer.is_success else f"{url} answered {answer.status_code}"
            answer = await self._ask("GET", url, flips.verify_s)
            said = msgspec.json.decode(answer.content[:_ANSWER_BYTES_MAX], type=dict[str, Any])
        except (httpx.HTTPError, httpx.InvalidURL, OSError, OverflowError, ExceptionGroup) as error:
            # The last two: what a URL makes of the resolver, whose tasks run in a group.
            return f"no answer: {str(error) or type(error).__name__}"
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            return f"what it answered is no JSON object: {error}"
        except UnknownInstance as error:
            return str(error)
        return "" if said.get("role") == _role(action) else f"it says {said.get('role')!r}"[:200]

    async def _ask(
        self, method: str, url: str, timeout_s: float, body: dict[str, str] | None = None
    ) -> httpx.Response:
        port = httpx.URL(url).port
        if port is not None and not 0 < port < 1 << 16:
            raise httpx.InvalidURL(f"no port {port}: there are 1 to 65535")
        async with asyncio.timeout(timeout_s):
            return await self._http.request(method, url, json=body, timeout=None)


def _role(action: Action) -> str:
    return "" if isinstance(action, Assign) else action.role.value
