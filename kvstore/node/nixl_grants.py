"""A node's DRAM for one-sided reads by NIXL: RDMA where there is hardware for it.

The node describes its region to authenticated clients over their connection; from then on their
network cards read the region without involving the node. The node cannot stop such a read when a
lease ends: therefore a client sends `confirm` after each read and discards the bytes if the lease
had ended by then, and clients write over TCP only (docs/nixl.md).
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

from ..errors import InvalidInput
from .core import messages

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tiffin.messenger.shm.host_copy import ByteArray

    from .core.records import Session

    ReplyTo = Callable[[messages.AnyReply], None]


@contextlib.contextmanager
def offering(
    name: str,
    memory: ByteArray,
    handle: Callable[[type, Callable[[Session, Any, ReplyTo], None]], None],
    lanes: str,
) -> Iterator[None]:
    """Have the node of this name answer `Describe` with its `memory`; `handle` is `Node.handle`.
    `lanes`: the transports that UCX may use, such as
    "rc,ud".

    Raises InvalidInput where NIXL, or a network for it, is not available.
    """
    from tiffin.messenger.nixl.agent import NixlAgent
    from tiffin.messenger.nixl.bindings import NixlUnavailable

    try:
        agent = NixlAgent(f"tiffin-{name}", lanes=lanes)
    except NixlUnavailable as error:
        raise InvalidInput(f"--nixl can't work here: {error}") from error
    try:
        region = agent.register(memory)

        def describe(session: Session, request: messages.Describe, reply: ReplyTo) -> None:
            reply(messages.Described(request.id, *region.description()))

        handle(messages.Describe, describe)
        yield
    finally:
        # A client that sends `Describe` from now on reads over TCP.
        handle(messages.Describe, not_offered)
        agent.close()


def not_offered(session: Session, request: messages.Describe, reply: ReplyTo) -> None:
    """The reply to `Describe` from a node that does not offer NIXL."""
    reply(messages.Described(request.id))


def confirm(session: Session, request: messages.Confirm, reply: ReplyTo) -> None:
    """Reply whether the session still holds this read lease, so that the bytes read before are
    those of the leased blocks. Always 0 for a lease that follows writers: its blocks can be read
    only as far as an `Await` exposed them."""
    lease = session.leases.get(request.lease)
    held = lease is not None and not lease.writes and lease.followed is None
    reply(messages.Done(request.id, int(held)))
