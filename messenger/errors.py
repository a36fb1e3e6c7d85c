"""What the messenger raises on purpose. It knows no blocks, so neither do its errors."""

from __future__ import annotations

from .transport import NOTHING, Served


class MessengerError(Exception):
    """Root of everything the messenger raises on purpose."""


class RegionError(MessengerError):
    """A region that could not be made or mapped, or that was used after `close()`."""


class RangeError(MessengerError, ValueError):
    """The caller's mistake: a range outside its region, or two lengths that must be equal."""


class FrameError(MessengerError):
    """The peer sent what is not this protocol; the stream has no next frame to find."""


class GrantError(MessengerError):
    """The peer refused: no such grant, it has ended, or it is not for writing. Ask for another."""


class TransferError(MessengerError):
    """A transfer that ended early. `served` is what it had moved by then, in whole ranges."""

    def __init__(self, message: str, served: Served = NOTHING) -> None:
        super().__init__(message)
        self.served = served


class PeerLost(TransferError):
    """The connection was refused, reset, closed or cut: try another path, or the peer later."""


class Abandoned(TransferError):
    """The caller was told to wait no more for a stream: it says nothing of the peer."""


class TransferTimeout(TransferError):
    """The deadline passed. The peer may be slow, far away or busy; or the deadline too short."""


class Stalled(TransferTimeout):
    """No byte came or went for the stall time: the peer hangs, or the network between is gone."""
