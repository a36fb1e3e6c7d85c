"""Ends a command in order when it is told to stop, so that the processes it started end, too."""

from __future__ import annotations

import signal
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import FrameType


@contextmanager
def interruptible(*, handled: bool = False) -> Iterator[None]:
    """SIGTERM, and a SIGINT that the shell has made ignored, are a Ctrl-C; the first one begins an
    orderly stop, which only another Ctrl-C cuts short. One whose exception somebody's code has
    swallowed is raised at the end, unless the caller has `handled` it."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    interrupted = False

    def interrupt(number: int, frame: FrameType | None) -> None:
        nonlocal interrupted
        interrupted = True
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        raise KeyboardInterrupt

    for number in before:
        signal.signal(number, interrupt)
    try:
        yield
        if interrupted and not handled:
            raise KeyboardInterrupt
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
