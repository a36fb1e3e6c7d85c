"""The service sends roles to instances, and asks whether they have taken them."""

from __future__ import annotations

import asyncio
import json
import logging
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import TYPE_CHECKING

import pytest
from apisupport import MODEL, Recorder

from tiffin.conductor.api.app import create_app
from tiffin.conductor.records import (
    Decision,
    InstanceSpec,
    Load,
    Request,
    RequestEvent,
    Role,
    Status,
)
from tiffin.conductor.service.action_runner import ROLE_LABEL, Acting
from tiffin.conductor.service.feeds import Feeding

if TYPE_CHECKING:
    from collections.abc import Iterator


class Instance(HTTPServer):
    """Takes roles and orders, unless it `refuses`, and reports its role."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.role, self.refuses, self.lies = "mixed", False, b""
        self.asked: list[str] = []
        self.orders: list[dict[str, str]] = []
        self.left: object = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/role"


class Handler(BaseHTTPRequestHandler):
    server: Instance

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        if "order" in body:
            self.server.orders.append(body)
            status = 500 if self.server.refuses else 200
            self.answer(status, json.dumps({"left": self.server.left}).encode())
            return
        self.server.asked.append("POST")
        if not self.server.refuses:
            self.server.role = body["role"]
        self.answer(500 if self.server.refuses else 204, b"")

    def do_GET(self) -> None:
        self.server.asked.append("GET")
        self.answer(200, self.server.lies or json.dumps({"role": self.server.role}).encode())

    def answer(self, status: int, body: bytes) -> None:
        self.send_response(status)
        if status != 204:
            self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Log nothing on stderr."""


@pytest.fixture
def instance() -> Iterator[Instance]:
    with Instance() as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def flipped(
    instance: Instance, url: str | None = None, role: Role = Role.DECODE, orders: str = ""
) -> tuple[Recorder, list[str]]:
    """Flip `i1`, which decodes a request if it is to prefill, and let the conductor steer until the
    flip has ended."""
    core, ends = Recorder(), list[str]()

    async def scenario() -> None:
        loop = asyncio.get_running_loop()
        feeding = Feeding(lambda update: None, loop)
        service = create_app(core, feeding=feeding, clock=loop.time).state.service
        way = "hand_over" if "hand_over" in orders else "wait"
        service.patch({"planner": {"flips": {"requests": way}}})
        labels = {ROLE_LABEL: instance.url if url is None else url}
        labels |= {"orders_url": instance.url, "orders": orders}
        for name in ("i1", "i2"):
            if name == "i2" and role is Role.PREFILL:
                decodes(core, loop.time())
            spec = InstanceSpec(
                *(name, MODEL, Role.MIXED, "test", f"http://{name}"),
                block_bytes=1 << 20,
                labels=labels,
            )
            core.register(spec, loop.time())
            core.heartbeat(name, Load(), loop.time())
        async with Acting(service, feeding) as acting, asyncio.timeout(20):
            service.flip("i1", role)
            flips = core.steering._planned[MODEL].planner.flips
            while flips.under_way:
                await acting.step()
                await asyncio.sleep(0.01)
            ends.extend(str(flip.step) for flip in flips.ended)
        await feeding.close()

    asyncio.run(scenario())
    return core, ends


def decodes(core: Recorder, now: float) -> None:
    """A request is decoded, by the only instance."""
    core.schedule(Request("a/r", MODEL, 1000, output_tokens=100), now)
    for kind in ("prefill_done", "first_token", "tokens"):
        core.observe(RequestEvent("a/r", kind, 5 if kind == "tokens" else 0), now)


def test_it_hands_over_its_requests_saves_its_blocks_and_takes_its_role(instance: Instance) -> None:
    core, ends = flipped(instance, role=Role.PREFILL, orders="save hand_over")
    assert ends == ["ready"]
    handed_over = {"order": "hand_over", "request": "a/r", "target": "i2", "url": "http://i2"}
    assert instance.orders == [handed_over, {"order": "save"}]
    assert instance.asked == ["POST", "GET"]
    flight = core.ledger.get("a/r")
    assert flight is not None
    assert flight.decision.decode == "i2"


@pytest.mark.parametrize("refuses", [False, True])
def test_bindings_move_at_instances_that_can_change_their_routes(
    instance: Instance, refuses: bool
) -> None:
    """Those of four of eight contexts on two instances that are left, all on one of them."""
    instance.refuses = refuses
    core = Recorder()
    spread = {"enabled": True, "buckets": [[20_000, 2]], "rebind_s": 0.0, "rebind_every_s": 60.0}

    async def scenario() -> None:
        loop = asyncio.get_running_loop()
        feeding = Feeding(lambda update: None, loop)
        service = create_app(core, feeding=feeding, clock=loop.time).state.service
        service.patch({"spread": spread, "admission": {"mode": "off"}})
        labels = {"orders_url": instance.url, "orders": "rebind"}
        for name, role in (("p", Role.PREFILL), ("i1", Role.DECODE), ("i2", Role.DECODE)):
            spec = InstanceSpec(name, MODEL, role, "test", f"http://{name}", labels=labels)
            core.register(spec, loop.time())
        ends = []
        for number in range(8):
            name = f"r{number}"
            asked = Request(name, MODEL, 8 * 1024, output_tokens=4 * 1024)
            decision = service.schedule(asked)
            assert isinstance(decision, Decision)
            core.observe(RequestEvent(name, "first_token"), loop.time())
            ends += [name] if decision.decode == "i2" else []
        for name in ends:
            core.observe(RequestEvent(name, "finished"), loop.time())
        async with Acting(service, feeding) as acting, asyncio.timeout(20):
            await acting.step()
            await asyncio.gather(*acting._calls)
        await feeding.close()

    asyncio.run(scenario())
    names = [order.pop("request") for order in instance.orders]
    assert instance.orders == [{"order": "rebind", "target": "i2", "url": "http://i2"}] * 2
    for name in names:
        flight = core.ledger.get(name)
        assert flight is not None
        assert flight.decision.decode == ("i1" if refuses else "i2")


@pytest.mark.parametrize("left", [1, None, "0"])
def test_one_that_has_not_saved_all_keeps_its_role(instance: Instance, left: object) -> None:
    instance.left = left
    core, ends = flipped(instance, orders="save")
    assert (ends, instance.asked) == (["returned"], [])
    row = core.cluster.row("i1")
    assert (core.cluster.role(row), core.cluster.status[row]) == (Role.MIXED, Status.READY)


def test_it_is_told_asked_and_given_work_again(instance: Instance) -> None:
    core, ends = flipped(instance)
    assert ends == ["ready"]
    assert instance.asked == ["POST", "GET"]
    row = core.cluster.row("i1")
    assert (core.cluster.role(row), core.cluster.status[row]) == (Role.DECODE, Status.READY)


@pytest.mark.parametrize("lies", [b'{"role": "prefill"}', b"{}", b"[]", b"\xff", b""])
def test_what_does_not_take_its_role_is_given_no_work(instance: Instance, lies: bytes) -> None:
    instance.refuses, instance.lies = not lies, lies
    core, ends = flipped(instance)
    assert ends == ["failed"]
    assert core.cluster.status[core.cluster.row("i1")] is not Status.READY


@pytest.mark.parametrize(
    "url",
    [
        "http://127.0.0.1:1/",
        "http://127.0.0.1:99999/",
        "http://127.0.0.1:0/",
        "nowhere",
        "ftp://x",
        "http://[",
        "http://",
        "http://" + "a" * 300,
    ],
)
def test_neither_is_what_cannot_be_reached(
    instance: Instance, url: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, logger="tiffin.conductor"):
        assert flipped(instance, url)[1] == ["failed"]
    assert "i1: role decode: no answer: " in caplog.text, "at once, not when its time is over"
