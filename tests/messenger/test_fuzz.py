"""Damaged frames of this protocol, over real sockets, to a server and to a client.

Whatever comes: memory that was not granted for writing does not change, threads and grants are
given back, and correct peers are served. Each run is determined by its seed.
"""

from __future__ import annotations

import contextlib
import random
import socket
import struct
import threading
from contextlib import closing
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np
import pytest
from netsupport import HELLO, serving

from tiffin.messenger.errors import MessengerError
from tiffin.messenger.tcp.stream import PlainStream
from tiffin.messenger.testing import random_bytes, soon
from tiffin.messenger.transport import Range, Served
from tiffin.messenger.wire import frames
from tiffin.messenger.wire.frames import Kind

if TYPE_CHECKING:
    from collections.abc import Iterator

    from netsupport import Server

SIZE = 65_536
EDGES = (0, 1, 2, 255, 2**16, 2**31, 2**32 - 1, 2**63 - 1, 2**63, 2**64 - 1, SIZE, SIZE - 1)


def client_frames(chance: random.Random) -> list[bytes]:
    """What a correct client could send: grant 1 is for reading, grant 2 for writing."""

    def ranges() -> list[Range]:
        numbers = [chance.randrange(SIZE // 4) for _ in range(chance.choice((1, 2, 20)))]
        return [Range(number, chance.randrange(100)) for number in numbers]

    written = ranges()
    body = bytes(sum(length for _, length in written))
    return [
        frames.message_header(4) + b"ping",
        frames.message_header(7) + b"grant 1",
        frames.request(Kind.READ, chance.choice((0, 1, 2, 3)), ranges()),
        frames.request(Kind.WRITE, chance.choice((0, 1, 2, 3)), written) + body,
    ]


def server_frames(chance: random.Random) -> list[bytes]:
    """What a correct server could send."""
    return [
        frames.message_header(4) + b"pong",
        frames.answer(Kind.DATA, Served(2, 20)) + bytes(20),
        frames.refusal(Kind.DATA, "no such grant"),
        frames.answer(Kind.WRITTEN, Served(1, 5)),
    ]


def damage(data: bytes, chance: random.Random) -> bytes:
    """One to four mistakes: flipped, cut, repeated, inserted, and numbers at the edges."""
    broken = bytearray(data)
    for _ in range(chance.randrange(1, 5)):
        at = chance.randrange(len(broken) + 1)
        match chance.randrange(6):
            case 0 if at < len(broken):
                broken[at] ^= 1 << chance.randrange(8)
            case 1:
                del broken[at : at + chance.randrange(1, 40)]
            case 2:
                broken[at:at] = chance.randbytes(chance.randrange(1, 40))
            case 3:
                broken[at : at + 8] = struct.pack("<Q", chance.choice(EDGES))
            case 4:
                broken[at : at + 4] = struct.pack("<I", chance.choice(EDGES) & 0xFFFFFFFF)
            case _:
                broken += broken[at : at + 60]
    return bytes(broken)


@pytest.fixture
def victim() -> Iterator[Server]:
    with serving(stall_s=5.0, connections_max=64) as server:
        yield server


def send(server: Server, data: bytes, *, trusted: bool) -> None:
    """Send, shut down the sending side, and read the answers, up to a mebibyte."""
    with socket.create_connection(server.address, timeout=30) as sock:
        hello = frames.message_header(len(HELLO)) + HELLO if trusted else b""
        # It may have hung up by then: reset, or (at the shutdown) not connected any more.
        with contextlib.suppress(OSError):
            sock.sendall(hello + data)
            sock.shutdown(socket.SHUT_WR)
        with contextlib.suppress(ConnectionResetError):
            received = 0
            while received < 1 << 20 and (some := sock.recv(65_536)):
                received += len(some)


TURNS = 2000, pytest.param(10_000, marks=pytest.mark.slow)


@pytest.mark.parametrize("turns", TURNS[1:])
def test_a_server_survives(victim: Server, turns: int) -> None:
    chance = random.Random(turns)
    content = random_bytes(SIZE, 1)
    assert victim.book.add([content.copy()]) == 1
    readable, _ = victim.book._grants[1]
    assert victim.book.add([np.zeros(SIZE, np.uint8)], writes=True) == 2
    for turn in range(turns):
        sent = [chance.choice(client_frames(chance)) for _ in range(chance.randrange(1, 5))]
        send(victim, damage(b"".join(sent), chance), trusted=chance.random() < 0.9)
        if turn % 500 == 499:
            assert np.array_equal(readable[0], content), turn
            with closing(victim.opener()(soon())) as honest:
                target = np.zeros(SIZE, np.uint8)
                honest.ask_read(1, [Range(0, SIZE)])
                honest.flush(soon())
                honest.receive_data([Range(0, SIZE)], [target], soon())
                assert np.array_equal(target, content)
            victim.talks = [talk for talk in victim.talks if not talk.closed_count]
            victim.messages.clear()


@pytest.mark.parametrize("turns", TURNS)
def test_a_client_survives(turns: int) -> None:
    """It gets an answer or a MessengerError, and writes to nothing but its targets."""
    chance = random.Random(turns)
    memory = np.zeros(3 * 64, np.uint8)
    ranges = [Range(0, 10), Range(10, 10)]
    for turn in range(turns):
        sent = [chance.choice(server_frames(chance)) for _ in range(chance.randrange(1, 4))]
        data = damage(b"".join(sent), chance)
        ours, theirs = socket.socketpair()
        with theirs, closing(PlainStream(ours)) as stream:
            theirs.sendall(data)
            theirs.shutdown(socket.SHUT_WR)
            targets = [memory[64:74], memory[74:84]]
            with contextlib.suppress(MessengerError):
                for _ in range(3):
                    stream._reads_due = stream._writes_due = 1
                    match chance.randrange(3):
                        case 0:
                            stream.receive_message(soon())
                        case 1:
                            stream.receive_data(ranges, targets, soon())
                        case _:
                            stream.receive_written(soon())
        assert not memory[:64].any(), turn
        assert not memory[84:].any(), turn


def test_bytes_in_any_portions(victim: Server) -> None:
    """The same conversation, cut into packets at random places, has the same answers."""
    chance = random.Random(4)
    content = random_bytes(SIZE, 1)
    assert victim.book.add([content]) == 1
    requests = (
        frames.message_header(len(HELLO)) + HELLO,
        frames.message_header(7) + b"grant 1",
        frames.request(Kind.READ, 0, [Range(at, 64) for at in range(0, SIZE, 128)]),
        frames.message_header(5000) + bytes(5000),
        frames.request(Kind.READ, 1, [Range(3, 5)]),
    )
    sent = b"".join(requests)
    answers = set()
    for _ in range(20):
        with socket.create_connection(victim.address, timeout=30) as sock:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            received = bytearray()

            def read(sock: socket.socket = sock, into: bytearray = received) -> None:
                while some := sock.recv(65_536):
                    into += some

            reader = threading.Thread(target=read)
            reader.start()
            cuts = sorted(chance.randrange(len(sent)) for _ in range(chance.randrange(30)))
            for start, stop in pairwise([0, *cuts, len(sent)]):
                sock.sendall(sent[start:stop])
            sock.shutdown(socket.SHUT_WR)
            reader.join()
            answers.add(bytes(received))
    assert len(answers) == 1
    assert answers.pop().endswith(content[3:8].tobytes())
