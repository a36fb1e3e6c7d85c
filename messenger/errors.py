"""What the messenger raises on purpose. It knows no blocks, so neither do its errors."""


class MessengerError(Exception):
    """Root of everything the messenger raises on purpose."""


class RegionError(MessengerError):
    """A region that could not be made or mapped, or that was used after `close()`."""


class RangeError(MessengerError, ValueError):
    """The caller's mistake: a range outside its region, or two lengths that must be equal."""


class FrameError(MessengerError):
    """The peer sent a frame above the limit; the stream has no next frame to find."""
