"""The errors of the messenger. Like the messenger, they have no notion of blocks."""

from __future__ import annotations

from .transport import NOTHING, Served


class MessengerError(Exception):
    """Base class of all errors that the messenger raises on purpose."""


class RegionError(MessengerError):
    """A region that could not be made or mapped, or that was used after `close()`."""


class RangeError(MessengerError, ValueError):
    """The caller's mistake: a range outside its region, or two lengths that must be equal."""


class FrameError(MessengerError):
    """The peer violated the protocol; the start of the next frame on the stream is unknown."""


class SealError(FrameError):
    """The tag of a frame or of raw bytes is wrong: not sent by the peer, or not at this position,
    or changed on the way."""


class GrantError(MessengerError):
    """The peer refused: no such grant, it has ended, or it is read-only. Request another grant."""


class TransferError(MessengerError):
    """A transfer that ended early. `served` counts the whole ranges that it had moved by then."""

    def __init__(self, message: str, served: Served = NOTHING) -> None:
        super().__init__(message)
        self.served = served


class PeerLost(TransferError):
    """The connection was refused, reset, closed or cut: try another path, or retry later."""


class Abandoned(TransferError):
    """The call was cancelled while it waited for a stream: no sign of an unhealthy peer."""


class TransferTimeout(TransferError):
    """The deadline passed. The peer may be slow, far away or busy; or the deadline too short."""


class Stalled(TransferTimeout):
    """No byte was sent or received for the stall timeout: the peer hangs or is cut off."""


def late(what: str, *, stalled: bool) -> TransferTimeout:
    """The error to raise after a timeout; `stalled`: the stall timeout (no byte), not the
    deadline of the whole transfer."""
    if stalled:
        return Stalled(f"no byte was {what} for the stall time: the peer hangs, or is cut off")
    return TransferTimeout(f"not all bytes were {what} by the deadline: allow more time, or less")
