"""Whether who asked still waits for the answer.

A client that gives a call up says so elsewhere, or asks again. A busy server that did the work of
such calls nevertheless would fall behind further with each, and a decision that is made after its
cancellation would keep its room until it expires.
"""

from __future__ import annotations

import select
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import MutableMapping
    from typing import Any

# The ASGI extension by which an app asks whether the client has hung up: a function without
# arguments.
GONE = "tiffin.gone"
# The status of an answer that nobody reads, as it is in the logs of nginx.
HUNG_UP = 499


def has_hung_up(scope: MutableMapping[str, Any]) -> bool:
    """Whether the client of a request has hung up; False for servers that do not tell."""
    gone = scope.get("extensions", {}).get(GONE)
    return gone is not None and gone()


def ended_there(fileno: int) -> bool:
    """Whether the other end of a connection has closed it, also if what it sent before was not read
    yet. 2 us."""
    if fileno < 0:
        return True
    poll = select.poll()
    poll.register(fileno, select.POLLRDHUP)
    return bool(poll.poll(0))
