"""A path of the messenger's tests without a network: it delays and breaks as the test sets it."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from tiffin.messenger.errors import PeerLost, TransferError, TransferTimeout
from tiffin.messenger.transport import NOTHING, Range, Served
from tiffin.messenger.wire.ranges import views_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tiffin.messenger.shm.host_copy import ByteArray
    from tiffin.messenger.testing import GrantBook
    from tiffin.messenger.transport import Arrived


class ScriptedPath:
    """A transport to the grants of `book`, under the name of a real kind of transport.

    A read first takes `delay_s`. The path breaks after `bytes_left` more bytes, perhaps in the
    middle of a range, and stays broken until the test sets `bytes_left` again. With `failure`, a
    read raises that instead. `reads` counts the reads, `asked` lists the ranges that were moved.
    """

    def __init__(self, book: GrantBook, name: str, *, bytes_left: int = 1 << 40) -> None:
        self.name = name
        self.bytes_left = bytes_left
        self.delay_s = 0.0
        self.failure: Exception | None = None
        self.reads = 0
        self.asked: list[Range] = []
        self._book = book
        self._closed = False

    def read(
        self,
        grant: int,
        ranges: Sequence[Range],
        targets: Sequence[ByteArray],
        *,
        deadline: float,
        arrived: Arrived | None = None,
    ) -> Served:
        """See `Transport.read`."""
        views = views_of(ranges, targets, writable=True)
        self.reads += 1
        if self.failure is not None:
            raise self.failure
        left_s = deadline - time.monotonic()
        time.sleep(max(0.0, min(self.delay_s, left_s)))
        if left_s <= self.delay_s:
            raise TransferTimeout("a test made it late")
        served = NOTHING
        with self._book.open(grant, writes=False) as arrays:
            content = memoryview(b"".join(arrays))
            for index, (one, view) in enumerate(zip(ranges, views, strict=True)):
                if one.offset + one.length > len(content):
                    break
                try:
                    self._move(content[one.offset : one.offset + one.length], view)
                except TransferError as error:
                    error.served = served
                    raise
                served = Served(index + 1, served.nbytes + one.length)
                self.asked.append(one)
                if arrived is not None:
                    arrived(index)
        return served

    def close(self) -> None:
        """See `Transport.close`."""
        self._closed = True

    def _move(self, source: memoryview, target: memoryview) -> None:
        nbytes = min(len(source), self.bytes_left)
        target[:nbytes] = source[:nbytes]
        self.bytes_left -= nbytes
        if self._closed or nbytes < len(source):
            raise PeerLost("a test broke it")
