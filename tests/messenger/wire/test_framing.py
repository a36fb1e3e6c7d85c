"""Frames: any split of the stream gives the same bodies; oversized ones get no memory."""

from __future__ import annotations

import asyncio
import random
import struct
import tracemalloc

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tiffin.messenger.errors import FrameError
from tiffin.messenger.wire.framing import FRAME_BYTES_MAX, FrameDecoder, encode_frame


@given(
    bodies=st.lists(st.binary(max_size=300), max_size=12),
    sizes=st.lists(st.integers(1, 50), min_size=1, max_size=30),
)
def test_any_cut_gives_the_same_bodies(bodies: list[bytes], sizes: list[int]) -> None:
    stream = b"".join(encode_frame(body) for body in bodies)
    received: list[bytes | memoryview] = []
    decoder, turn = FrameDecoder(), 0
    while stream:
        nbytes = sizes[turn % len(sizes)]
        received += decoder.feed(stream[:nbytes])
        stream, turn = stream[nbytes:], turn + 1
    assert received == bodies
    assert decoder.pending_bytes == 0


def test_bodies_of_every_size_through_the_buffer() -> None:
    """As an event loop reads: in random lengths, into the decoder's own memory."""
    chance = random.Random(1)
    sizes = [0, 1, 4096, 65531, 65532, 65533, 65536, 65537, 200_000, 3 << 20, 5, 1 << 20, 0, 70_000]
    sizes += [chance.randrange(5000) for _ in range(300)]
    bodies = [chance.randbytes(size) for size in sizes]
    stream = memoryview(b"".join(encode_frame(body) for body in bodies))
    received: list[bytes | memoryview] = []
    decoder = FrameDecoder()
    while stream:
        room = decoder.get_buffer(-1)
        nbytes = min(len(room), len(stream), chance.choice((1, 100, 4096, 65536, 1 << 20)))
        room[:nbytes] = stream[:nbytes]
        decoder.buffer_updated(nbytes)
        received += decoder
        stream = stream[nbytes:]
    assert received == bodies  # compared at the end: later bodies must not overwrite earlier ones
    assert decoder.pending_bytes == 0


def test_the_largest_frame_passes_and_the_next_does_not() -> None:
    body = bytes(FRAME_BYTES_MAX)
    assert FrameDecoder().feed(encode_frame(body)) == [body]
    with pytest.raises(FrameError):
        encode_frame(body + b"x")
    with pytest.raises(FrameError, match="16777217"):
        FrameDecoder().feed(struct.pack("<I", FRAME_BYTES_MAX + 1))


def test_garbage_is_refused_at_its_first_four_bytes_and_for_good() -> None:
    decoder = FrameDecoder()
    with pytest.raises(FrameError):
        decoder.feed(b"GET / HTTP/1.1\r\n\r\n")
    with pytest.raises(FrameError):
        decoder.take()


def test_an_announced_frame_takes_no_memory() -> None:
    tracemalloc.start()
    try:
        decoders = [FrameDecoder() for _ in range(50)]
        for decoder in decoders:
            decoder.feed(struct.pack("<I", FRAME_BYTES_MAX))
            decoder.get_buffer()
        assert tracemalloc.get_traced_memory()[1] < 50 * 200_000
    finally:
        tracemalloc.stop()


def test_memory_shrinks_after_a_large_frame() -> None:
    decoder = FrameDecoder()
    large = encode_frame(bytes(8 << 20))
    (body,) = decoder.feed(large)
    assert len(decoder.get_buffer()) < 100_000
    assert isinstance(body, memoryview)
    assert decoder.feed(encode_frame(b"next") + b"\x09") == [b"next"]
    assert decoder.pending_bytes == 1


def test_a_caller_that_never_takes_is_stopped() -> None:
    decoder = FrameDecoder(frame_bytes_max=100_000)
    frame = encode_frame(bytes(1000))

    def receive_forever() -> None:
        while True:
            room = decoder.get_buffer()
            nbytes = min(len(room), len(frame))
            room[:nbytes] = frame[:nbytes]
            decoder.buffer_updated(nbytes)

    with pytest.raises(FrameError, match="not taken"):
        receive_forever()


def test_a_smaller_limit_holds() -> None:
    decoder = FrameDecoder(frame_bytes_max=10)
    assert decoder.feed(encode_frame(bytes(10))) == [bytes(10)]
    with pytest.raises(FrameError):
        decoder.feed(encode_frame(bytes(11)))


def test_as_a_buffered_protocol() -> None:
    received: list[int] = []
    done = asyncio.Event()

    class Echo(asyncio.BufferedProtocol):
        def __init__(self) -> None:
            self._decoder = FrameDecoder()

        def get_buffer(self, sizehint: int) -> memoryview:
            return self._decoder.get_buffer(sizehint)

        def buffer_updated(self, nbytes: int) -> None:
            self._decoder.buffer_updated(nbytes)
            received.extend(len(body) for body in self._decoder.take())
            if len(received) == 4:
                done.set()

    async def exchange() -> None:
        loop = asyncio.get_running_loop()
        server = await loop.create_server(Echo, "127.0.0.1", 0)
        _, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
        for size in (0, 10, 100_000, 1 << 20):
            writer.write(encode_frame(bytes(size)))
        await writer.drain()
        async with asyncio.timeout(10):
            await done.wait()
        writer.close()
        await writer.wait_closed()
        server.close()
        await server.wait_closed()

    asyncio.run(exchange())
    assert received == [0, 10, 100_000, 1 << 20]
