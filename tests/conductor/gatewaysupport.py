"""A gateway between stub engines and a real conductor, all on real ports of one event loop.

The engines are doubles: they speak vLLM's side of the protocol (OpenAI's routes, server-sent
events, `kv_transfer_params`, `/tokenize`), and compute nothing. A real vLLM needs half a minute and
gigabytes to start; what it sends was recorded from one.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import socket
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NoReturn

import httpx
import msgspec
import uvicorn
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, PlainTextResponse, Response

from tiffin.conductor.api.app import create_app as create_conductor_app
from tiffin.conductor.client import AsyncConductorClient
from tiffin.conductor.gateway.app import create_app
from tiffin.conductor.gateway.config import GatewayConfig, GatewayTimeouts
from tiffin.conductor.gateway.gateway import Gateway
from tiffin.conductor.records import InstanceSpec, Load, RequestEvent, Role
from tiffin.conductor.replicas.replica import SharedConductor
from tiffin.conductor.service.web_server import listening

if TYPE_CHECKING:
    import ssl
    from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
    from pathlib import Path

    from tiffin.conductor.api.conductor_service import Service
    from tiffin.conductor.web.auth import Tokens
    from tiffin.conductor.web.tracing import Tracing

MODEL = "llama-3-8b"
PROFILE = "llama-3.1-8b.h100.tp1.vllm"
# Only a hang takes this long; tests make requests late by `skip`.
TIMES = GatewayTimeouts(
    conductor_s=20.0, connect_s=20.0, tokenize_s=20.0, first_token_s=20.0, idle_s=20.0
)
CONFIG = GatewayConfig(timeouts=TIMES, report_s=0.01)
PATIENCE_S = 30.0


def changed(**changes: Any) -> GatewayConfig:
    """CONFIG with these changes."""
    return msgspec.structs.replace(CONFIG, **changes)


class SkippingLoop(asyncio.SelectorEventLoop):
    """An event loop whose clock a test can advance: timeouts end when the test says so, however
    slow the machine is."""

    skipped_s = 0.0

    def time(self) -> float:
        return super().time() + self.skipped_s


def skip(seconds: float) -> None:
    """Advance the clock of this loop."""
    loop = asyncio.get_running_loop()
    assert isinstance(loop, SkippingLoop)
    loop.skipped_s += seconds


def run(scenario: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """Run a scenario in a SkippingLoop."""
    with asyncio.Runner(loop_factory=SkippingLoop) as runner:
        runner.run(scenario())


class Died(Exception):
    """Ends a stub engine's answer, and its connection with it."""


@dataclass
class Engine:
    """A stub engine. `answer` are its tokens; it waits for `go` before each from number `hold_at`
    on, and for `compute` before a prefill. It dies before number `die_at`; with -1 before an
    answer's first byte, and is the only one of its `rivals` that does. `odd` is a false answer
    that it gives instead, with its content type, and `encoding` that of its content. `stored`: what
    it tells of a prefill's blocks in the pool, `cached` of the prompt's tokens that it had,
    `rendered` of a chat's images."""

    name: str
    role: Role = Role.MIXED
    answer: list[str] = field(default_factory=lambda: ["Dabba", "wal", "las", " deliver", "."])
    hold_at: int | None = None
    die_at: int | None = None
    status: int = 200
    tokenizes: bool = True
    odd: tuple[str, bytes] | None = None
    encoding: str = "identity"
    url: str = ""
    calls: list[tuple[str, dict[str, Any], dict[str, str]]] = field(default_factory=list)
    aborted: int = 0
    go: asyncio.Event = field(default_factory=asyncio.Event)
    compute: asyncio.Event = field(default_factory=asyncio.Event)
    sent: bytes = b""
    stored: dict[str, int] = field(default_factory=lambda: {"blocks": 1})
    rivals: Sequence[Engine] = ()
    cached: int | None = None
    rendered: tuple[int, Any] = (403, {"error": "disabled"})

    def __post_init__(self) -> None:
        self.compute.set()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        http = HttpRequest(scope, receive)
        if http.url.path == "/health":
            await Response(status_code=self.status)(scope, receive, send)
            return
        body = await http.json()
        self.calls.append((http.url.path, body, dict(http.headers)))
        if http.url.path == "/tokenize":
            await self._tokenize(body)(scope, receive, send)
            return
        if http.url.path.endswith("/render"):
            status, said = self.rendered
            await JSONResponse(said, status)(scope, receive, send)
            return
        if self.odd is not None:
            kind, content = self.odd
            headers = {"content-type": kind, "content-encoding": self.encoding}
            await Response(content, headers=headers)(scope, receive, send)
            return
        if self.status != 200:
            error = {"message": "no", "type": "BadRequestError", "code": self.status}
            await JSONResponse({"error": error}, self.status)(scope, receive, send)
            return
        await self._until_gone(self._complete(body, scope, receive, send), receive)

    async def _until_gone(self, answering: Coroutine[Any, Any, None], receive: Any) -> None:
        work = asyncio.create_task(answering)
        gone = asyncio.create_task(self._gone(receive))
        await asyncio.wait((work, gone), return_when=asyncio.FIRST_COMPLETED)
        if not work.done():
            self.aborted += 1
            work.cancel()
        gone.cancel()
        outcome, _ = await asyncio.gather(work, gone, return_exceptions=True)
        if isinstance(outcome, Died):
            raise outcome

    @property
    def completions(self) -> list[dict[str, Any]]:
        """The bodies of its completion requests."""
        asides = ("/tokenize", "/v1/chat/completions/render")
        return [body for path, body, _ in self.calls if path not in asides]

    def _die(self) -> NoReturn:
        for rival in self.rivals:
            rival.die_at = None
        raise Died

    def _tokenize(self, body: dict[str, Any]) -> Any:
        if not self.tokenizes:
            return PlainTextResponse("Not Found", 404)
        text = body.get("prompt") or "".join(str(m["content"]) for m in body["messages"])
        return JSONResponse({"tokens": [ord(c) for c in text], "count": len(text)})

    async def _complete(self, body: dict[str, Any], scope: Any, receive: Any, send: Any) -> None:
        params = body.get("kv_transfer_params") or {}
        if params.get("do_remote_decode") or body.get("max_tokens") == 1:
            await self.compute.wait()
        if self.die_at == -1:
            head = {"type": "http.response.start", "status": 200}
            await send({**head, "headers": [(b"content-type", b"application/json")]})
            self._die()
        if body.get("stream"):
            await self._stream(body, send)
            return
        for number in range(len(self.answer)):
            if self.hold_at is not None and number >= self.hold_at:
                await self.go.wait()
        told = {**params, "do_remote_prefill": True, "remote_block_ids": [7, 8]} if params else None
        if "tiffin" in params:
            told = {"tiffin": self.stored, "remote_host": "10.0.0.1"}
        whole = {
            "id": "cmpl-1",
            "choices": [{"index": 0, "text": "".join(self.answer), "finish_reason": "stop"}],
            "usage": self.usage,
            "kv_transfer_params": told,
        }
        await JSONResponse(whole)(scope, receive, send)

    async def _stream(self, body: dict[str, Any], send: Any) -> None:
        headers = [(b"content-type", b"text/event-stream; charset=utf-8")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        usage = (body.get("stream_options") or {}).get("include_usage", False)
        for number, event in enumerate(self.events("messages" in body, usage=usage)):
            if number == self.die_at:
                self._die()
            if self.hold_at is not None and number >= self.hold_at:
                await self.go.wait()
            self.sent += b"" if b'"usage"' in event else event
            middle = len(event) // 2  # chunks do not end where events do
            for part in (event[:middle], event[middle:]):
                await send({"type": "http.response.body", "body": part, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    @property
    def usage(self) -> dict[str, Any]:
        """What it counts; as vLLM, it says nothing of cached tokens unless it is told to."""
        counts: dict[str, Any] = {"prompt_tokens": 4, "completion_tokens": len(self.answer)}
        if self.cached is not None:
            counts["prompt_tokens_details"] = {"cached_tokens": self.cached}
        return counts

    def events(self, chat: bool, *, usage: bool = False) -> list[bytes]:
        """The events of a streamed answer."""
        found = []
        for token in self.answer:
            new = {"delta": {"content": token}} if chat else {"text": token}
            found.append({"choices": [{"index": 0, **new, "finish_reason": None}]})
        last = {"delta": {}} if chat else {"text": ""}
        found.append({"choices": [{"index": 0, **last, "finish_reason": "stop"}]})
        if usage:
            found.append({"choices": [], "usage": self.usage})
        return [f"data: {json.dumps(e)}\n\n".encode() for e in found] + [b"data: [DONE]\n\n"]

    async def _gone(self, receive: Any) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass


def only_the_first_dies(*engines: Engine) -> tuple[Engine, ...]:
    """These engines, of which the one that is asked first dies alone."""
    for engine in engines:
        engine.rivals = engines
    return engines


@dataclass
class Whole(Engine):
    """An engine that tells what it was asked on every route, and keeps responses."""

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        http = HttpRequest(scope, receive)
        path = http.url.path
        if path in ("/health", "/v1/completions", "/v1/chat/completions", "/tokenize"):
            await super().__call__(scope, receive, send)
            return
        raw = await http.body()
        self.calls.append((path, {"raw": raw}, dict(http.headers)))
        if http.query_params.get("stream") == "true":
            await self._until_gone(self._stream({}, send), receive)
            return
        if path == "/v1/audio/speech":
            await Response(b"RIFF", media_type="audio/wav")(scope, receive, send)
            return
        body = json.loads(raw) if raw and "multipart" not in http.headers["content-type"] else {}
        said = {"id": body.get("request_id"), "at": self.name, "path": path, "sent": len(raw)}
        usage = {"output_tokens": 4}
        await JSONResponse({**said, "usage": usage})(scope, receive, send)


class Heard(SharedConductor):
    """The real core, which records its calls. It shares nothing: it has no address, and leads."""

    def __init__(self) -> None:
        super().__init__("heard", dice=random.Random(1))
        self.steering.lease = None
        self.events: list[RequestEvent] = []
        self.asked: list[Any] = []

    def observe(self, event: RequestEvent, now: float) -> None:
        self.events.append(event)
        super().observe(event, now)

    def schedule(self, request: Any, now: float) -> Any:
        self.asked.append(request)
        return super().schedule(request, now)

    @property
    def kinds(self) -> list[str]:
        return [event.kind for event in self.events]

    @property
    def tokens(self) -> int:
        """The sum of reported tokens: the first one, and those of later events."""
        first = self.kinds.count("first_token")
        return first + sum(event.tokens for event in self.events)


@dataclass
class Cluster:
    """The gateway, the conductor and the engines."""

    http: httpx.AsyncClient
    gateway: Gateway
    core: Heard
    conductor: AsyncExitStack
    service: Service
    stopped: bool = False

    async def post(self, body: dict[str, Any], path: str = "completions", **more: Any) -> Any:
        return await self.http.post(f"/v1/{path}", json={"model": MODEL, **body}, **more)

    def stream(self, body: dict[str, Any], path: str = "completions", **more: Any) -> Any:
        body = {"model": MODEL, "stream": True, **body}
        return self.http.stream("POST", f"/v1/{path}", json=body, **more)

    async def idle(self) -> None:
        """Wait until all events are reported, and nothing is left of any request."""
        await until(lambda: not self.gateway.gate.requests)
        while self.stopped and len(self.gateway.reporter):
            skip(1.0)  # the ends of requests are told again, in vain
            await asyncio.sleep(0.01)
        await until(lambda: not len(self.gateway.reporter))
        assert self.gateway.gate.held_bytes == 0

    async def stop_conductor(self) -> None:
        self.stopped = True
        await self.conductor.aclose()

    def number(self, name: str) -> float:
        """A metric, summed over its labels."""
        lines = self.gateway.metrics.text().decode().splitlines()
        found = [line for line in lines if line.startswith(f"tiffin_gateway_{name}")]
        assert found, name
        return sum(float(line.rpartition(" ")[2]) for line in found if "_created" not in line)


@asynccontextmanager
async def cluster(
    *engines: Engine,
    config: GatewayConfig = CONFIG,
    settings: dict[str, Any] | None = None,
    auth: Tokens | None = None,
    conductor_auth: Tokens | None = None,
    conductor_token: Path | None = None,
    tracing: tuple[Tracing, Tracing] | None = None,
) -> AsyncIterator[Cluster]:
    """Run all parts; at the end every request has to have ended. `tracing`: that of the gateway and
    of the conductor."""
    gateway_tracing, conductor_tracing = tracing or (None, None)
    core = Heard()
    async with AsyncExitStack() as stack:
        now = asyncio.get_running_loop().time
        if settings:
            core.patch(settings, now())
        for engine in engines:
            engine.url = await stack.enter_async_context(serving(engine))
            spec = InstanceSpec(engine.name, MODEL, engine.role, PROFILE, url=engine.url)
            core.register(spec, now())
            core.heartbeat(engine.name, Load(), now())
        conductor = await stack.enter_async_context(AsyncExitStack())
        app = create_conductor_app(core, auth=conductor_auth, clock=now, tracing=conductor_tracing)
        url = await conductor.enter_async_context(serving(app))
        client = AsyncConductorClient(
            url, token_file=conductor_token, timeout_s=config.timeouts.conductor_s
        )
        gateway = await stack.enter_async_context(
            Gateway(client, config, clock=now, tracing=gateway_tracing)
        )
        front = await stack.enter_async_context(serving(create_app(gateway, auth=auth)))
        http = await stack.enter_async_context(
            httpx.AsyncClient(base_url=front, trust_env=False, verify=False, timeout=PATIENCE_S)
        )
        it = Cluster(http, gateway, core, conductor, app.state.service)
        yield it
        await it.idle()


class _Server(uvicorn.Server):
    """Starts and ends without uvicorn's pauses of 0.1 s."""

    async def end(self) -> None:
        for server in self.servers:
            server.close()
        for connection in list(self.server_state.connections):
            connection.shutdown()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(2.0):
                while self.server_state.connections or self.server_state.tasks:  # noqa: ASYNC110
                    await asyncio.sleep(0.002)
        for connection in list(self.server_state.connections):
            connection.transport.abort()  # type: ignore[union-attr]
        for server in self.servers:
            await server.wait_closed()


@asynccontextmanager
async def serving(app: Any, tls: ssl.SSLContext | None = None) -> AsyncIterator[str]:
    """Serve an ASGI application; yields its URL."""
    with listening(("127.0.0.1", 0)) as door:
        door.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        config = uvicorn.Config(app, lifespan="off", log_config=None, access_log=False, ws="none")
        config.load()
        config.ssl = tls
        server = _Server(config)
        server.lifespan = config.lifespan_class(config)
        await server.startup([door])
        try:
            yield f"http{'s' if tls else ''}://127.0.0.1:{door.getsockname()[1]}"
        finally:
            await server.end()


async def until(true: Callable[[], bool]) -> None:
    """Wait until `true()`."""
    async with asyncio.timeout(PATIENCE_S):
        while not true():  # noqa: ASYNC110 # the condition can't notify
            await asyncio.sleep(0.002)
