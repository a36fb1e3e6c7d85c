"""Carries out what steering decides: orders to nodes, and role changes and orders of instances.

An instance that can change its role while it runs has the label `role_url`, an endpoint:

    POST role_url   {"role": "decode"}      take this role; a success status means that it has
    GET  role_url   -> {"role": "decode"}   its current role, which the conductor reads to verify

An instance without this label is taken to do whatever work it is sent, so it gets no calls. Where
one takes orders, and which, is in the labels `orders_url` and `orders`:

    POST orders_url {"order": "save"}       write to the pool what is in HBM alone
                    -> {"left": 0}          how many such blocks there still are
    POST orders_url {"order": "hand_over", "request": "TENANT/ID", "target": ID, "url": its url}
                                            a success status means that it goes on there
    POST orders_url {"order": "rebind", "request": "TENANT/ID", "target": ID, "url": its url}
                                            that this member of a spread context's does the rest

A failed call is reported and not retried: `role_flip.py`, `decode_moves.py` and `rebinder.py`
decide what follows.
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Any

import httpx
import msgspec

from ..errors import ConductorError, UnknownInstance
from ..pool.instance_orders import HandOverRequest, SaveBlocks
from ..pool.orders import ORDER_TIMEOUT_S, NodeSpace
from ..pool.role_flip import SetRole, Verify
from ..state.allowed_hosts import ORDERS_LABEL, ROLE_LABEL
from ..web.time_slices import TimeSlices
from .forecast_process import forecast_apart

if TYPE_CHECKING:
    from collections.abc import Coroutine, Sequence

    from ..api.conductor_service import Service
    from ..pool.demand_forecast import DemandQuestion
    from ..pool.instance_orders import RebindRequest
    from ..pool.role_flip import Action
    from .feeds import Feeding

log = logging.getLogger("tiffin.conductor")

# Interval of steering. Its decisions hold for minutes, and nodes renew their records in the
# directory about as often as this.
STEER_S = 1.0
# Timeout of an order to change routes, which moves no KV.
REBIND_TIMEOUT_S = 5.0
_ANSWER_BYTES_MAX = 64 << 10
_PLAIN = {"accept-encoding": "identity"}


class Acting:
    """Runs steering for one service, in its event loop. Use it in an `async with`."""

    def __init__(self, service: Service, feeding: Feeding) -> None:
        self._service, self._core, self._feeding = service, service.core, feeding
        self._http = httpx.AsyncClient(trust_env=False, follow_redirects=False)
        self._calls: set[asyncio.Task[None]] = set()
        self._forecasting = asyncio.Lock()

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
        """Run `step` every `STEER_S`, until the task is cancelled."""
        while True:
            await self.step()
            await asyncio.sleep(STEER_S)

    async def step(self) -> None:
        """One round of steering: read the nodes' records and the outcomes of orders, then send new
        orders, role changes and questions for forecasts."""
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
        steered = await TimeSlices().finish(core.steering.ticking(spaces, now, ask=True))
        self._feeding.carry_out(steered.orders)
        self.act(steered.actions)
        for hand_over in steered.hand_overs:
            self._begin(self._order(hand_over))
        for rebind in steered.rebinds:
            self._begin(self._order(rebind))
        if steered.questions:
            self._begin(self._forecast(steered.questions))

    def act(self, actions: Sequence[Action]) -> None:
        """Send role changes to instances in background tasks."""
        for action in actions:
            self._begin(self._call(action))

    def _begin(self, call: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(call)
        self._calls.add(task)
        task.add_done_callback(self._calls.discard)

    async def _forecast(self, questions: dict[str, DemandQuestion]) -> None:
        """Compute forecasts in one process at a time, for all models whose interval has ended."""
        async with self._forecasting:
            found = await forecast_apart(list(questions.values()))
        steering, now = self._core.steering, self._service.clock()
        for model, forecast in zip(questions, found, strict=True):
            work = steering.taking_forecast(model, forecast, now)
            self.act(await TimeSlices().finish(work))

    async def _call(self, action: Action) -> None:
        error = await self._try(action)
        if error:
            log.warning("%s: %s: %s", action.instance, _what(action), error)
        steering, now = self._core.steering, self._service.clock()
        report = {SaveBlocks: steering.saved, SetRole: steering.committed}
        try:
            self.act(report.get(type(action), steering.verified)(action.instance, now, error))
        except ConductorError as gone:  # the instance left during the call
            log.info("%s: %s", action.instance, gone)

    async def _order(self, order: HandOverRequest | RebindRequest) -> None:
        moves = isinstance(order, HandOverRequest)
        body = {
            "order": "hand_over" if moves else "rebind",
            "request": order.request_id,
            "target": order.target,
            "url": self._service.url(order.target),
        }
        timeout_s = ORDER_TIMEOUT_S if moves else REBIND_TIMEOUT_S
        error, _ = await self._tell(order.instance, ORDERS_LABEL, body, timeout_s)
        if error:
            log.info("%s: %s %s: %s", order.instance, body["order"], order.request_id, error)
        report = self._core.moves.ended if moves else self._core.rebinder.ended
        report(order.request_id, self._service.clock(), error)

    async def _try(self, action: Action) -> str:
        """Call the instance; returns what went wrong, or ""."""
        flips, name = self._core.settings.planner.flips, action.instance
        if isinstance(action, SetRole):
            body = {"role": action.role.value}
            return (await self._tell(name, ROLE_LABEL, body, flips.commit_s))[0]
        if isinstance(action, SaveBlocks):
            error, said = await self._tell(name, ORDERS_LABEL, {"order": "save"}, flips.save_s)
            left = said.get("left")
            return error or ("" if left == 0 else f"it says that {left!r} are left"[:200])
        error, said = await self._tell(name, ROLE_LABEL, None, flips.verify_s)
        same = isinstance(action, Verify) and said.get("role") == action.role.value
        return error or ("" if same else f"it says {said.get('role')!r}"[:200])

    async def _tell(
        self, instance: str, label: str, body: dict[str, str] | None, timeout_s: float
    ) -> tuple[str, dict[str, Any]]:
        """Send a body (None: ask) to the endpoint in an instance's label; returns what went wrong,
        or "", and the answer."""
        try:
            url = self._core.cluster.spec(instance).labels.get(label, "")
            status, content = await self._ask(
                "GET" if body is None else "POST", url, timeout_s, body
            )
            if not httpx.codes.is_success(status):
                return f"{url} answered {status}", {}
            return "", msgspec.json.decode(content, type=dict[str, Any]) if content else {}
        except (httpx.HTTPError, httpx.InvalidURL, OSError, OverflowError, ExceptionGroup) as error:
            # The last two: errors that a bad URL causes in the resolver, whose tasks run in a
            # group.
            return f"no answer: {str(error) or type(error).__name__}", {}
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            return f"what it answered is no JSON object: {error}", {}
        except UnknownInstance as error:
            return str(error), {}

    async def _ask(
        self, method: str, url: str, timeout_s: float, body: dict[str, str] | None = None
    ) -> tuple[int, bytes]:
        """The status and about the first `_ANSWER_BYTES_MAX` bytes of the answer; the rest of a
        longer answer is not read."""
        port = httpx.URL(url).port
        if port is not None and not 0 < port < 1 << 16:
            raise httpx.InvalidURL(f"no port {port}: there are 1 to 65535")
        asked = self._http.stream(method, url, json=body, headers=_PLAIN, timeout=None)
        async with asyncio.timeout(timeout_s), asked as answer:
            content = b""
            async for piece in answer.aiter_raw():
                content += piece[:_ANSWER_BYTES_MAX]
                if len(content) >= _ANSWER_BYTES_MAX:
                    break
            return answer.status_code, content


def _what(action: Action) -> str:
    if isinstance(action, SetRole | Verify):
        return f"role {action.role.value}"
    return "save its blocks"
