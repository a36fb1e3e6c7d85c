"""Answers that come compressed. The gateway asks engines for them as they are, and a proxy in front
of one may compress them nevertheless. Streams are passed on decompressed, as events that can't be
read could be neither counted nor told apart; what comes in one piece is read and passed on as it
is."""

from __future__ import annotations

import zlib
from typing import TYPE_CHECKING

from ...client.http_session import Broken

if TYPE_CHECKING:
    from ...client.http_session import HttpAnswer

# What `zlib` reads, which tells the two apart by their heads.
KNOWN = ("gzip", "x-gzip", "deflate")
# Of what a piece becomes, given out at a time: a few KB of zeros may be gigabytes.
_PIECE_BYTES_MAX = 1 << 20
# Of an answer in one piece, which is read for its numbers.
_WHOLE_BYTES_MAX = 64 << 20


def plain(body: bytes, encoding: str) -> bytes:
    """A whole body, decompressed if that can be; 64 MiB of it at most."""
    if encoding.strip().lower() not in KNOWN:
        return body
    try:
        return zlib.decompressobj(zlib.MAX_WBITS | 32).decompress(body, _WHOLE_BYTES_MAX)
    except zlib.error:
        return body


class Inflated:
    """The body of `answer`, decompressed as it comes. The interface is that of `HttpAnswer`."""

    def __init__(self, answer: HttpAnswer) -> None:
        self._answer = answer
        self._inflating = zlib.decompressobj(zlib.MAX_WBITS | 32)

    async def piece(self) -> bytes:
        """The next bytes, as many as have come; b"" at the end. Raises HttpFailure."""
        try:
            while packed := self._inflating.unconsumed_tail or await self._answer.piece():
                if found := self._inflating.decompress(packed, _PIECE_BYTES_MAX):
                    return found
            return self._inflating.flush()  # what was over the limit of the last piece
        except zlib.error as error:
            raise Broken(f"its stream is not compressed as it says: {error}") from error

    def close(self) -> None:
        """Close the connection, unless the answer was read to its end."""
        self._answer.close()
