"""Ends a command in order when it is told to stop, so that the processes it started end, too."""

from __future__ import annotations

import signal
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from types import FrameType


def stop_in_order() -> None:
    """From now on SIGTERM has the same effect as Ctrl-C, and so has SIGINT of a background job."""
    for number in (signal.SIGINT, signal.SIGTERM):  # shells ignore the first for background jobs
        signal.signal(number, _interrupt)


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt
