"""An answer's head goes out with its body, and alone only if there is none yet."""

from __future__ import annotations

import asyncio
from typing import Any

from tiffin.conductor.service.held_head import HeldHead

HEAD = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n"


class Transport:
    def __init__(self) -> None:
        self.sent: list[bytes] = []
        self.closed = False

    def write(self, data: bytes) -> None:
        assert not self.closed
        self.sent.append(data)

    def close(self) -> None:
        self.closed = True

    def is_closing(self) -> bool:
        return self.closed

    def get_extra_info(self, name: str) -> Any:
        return name

    def get_write_buffer_size(self) -> int:
        return 7


def scenario(steps: Any) -> list[bytes]:
    async def run() -> list[bytes]:
        transport = Transport()
        await steps(HeldHead(transport, asyncio.get_running_loop(), lambda: False))  # type: ignore[arg-type]
        return transport.sent

    return asyncio.run(run())


def test_with_its_body() -> None:
    async def steps(it: HeldHead) -> None:
        it.write(HEAD)
        it.write(b"ok")
        await asyncio.sleep(0)
        it.write(HEAD)  # the next answer on this connection
        it.write(b"")
        it.write(b"more")

    assert scenario(steps) == [HEAD + b"ok", HEAD, b"more"]


def test_alone_in_the_next_turn_of_the_loop() -> None:
    async def steps(it: HeldHead) -> None:
        it.write(HEAD)
        assert it._transport.sent == []  # type: ignore[attr-defined]
        await asyncio.sleep(0)
        it.write(b"later")
        assert it._transport.sent == [HEAD, b"later"]  # type: ignore[attr-defined]

    assert scenario(steps) == [HEAD, b"later"]


def test_before_the_connection_is_closed() -> None:
    async def steps(it: HeldHead) -> None:
        it.write(HEAD)
        it.close()
        assert it.is_closing()
        await asyncio.sleep(0)

    assert scenario(steps) == [HEAD]


def test_all_else_is_the_transport_s() -> None:
    async def steps(it: HeldHead) -> None:
        assert it.get_extra_info("peername") == "peername"
        assert it.get_write_buffer_size() == 7

    scenario(steps)
