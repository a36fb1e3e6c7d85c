"""Carries out the conductor's orders to let requests go on at other instances while they decode.

As in Llumnix (OSDI '24), a request goes on decoding while its KV is sent. When that is there, it
leaves after the present step, and what has come since follows: so it pauses for no longer than it
takes to send the KV of some tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from array import array
    from collections.abc import Callable, Mapping

    from tiffin.conductor.pool.instance_orders import HandOverRequest

    from ..instances.mixed_instance import MixedInstance
    from ..instances.sim_request import SimRequest
    from ..nodes.network import Network

    # The request's id, and what went wrong, or "".
    Outcome = Callable[[str, str], None]


@dataclass(frozen=True, slots=True)
class HandOvers:
    """`decoding`: where each request decodes, which changes with it. `ended` is told each outcome,
    but of a request that ends before it has left."""

    network: Network
    token_bytes: int
    instances: Mapping[str, MixedInstance]
    decoding: dict[str, tuple[SimRequest, MixedInstance]]
    ended: Outcome

    def carry(self, order: HandOverRequest) -> None:
        """Carry out one order."""
        name, target = order.request_id, self.instances[order.target]
        job, source = self.decoding.get(name, (None, None))
        if job is None or source is None or name not in source.answered():
            self.ended(name, "it is not decoded here")
            return
        had = source.answered()[name]

        def left(job: SimRequest, given_s: array[float]) -> None:
            def arrived() -> None:
                self.decoding[name] = job, target
                target.join(job, given_s)
                self.ended(name, "")

            since = len(given_s) - had
            self.network.send(source.name, target.name, since * self.token_bytes, arrived)

        tokens = job.trace.prompt_tokens + had
        self.network.send(
            source.name, target.name, tokens * self.token_bytes, lambda: source.leave(name, left)
        )
