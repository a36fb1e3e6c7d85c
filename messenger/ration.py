"""Log lines that anybody who connects can cause: a few a second, and how many were left out."""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

# A person sees what goes on from so many; a flood of refusals must not fill the disk.
LINES_PER_S = 5


class Ration(logging.Filter):
    """Lets through at most `lines_per_s` warnings of one kind that begin in one second.

    Add it to a module's logger. A kind is the text of the log statement, before its arguments are
    put in, and the classes of the errors among these: so there are as many as the code has, whoever
    causes them. The next line of a kind that is let through says how many were left out before it.
    Lines below WARNING are somebody's wish, and pass.

    Has no lock, because it may be forked with one held: threads that race may let a line more
    through, or count one less.
    """

    def __init__(
        self, lines_per_s: int = LINES_PER_S, clock: Callable[[], float] = time.monotonic
    ) -> None:
        super().__init__()
        self._lines_per_s = lines_per_s
        self._clock = clock
        self._kinds: dict[tuple[str, ...], _Second] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether the line is written. Adds to it how many others were not."""
        if record.levelno < logging.WARNING:
            return True
        second = self._kinds.setdefault(_kind(record), _Second(self._clock()))
        if self._clock() >= second.began_at + 1.0:
            second.began_at = self._clock()
            second.lines = 0
        if second.lines >= self._lines_per_s:
            second.left_out += 1
            return False
        second.lines += 1
        left_out, second.left_out = second.left_out, 0
        if left_out:
            record.msg = f"{record.getMessage()} (and {left_out} more like it before)"
            record.args = ()
        return True


class _Second:
    """The lines of one kind in the second that `began_at`, and those left out since the last."""

    __slots__ = ("began_at", "left_out", "lines")

    def __init__(self, began_at: float) -> None:
        self.began_at = began_at
        self.lines = 0
        self.left_out = 0


def _kind(record: logging.LogRecord) -> tuple[str, ...]:
    values = record.args if isinstance(record.args, tuple) else ()
    errors = (type(value).__name__ for value in values if isinstance(value, BaseException))
    return (str(record.msg), *errors)
