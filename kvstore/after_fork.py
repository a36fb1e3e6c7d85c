"""Fork safety: objects inherited from the parent process that a forked child must not use.

A child has copies of its parent's clients and of their leases, slots and streams. But the
connections, the session at the node, the threads and the locks of those threads are the parent's.
So each such object compares process ids first: in a child its use raises ClientClosed, and its
release does nothing, because the parent still has the lease.
"""

from __future__ import annotations

import os
from typing import Any, Self

from .errors import ClientClosed


class OfOneProcess:
    """A base class that records the id of the process that made the object."""

    _pid: int

    def __new__(cls, *_: Any, **__: Any) -> Self:
        made = super().__new__(cls)
        made._pid = os.getpid()
        return made

    @property
    def _inherited(self) -> bool:
        """Whether this object is a copy in a forked child."""
        return os.getpid() != self._pid

    def _check_process(self) -> None:
        """Raise ClientClosed in a forked child."""
        if os.getpid() != self._pid:
            raise ClientClosed(
                "this is of the process that opened the client; a forked child opens its own"
            )
