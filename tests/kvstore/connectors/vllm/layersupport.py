"""A worker whose steps save by layer."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pagesupport import BLOCK_PAGES
from test_worker_side import PAGES, Worker

from tiffin.kvstore.connectors.vllm.orders import SaveOrder, StepOrders

if TYPE_CHECKING:
    from tiffin.kvstore import Prefix, StreamedLayer


class LayeredWorker(Worker):
    """A worker whose steps save by layer; each save is number 1 unless the test says another."""

    def begin_step(self, prefix: Prefix, number: int = 1, **orders: Any) -> None:
        order = SaveOrder(number, "r", prefix, PAGES[: BLOCK_PAGES * len(prefix)])
        self.side.begin_layer_saves(StepOrders(layer_saves=[order], **orders))

    def compute(self, *layers: int) -> None:
        for layer in layers:
            self.side.computed(layer)

    def end_step(self) -> None:
        self.side.end_layers()
        self.side.begin(StepOrders())

    def confirm(self, *numbers: int) -> None:
        self.side.begin_layer_saves(StepOrders(confirmed=list(numbers)))

    def give_up(self, *numbers: int) -> None:
        self.side.begin_layer_saves(StepOrders(given_up=list(numbers)))

    def settle(self) -> None:
        """Wait until the publishing thread has done what it was told."""
        self.side._layer_saves._publisher.submit(int).result(30)

    def is_right(self, layer: StreamedLayer) -> bool:
        """Whether a layer of every block has the bytes of its pages."""
        for index, block in enumerate(layer.blocks):
            pages = PAGES[index * BLOCK_PAGES : (index + 1) * BLOCK_PAGES]
            expected = b"".join(self.pages.page(layer.index, page) for page in pages)
            if block.k.tobytes() + block.v.tobytes() != expected:
                return False
        return True
