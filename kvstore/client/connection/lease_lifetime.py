"""Memory under a lease: the lease ends when no view of the memory is left.

The caller that got a lease ends it: `release`, `commit`, `abort`. That may never happen, because an
exception of a signal handler came between the node's reply and its caller, or because the caller
dropped a result. So each lease has an array object of its own for its memory: all views refer to
it, and when the last of them is gone, a finaliser gives the lease back. A lease never ends early:
while a view exists, its memory is leased.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

import numpy as np

from tiffin.messenger.signal_safe import finaliser

from ...node.core import messages

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

    Bytes = NDArray[np.uint8]

_ENDS = (messages.Release, messages.Abort, messages.Commit)


class Lending:
    """The leases of one session that have not ended yet: `lent`, by number."""

    def __init__(self, post: Callable[[messages.Request], None]) -> None:
        """`post` sends the request that gives a lease back; another thread calls it."""
        self._post = post
        self.lent: dict[int, _Lent] = {}
        self._last: Callable[[], None] | None = None

    def lend(self, memory: Bytes, reply: messages.AnyReply) -> Bytes:
        """`memory` for the caller that gets this reply; if the reply grants a lease, an array of
        its own, with whose last view the lease ends."""
        request = undo(reply)
        if request is None:
            return memory
        # Not a view of `memory`: views of that would refer to `memory`, and not to this array.
        lent = np.frombuffer(memory.data, np.uint8)
        end = _Lent(lent, finaliser())
        end.lending, end.request = self, request
        self.lent[request.lease] = end
        return lent

    def ended(self, request: messages.Request) -> None:
        """Note that this request was sent, which may end a lease."""
        if isinstance(request, _ENDS):
            self.lent.pop(request.lease, None)

    def forget(self) -> None:
        """Forget all leases: they have ended with the session."""
        self.lent.clear()
        self._end()

    def outlive(self, last: Callable[[], None]) -> None:
        """Call `last` when every lease has ended. For a link that no caller refers to any more."""
        self._last = last
        _outliving.add(self)
        self._end()

    def give_back(self, lent: _Lent) -> None:
        """Give back a lease whose memory has no view any more, unless it has ended."""
        request = lent.request
        if self.lent.get(request.lease) is lent:
            self._post(request)
            self.lent.pop(request.lease, None)
            self._end()

    def _end(self) -> None:
        last = self._last
        if last is not None and not self.lent:
            self._last = None
            _outliving.discard(self)
            last()


# Keeps them alive: else they would be collected with their links, and their weak references to the
# leased memory with them.
_outliving: set[Lending] = set()


class _Lent(weakref.ref[Any]):
    """A weak reference to leased memory; a finaliser thread calls it when the memory is gone."""

    __slots__ = ("lending", "request")

    lending: Lending
    request: messages.Release | messages.Abort

    def __call__(self) -> None:
        self.lending.give_back(self)


def undo(reply: messages.AnyReply) -> messages.Release | messages.Abort | None:
    """The request that gives back what a reply granted, if it granted anything."""
    if isinstance(reply, messages.Leased) and reply.lease:
        return messages.Release(0, reply.lease)
    if isinstance(reply, messages.Reserved) and reply.lease:
        return messages.Abort(0, reply.lease)
    return None
