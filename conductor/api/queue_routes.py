"""The REST routes of held requests: waiting for a release, and engines that ask what is next."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Annotated

from fastapi import Query, Request
from starlette.responses import Response  # noqa: TC002 # FastAPI reads it

from ..errors import InvalidRequest, UnknownRequest
from ..records import Rejection
from ..state.request_ids import name_of, parted
from ..web.auth import Right
from ..wire import conversions, models
from ..wire.answers import answer, rejected, told
from .parameters import InstanceId, RequestId, Tenant, Waiter  # noqa: TC001
from .rest_route import HotRoute, body_of, rest, router_of, service_of

if TYPE_CHECKING:
    from .conductor_service import Service

hot = router_of(HotRoute)


@hot.get(
    "/v1/requests/{request_id}/release",
    **rest(
        "requests",
        Right.SCHEDULE,
        models.ReleaseReply,
        {
            404: "No such request of this tenant is in flight.",
            429: "It had to leave a full queue for one of a higher class (`preempted`).",
        },
    ),
)
async def release(
    http: Request,
    request_id: RequestId,
    tenant: Tenant = "",
    wait_s: Annotated[
        float,
        Query(
            ge=0,
            le=models.RELEASE_WAIT_S_MAX,
            description="How long to wait for the release before the answer `held`.",
        ),
    ] = 0.0,
) -> Response:
    """Wait for the release of a held request: ask again as long as it is `held`. Ask the conductor
    that decided. Whoever asks need not say `alive`; whoever does not want the answer any more says
    `cancelled`."""
    conversions.check_id(request_id, "request_id")
    name = name_of(tenant, request_id)
    outcome = await service_of(http).release(name, _seconds(wait_s))
    if isinstance(outcome, Rejection):
        return rejected(outcome)
    return answer(conversions.release_reply(outcome))


@hot.post(
    "/v1/releases/{waiter}",
    **rest("requests", Right.SCHEDULE, models.ReleasesReply),
)
async def releases(
    http: Request,
    waiter: Waiter,
    wait_s: Annotated[
        float,
        Query(
            ge=0, le=models.RELEASE_WAIT_S_MAX, description="How long to wait if there are none."
        ),
    ] = 0.0,
) -> Response:
    """Take the releases of all requests that were scheduled with this `waiter`: one call instead of
    one for each. What is told here is not told again, so look after a request whose release does
    not come with `GET /v1/requests/{request_id}/release`, which says that it is alive, too: now
    and then, and after a call without an answer. Ask the conductor that decided."""
    conversions.check_id(waiter, "a waiter's name")
    service = service_of(http)
    names = await service.mailboxes.take(waiter, _seconds(wait_s))
    found = [_released(service, name) for name in names]
    return answer(models.ReleasesReply(releases=[one for one in found if one is not None]))


def _released(service: Service, name: str) -> models.ReleasedReply | None:
    """What to tell of a request that was held; None if it has ended meanwhile."""
    tenant, request_id = parted(name)
    try:
        outcome = service.released(name)
    except UnknownRequest:
        return None
    if not isinstance(outcome, Rejection):
        release = conversions.release_reply(outcome)
        return models.ReleasedReply(request_id=request_id, tenant=tenant, release=release)
    status, error = told(outcome)
    return models.ReleasedReply(request_id=request_id, tenant=tenant, status=status, error=error)


@hot.post(
    "/v1/instances/{instance}/next",
    **rest(
        "instances",
        Right.OPERATE,
        models.NextsReply,
        {404: "No such instance is registered."},
        body=models.NextBody,
        optional=True,
        own=True,
    ),
)
async def next_prefills(http: Request, instance: InstanceId) -> Response:
    """Which requests this instance computes next, in this order. For engines that get all their
    requests at once and ask before each prefill: they register with the label `pulls` = `true`, and
    then no request is held for them. Each request is named once; an engine that has others computes
    them when nothing is left here, in its own order."""
    conversions.check_id(instance, "an instance's id")
    body = await body_of(http, models.NextBody, optional=True)
    names = service_of(http).next_prefills(instance, body.n, idle=body.idle)
    found = [parted(name) for name in names]
    return answer(
        models.NextsReply(
            requests=[models.NextReply(request_id=one, tenant=tenant) for tenant, one in found]
        )
    )


def _seconds(text: object) -> float:
    """The query's `wait_s`: text, and empty if it is left out. Raises InvalidRequest."""
    try:
        seconds = float(str(text) or 0.0)
    except ValueError:
        seconds = math.nan
    if not 0.0 <= seconds <= models.RELEASE_WAIT_S_MAX:
        raise InvalidRequest(f"wait_s: 0 to {models.RELEASE_WAIT_S_MAX:g} seconds")
    return seconds
