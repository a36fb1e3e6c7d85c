"""Which blocks are saved layer by layer, while a step computes them. Pure.

Such a save begins before its tokens are confirmed: what it writes may be read at once, but counts
as stored only once it is confirmed. It is given up if the engine takes the tokens back.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ..orders import SaveOrder


class LayerSavePlan:
    """The saves of all requests that are neither confirmed nor given up, in the order of blocks."""

    def __init__(self) -> None:
        self._open: dict[str, list[SaveOrder]] = {}

    def begin(self, order: SaveOrder) -> None:
        """A step computes the ends of these blocks."""
        self._open.setdefault(order.request_id, []).append(order)

    def end_of(self, request_id: str) -> int:
        """The block after the last one that is being saved; 0 if none is."""
        saves = self._open.get(request_id)
        return _end(saves[-1]) if saves else 0

    def confirm(self, request_id: str, blocks: int) -> list[SaveOrder]:
        """The request's first `blocks` blocks are confirmed: the saves of these."""
        saves = self._open.pop(request_id, [])
        confirmed = [order for order in saves if _end(order) <= blocks]
        rest = saves[len(confirmed) :]
        if rest:
            self._open[request_id] = rest
        return confirmed

    def give_up(self, request_id: str, computed_blocks: int = 0) -> list[int]:
        """The engine computes what is behind the first `computed_blocks` blocks anew, or never: the
        numbers of the saves of that."""
        kept = self.confirm(request_id, computed_blocks)
        given_up = [order.number for order in self._open.pop(request_id, ())]
        if kept:
            self._open[request_id] = kept
        return given_up


def _end(order: SaveOrder) -> int:
    return order.prefix.start + len(order.prefix)
