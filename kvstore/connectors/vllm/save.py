"""One save of an engine's blocks, which two threads work on."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

    from .orders import SaveOrder


class Save:
    """One save. The engine's thread may give up what it has not copied yet. `failed`: it has ended,
    and not all of its blocks are stored, or will be by another writer."""

    def __init__(self, order: SaveOrder) -> None:
        self.order = order
        self.failed = False
        self._given_up = self._copying = False
        self._changed = threading.Condition()

    def pages_of(self, blocks: Iterable[int], block_pages: int) -> tuple[int, ...]:
        """The pages of some of the order's blocks, of `block_pages` each."""
        starts = [block * block_pages for block in blocks]
        return tuple(page for at in starts for page in self.order.pages[at : at + block_pages])

    def begin_copy(self) -> bool:
        """Whether the pages may be read; if so, `end_copy` must follow."""
        with self._changed:
            self._copying = not self._given_up
            return self._copying

    def end_copy(self) -> None:
        """The pages have been read; they may be once more."""
        with self._changed:
            self._copying = False
            self._changed.notify_all()

    def drain(self) -> None:
        """Give the save up; returns when its copy, which is only a memcpy, has ended."""
        with self._changed:
            self._given_up = True
            while self._copying:
                self._changed.wait()
