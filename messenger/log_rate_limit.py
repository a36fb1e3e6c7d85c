"""Rate limit for log lines that any client can cause: a few a second, and the number suppressed."""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

# Enough for an operator to see the fault; a flood of refusals must not fill the disk.
LINES_PER_S = 5


class Ration(logging.Filter):
    """Rate-limits warnings: passes at most `lines_per_s` lines of one kind per second.

    Add it to a module's logger. A kind is the text of the log statement, before its arguments are
    formatted in, and the classes of the errors among these: so clients can't add kinds, and their
    number is bounded by the code. The next line of a kind that passes ends with the number of lines
    suppressed before it. Lines below WARNING are opt-in, and pass.

    Has no lock, because a fork could copy it while held: racing threads may pass one line more, or
    count one less.
    """

    def __init__(
        self, lines_per_s: int = LINES_PER_S, clock: Callable[[], float] = time.monotonic
    ) -> None:
        super().__init__()
        self._lines_per_s = lines_per_s
        self._clock = clock
        self._kinds: dict[tuple[str, ...], _Second] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether the line passes. Appends the number of lines suppressed before it."""
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
    """The lines of one kind in the second that starts at `began_at`, and the number suppressed
    since the last line that passed."""

    __slots__ = ("began_at", "left_out", "lines")

    def __init__(self, began_at: float) -> None:
        self.began_at = began_at
        self.lines = 0
        self.left_out = 0


def _kind(record: logging.LogRecord) -> tuple[str, ...]:
    values = record.args if isinstance(record.args, tuple) else ()
    errors = (type(value).__name__ for value in values if isinstance(value, BaseException))
    return (str(record.msg), *errors)
