"""A node's DRAM for one-sided reads by NIXL: RDMA where there is hardware for it.

The node describes its region to clients that it has authenticated, over their connection, and from
then on their network cards read it without its help. Nothing can stop such a read when a lease
ends: that is why a client asks `confirm` after each, and throws away what it read if the lease was
over by then, and why clients write over TCP only (docs/nixl.md).
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

from ..errors import InvalidInput
from . import messages

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from .node import Node
    from .records import Session

    ReplyTo = Callable[[messages.AnyReply], None]


@contextlib.contextmanager
def offering(node: Node, lanes: str) -> Iterator[None]:
    """Answer `Describe` with the node's region. `lanes`: what UCX may use, such as "rc,cuda".

    Raises InvalidInput where NIXL, or a network for it, is not there.
    """
    from tiffin.messenger.nixl import NixlUnavailable
    from tiffin.messenger.nixl_agent import NixlAgent

    try:
        agent = NixlAgent(f"tiffin-{node.name}", lanes=lanes)
    except NixlUnavailable as error:
        raise InvalidInput(f"--nixl can't work here: {error}") from error
    try:
        region = agent.register(node.dram.region.array)

        def describe(session: Session, request: messages.Describe, reply: ReplyTo) -> None:
            reply(messages.Described(request.id, *region.description()))

        node.handle(messages.Describe, describe)
        yield
    finally:
        # A client that asks from now on reads over TCP.
        node.handle(messages.Describe, not_offered)
        agent.close()


def not_offered(session: Session, request: messages.Describe, reply: ReplyTo) -> None:
    """The answer of a node without NIXL."""
    reply(messages.Described(request.id))


def confirm(session: Session, request: messages.Confirm, reply: ReplyTo) -> None:
    """Whether the session holds this read lease now: what it read before is what it leased. What a
    follower's lease holds is read by its awaits only."""
    lease = session.leases.get(request.lease)
    held = lease is not None and not lease.writes and lease.followed is None
    reply(messages.Done(request.id, int(held)))
