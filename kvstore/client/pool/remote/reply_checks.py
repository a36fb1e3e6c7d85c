"""Validates replies of remote nodes: whether a reply can be one to its request. Pure.

A healthy node's replies never fail here. A node of another make, or a compromised one, could claim
that it granted more blocks than the client asked for. The decoder checks single numbers.
"""

from __future__ import annotations

from ....node.core import messages
from ....node.core.node_core import KEY_BYTES, ReserveStatus


def check_reply(request: messages.Request, reply: messages.AnyReply) -> bool:
    """Whether `reply` is of the kind and the shape that `request` asks for."""
    if isinstance(reply, messages.Refused):
        return True
    if isinstance(request, messages.Lease):
        return isinstance(reply, messages.Leased) and _is_lease(len(request.keys), reply)
    if isinstance(request, messages.Reserve):
        return isinstance(reply, messages.Reserved) and _is_reservation(len(request.keys), reply)
    if isinstance(request, messages.Match | messages.Exists):
        keys = len(request.keys) // KEY_BYTES
        if not isinstance(reply, messages.Flags):
            return False
        whole = isinstance(request, messages.Exists)
        return len(reply.flags) == keys if whole else len(reply.flags) <= keys
    if not isinstance(reply, _KINDS.get(type(request), messages.Done)):
        return False
    return not isinstance(reply, messages.Done) or 0 <= reply.count <= _count_max(request)


def _count_max(request: messages.Request) -> int:
    """The largest plausible count in the reply: of a request about some blocks, their number."""
    if isinstance(request, messages.Pin | messages.Remove | messages.Pull):
        return len(request.keys) // KEY_BYTES
    return messages.NATURAL_MAX


def _is_lease(keys_bytes: int, reply: messages.Leased) -> bool:
    count = len(reply.offsets)
    return (
        count * KEY_BYTES <= keys_bytes
        and count == len(reply.generations) == len(reply.lengths)
        and bool(count) == bool(reply.lease)
    )


def _is_reservation(keys_bytes: int, reply: messages.Reserved) -> bool:
    granted = reply.statuses.count(ReserveStatus.GRANTED)
    return (
        len(reply.statuses) * KEY_BYTES <= keys_bytes
        and granted == len(reply.offsets) == len(reply.generations)
        and bool(granted) == bool(reply.lease)
    )


_KINDS: dict[type, type] = {
    messages.Commit: messages.Flags,
    messages.Await: messages.Awaited,
    messages.Statistics: messages.Numbers,
    messages.Inventory: messages.KeyPage,
    messages.Events: messages.EventPage,
    messages.Describe: messages.Described,
    messages.Spaces: messages.SpacesPage,
}
