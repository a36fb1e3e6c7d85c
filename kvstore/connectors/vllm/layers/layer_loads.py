"""Loads beside a forward pass: it starts at once, and each layer waits for its own pages only.

For synchronous loads, whose blocks are held: the copy can't fail. Should it, the engine must end,
because a layer may have computed with anything: so an error of the copying thread is raised in the
engine's, in every call until the engine ends. It is an error too if a layer did not ask for its
pages: nobody knows what it read.
"""

from __future__ import annotations

import time
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ..orders import LoadOrder
    from ..pages.copier import EngineCopier, PageLoad
    from ..settings import Layerwise


def beside_forward(layerwise: Layerwise, nbytes: int, layerwise_bytes: float) -> bool:
    """Whether loads of together `nbytes` are copied beside the forward pass. `layerwise_bytes`: see
    `EngineCopier`."""
    if layerwise == "auto":
        return nbytes >= layerwise_bytes
    return layerwise == "always"


class LayerLoads:
    """Such loads of one step at a time, in a thread of its own. `layers`: the names of the model's
    layers, in the order of the blocks'. Its methods are called in the engine's threads."""

    def __init__(self, copier: EngineCopier, layers: Sequence[str]) -> None:
        self._copier = copier
        self._layers = {name: index for index, name in enumerate(layers)}
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="tiffin-layers")
        self._orders: Sequence[LoadOrder] = ()
        self._unasked: set[str] = set()
        # Of the step's loads, None if there are none: each layer's event once its copy is queued,
        # and how many seconds it took to copy all.
        self._queued: list[Future[Any]] = []
        self._copying: Future[float] | None = None

    def begin(self, orders: Sequence[LoadOrder], loads: Sequence[PageLoad]) -> None:
        """Start the loads of these orders. Those of the step before must have been finished."""
        assert self._copying is None, "a step began before the loads of the last one had ended"
        self._orders = orders
        self._unasked = set(self._layers)
        self._queued = [Future() for _ in self._layers]
        self._copying = self._thread.submit(self._copy, loads, self._queued)

    def wait(self, layer: str) -> None:
        """Return when what this thread launches next finds the layer's pages loaded. Raises what
        the copy raised."""
        if self._copying is None:  # as in most steps
            return
        self._unasked.discard(layer)
        index = self._layers.get(layer, -1)  # a layer without pages of its own: after all of them
        self._copier.await_layers(self._queued[index].result())

    def finish(self) -> tuple[Sequence[LoadOrder], float]:
        """Return when all layers are in the pages: orders that have ended, each once, and how many
        seconds their copies took. Raises what the copy raised, and RuntimeError if a layer was not
        waited for."""
        if self._copying is None:
            return (), 0.0
        taken_s = self._copying.result()
        if self._unasked:
            names = ", ".join(sorted(self._unasked))
            raise RuntimeError(f"the forward pass did not wait for the loads of {names}")
        orders, self._orders = self._orders, ()
        self._copying = None
        return orders, taken_s

    def close(self) -> None:
        """Return when nothing is copied any more."""
        self._thread.shutdown(wait=True)

    def _copy(self, loads: Sequence[PageLoad], queued: Sequence[Future[Any]]) -> float:
        began, end = time.monotonic(), 0
        try:
            for layers, event in self._copier.scatter_layers(loads):
                for one in queued[end:layers]:
                    one.set_result(event)
                end = layers
            assert end == len(queued), f"{end} of {len(queued)} layers were copied"
        except BaseException as error:
            for one in queued[end:]:
                one.set_exception(error)
            raise
        return time.monotonic() - began
