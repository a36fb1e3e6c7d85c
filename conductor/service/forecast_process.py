"""Runs forecasts, which take seconds, in a separate process: in a thread they would compete with
the scheduler for the interpreter (the GIL).

    python -m tiffin.conductor.service.forecast_process      questions on stdin, forecasts on
    stdout, as JSON

The process ends after its answer, which frees the memory of all that it imported.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
from typing import TYPE_CHECKING

import msgspec

from ..pool.demand_forecast import DemandForecast, DemandQuestion

if TYPE_CHECKING:
    from collections.abc import Sequence

# Timeout for all questions of a call. A plan holds for minutes; after a timeout the constant
# predictor stands in.
FORECAST_S = 60.0
# A tenth of the scheduler's share of a busy core. The lowest priority has a seventieth: an import
# of seconds took longer there than the timeout.
_NICE = 10
_LAST_WORDS = 200

_questions = msgspec.json.Decoder(list[DemandQuestion])
_forecasts = msgspec.json.Decoder(list[DemandForecast])


async def forecast_apart(
    questions: Sequence[DemandQuestion], timeout_s: float = FORECAST_S
) -> list[DemandForecast]:
    """A forecast for each question. Never raises for failures and timeouts of the process: then
    each forecast carries the error, and comes from the constant predictor."""
    try:
        async with asyncio.timeout(timeout_s):
            return await _ask(questions)
    except TimeoutError:
        error = f"no forecast within {timeout_s:g} s"
    except (OSError, msgspec.DecodeError, ChildProcessError) as failure:
        error = f"the process that forecasts failed: {failure}"
    return [question.stand_in(error) for question in questions]


async def _ask(questions: Sequence[DemandQuestion]) -> list[DemandForecast]:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", __name__),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        said, complaint = await process.communicate(msgspec.json.encode(questions))
    finally:
        if process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()
    if process.returncode:
        raise ChildProcessError(complaint.decode(errors="replace").strip()[-_LAST_WORDS:])
    found = _forecasts.decode(said)
    if len(found) != len(questions):
        raise ChildProcessError(f"{len(found)} answers to {len(questions)} questions")
    return found


def main() -> None:
    """Read questions from stdin, and write their forecasts to stdout."""
    os.nice(_NICE)
    questions = _questions.decode(sys.stdin.buffer.read())
    sys.stdout.buffer.write(msgspec.json.encode([question.answer() for question in questions]))


if __name__ == "__main__":
    main()
