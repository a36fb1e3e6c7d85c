"""The REST routes of engines that the conductor itself asks."""

from __future__ import annotations

import msgspec
from fastapi import Request  # noqa: TC002 # FastAPI reads them
from starlette.responses import Response  # noqa: TC002 # FastAPI reads it

from ..errors import InvalidRequest
from ..web.auth import Right
from ..wire import conversions, engine_models, models
from ..wire.answers import answer
from .rest_route import RestRoute, body_of, rest, router_of, service_of

api = router_of(RestRoute)


@api.post(
    "/v1/engines",
    **rest(
        "instances",
        Right.OPERATE,
        models.InstanceReply,
        {
            409: "Another instance keys this model differently, or has other block_tokens.",
            503: "The engine does not answer.",
        },
        body=engine_models.EngineBody,
    ),
)
async def add_engine(http: Request) -> Response:
    """Ask an engine (vLLM or SGLang) what it is, register it as an instance, and ask it every
    second how busy it is from then on: it need not send heartbeats. What it does not tell is in the
    body; the error names what is missing. It stays until its instance is removed or this conductor
    ends: what shall stay for longer is in the settings file (`[discovery]`)."""
    body = await body_of(http, engine_models.EngineBody)
    service = service_of(http)
    if service.engines is None:
        raise InvalidRequest("this conductor does not ask engines")
    named = {name: getattr(body, name) for name in engine_models.EngineOptions.__struct_fields__}
    options = msgspec.convert(named, engine_models.EngineOptions)
    instance = await service.engines.add(body.url, options)
    view = service.core.instance(instance, service.clock())
    return answer(conversions.instance_reply(view, service.models))


@api.get("/v1/engines", **rest("instances", Right.READ, engine_models.EnginesReply))
async def engines(http: Request) -> Response:
    """The engines that this conductor asks, and why one is not registered or does not answer."""
    asked = service_of(http).engines
    none = engine_models.EnginesReply(engines=[], failing=[])
    return answer(none if asked is None else asked.reply())
