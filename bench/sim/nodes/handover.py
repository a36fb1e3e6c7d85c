"""The hand-over of a prompt's KV from the instance that prefills to the one that decodes.

Serialized: all of it, after the prefill. Layer by layer: a layer's part as soon as it is computed,
so that only the last one is waited for, and whatever the network is behind with.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from ..clock import VirtualClock
    from .network import Network


@dataclass(frozen=True, slots=True)
class HandOver:
    """From `source` to `target`: `nbytes`, of `layers` equal parts.

    `synchronisation_s`: how much later a layer-wise hand-over is complete than its last byte has
    come. Each layer ends with a message and a wait of its own.
    """

    source: str
    target: str
    nbytes: float
    layers: int
    synchronisation_s: float = 0.0

    def serialized(self, network: Network, done: Callable[[], None]) -> None:
        """Send it all now, when the prefill is done."""
        network.send(self.source, self.target, self.nbytes, done)

    def layerwise(
        self, clock: VirtualClock, network: Network, prefill_s: float, done: Callable[[], None]
    ) -> None:
        """Send each layer when it is computed, by a prefill of `prefill_s` that begins now."""
        left = self.layers

        def arrived() -> None:
            nonlocal left
            left -= 1
            if not left:
                clock.after(self.synchronisation_s, done)

        def send() -> None:
            network.send(self.source, self.target, self.nbytes / self.layers, arrived)

        for layer in range(1, self.layers + 1):
            clock.after(prefill_s * layer / self.layers, send)
