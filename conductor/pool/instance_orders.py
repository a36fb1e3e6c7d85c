"""Orders to instances: about what is in their HBM alone, and about requests that they decode. Pure.

`role_flip.py`, `core/decode_moves.py` and `core/rebinder.py` create the orders;
`service/action_runner.py` sends them.
An instance that carries out orders has two labels: `orders_url`, where it takes them, and `orders`,
which it can carry out, separated by spaces. Who lacks them is not asked.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from ..state.allowed_hosts import ORDERS_LABEL

if TYPE_CHECKING:
    from ..records import InstanceSpec

    OrderKind = Literal["save", "hand_over", "rebind"]

# The label that lists the orders that an instance can carry out.
ORDER_KINDS_LABEL = "orders"


@dataclass(frozen=True, slots=True)
class SaveBlocks:
    """Write every block that is in the instance's HBM alone to the pool, before it is lost."""

    instance: str


@dataclass(frozen=True, slots=True)
class HandOverRequest:
    """Let a request that the instance decodes go on at the instance `target`, with its KV."""

    instance: str
    request_id: str
    target: str


@dataclass(frozen=True, slots=True)
class RebindRequest:
    """Let the member `target` of a spread request's run everything but attention from now on, in
    place of the instance. No KV moves."""

    instance: str
    request_id: str
    target: str


def carries_out(spec: InstanceSpec, kind: OrderKind) -> bool:
    """Whether an instance carries out orders of this kind."""
    kinds = spec.labels.get(ORDER_KINDS_LABEL, "").split()
    return kind in kinds and bool(spec.labels.get(ORDERS_LABEL))
