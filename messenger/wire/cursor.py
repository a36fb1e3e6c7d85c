"""A position in a list of pieces of memory (scatter/gather I/O). No I/O happens here."""

from __future__ import annotations

from ..transport import Served

# Pieces of one system call: IOV_MAX of Linux.
PIECES_MAX = 1024


class Cursor:
    """The position of the next byte to send from, or receive into, a list of pieces."""

    __slots__ = ("_at", "_views", "index", "left")

    def __init__(self, views: list[memoryview]) -> None:
        self._views = views
        self._at = 0
        self.index = 0  # of the first piece that is not complete
        self.left = sum(map(len, views))  # bytes still to move
        if views and not views[0]:
            self.advance(0)

    def batch(self, nbytes_max: int) -> list[memoryview]:
        """The next pieces, for one system call."""
        first = self._views[self.index]
        if self._at:
            first = first[self._at :]
        if len(first) >= nbytes_max:
            return [first[:nbytes_max]]
        batch, room = [first], nbytes_max - len(first)
        for view in self._views[self.index + 1 : self.index + PIECES_MAX]:
            if len(view) >= room:
                batch.append(view[:room])
                break
            batch.append(view)
            room -= len(view)
        return batch

    def advance(self, nbytes: int) -> None:
        """Move the position by `nbytes`."""
        self.left -= nbytes
        at, views, count = self._at + nbytes, self._views, len(self._views)
        while self.index < count and at >= len(views[self.index]):
            at -= len(views[self.index])
            self.index += 1
        self._at = at

    def served(self) -> Served:
        """The complete pieces, as ranges."""
        return Served(self.index, sum(map(len, self._views[: self.index])))

    def fill(self, data: memoryview) -> int:
        """Copy as many bytes of `data` as fit; returns their number."""
        taken = 0
        while self.left and taken < len(data):
            view = self._views[self.index]
            nbytes = min(len(view) - self._at, len(data) - taken)
            view[self._at : self._at + nbytes] = data[taken : taken + nbytes]
            taken += nbytes
            self.advance(nbytes)
        return taken
