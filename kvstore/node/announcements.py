"""The key spaces that a node's clients have announced, each while its client is connected."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import msgspec

from ..errors import InvalidInput
from ..format.key_space import KeySpace
from .core import messages

if TYPE_CHECKING:
    from typing import Any

    from .core.records import Session

# Of all spaces together: they go into one message.
SPACES_BYTES_MAX = 4 << 20


class Announcements:
    """Not thread-safe: the node's lock protects it.

    `seq` changes with every change. It begins with the time, so that the numbers of a node's lives
    differ.
    """

    def __init__(self) -> None:
        self.seq = time.time_ns()
        self._spaces: dict[int, tuple[bytes, KeySpace]] = {}  # by session, encoded and decoded

    def announce(self, session: Session, request: messages.Announce, reply: Any) -> None:
        """Take a client's space instead of what it said before; an empty one takes it back. Raises
        InvalidInput for what is none, and for more than SPACES_MAX or SPACES_BYTES_MAX."""
        known = self._spaces.get(session.id)
        if known is None or request.space != known[0]:
            if request.space:
                space = KeySpace.decoded(request.space)
                others = [d for s, (d, _) in self._spaces.items() if s != session.id]
                nbytes = len(request.space) + sum(map(len, others))
                if len(others) >= messages.SPACES_MAX or nbytes > SPACES_BYTES_MAX:
                    raise InvalidInput("as many key spaces are announced here as there may be")
                self._spaces[session.id] = request.space, space
                self.seq += 1
            else:
                self.forget(session)
        reply(messages.Done(request.id))

    def forget(self, session: Session) -> None:
        """A session has ended."""
        if self._spaces.pop(session.id, None) is not None:
            self.seq += 1

    def page(self, session: Session, request: messages.Spaces, reply: Any) -> None:
        """Answer with all spaces, one per client; with none to whom has those of this `seq`."""
        known = request.seq == self.seq
        spaces = [] if known else sorted(data for data, _ in self._spaces.values())
        reply(messages.SpacesPage(request.id, self.seq, spaces))

    def numbers(self) -> list[dict[str, Any]]:
        """For people: what was announced, without the schema's text."""
        return [_shown(space) for _, space in self._spaces.values()]


def _shown(space: KeySpace) -> dict[str, Any]:
    shown = msgspec.structs.asdict(space)
    del shown["schema"]
    return {**shown, "models": list(space.models), "adapters": sorted(space.adapters)}
