"""The protocol of the peers' processes: a line of JSON for each command, and one for each answer.

    -> ["put", {"calls": 5}]
    <- [0.0012, 0.0011, 0.0011, 0.0012, 0.0011]

A process prints `"ready"` first and ends with its standard input. The seconds are its own: it times
its calls itself, so that the pipe is in no figure. Runs on any Python from 3.9 on, with no library.
"""

from __future__ import annotations

import json
import os
import sys
import time
from typing import TYPE_CHECKING, Any, TextIO

if TYPE_CHECKING:
    from collections.abc import Callable


def take_stdout() -> TextIO:
    """Standard output, for answers alone; whatever libraries print goes to standard error."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    return answers


def serve(answers: TextIO, verbs: dict[str, Callable[..., Any]]) -> None:
    """Answer commands until the input ends. An exception of a verb ends the process, and its
    traceback is what the other side shows."""
    print('"ready"', file=answers, flush=True)
    for line in sys.stdin:
        name, arguments = json.loads(line)
        print(json.dumps(verbs[name](**arguments)), file=answers, flush=True)


def timed(
    calls: int, action: Callable[[], object], before: Callable[[], object] | None = None
) -> list[float]:
    """Seconds of each of `calls` actions; `before` comes before each and is not timed."""
    seconds = []
    for _ in range(calls):
        if before is not None:
            before()
        start_s = time.perf_counter()
        action()
        seconds.append(time.perf_counter() - start_s)
    return seconds
