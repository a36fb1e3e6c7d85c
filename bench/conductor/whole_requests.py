"""Rows about whole requests: `POST /v1/schedule`, and all events of an answer of 350 tokens.

The load generator (`load.py`) is as a gateway with its defaults: of each answer it tells the first
token, every 32 more, and the end. In turns it tells them in batches (`POST /v1/events`), in
one call each, and both to a plain service, which reads the same calls.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from ..network.setting import cpu_seconds
from ..store.rows import Row, Spread, Target
from .load import ANSWER_TOKENS, events_of_an_answer
from .service import conductor, need_service, plain

if TYPE_CHECKING:
    from .processes.peer import PeerProcess
    from .setting import Setting

# The mean prompt of Mooncake's conversation trace, 12,035 tokens, in blocks of 512.
_BLOCKS = 24


def whole_requests(setting: Setting) -> list[Row]:
    """Requests per second of the service's CPU time, with all that is told of each. Raises
    MissingExtra."""
    need_service()
    sizes = replace(setting.sizes, prompt_blocks=_BLOCKS)
    setting = replace(setting, sizes=sizes)
    rates: dict[str, list[float]] = {}
    with conductor(setting) as (pid, load, _), plain(sizes) as (plain_pid, plain_load):
        setting.tell(
            f"{sizes.turns} times {sizes.answers} answers, and a fourth of them in single calls"
        )
        for turn in range(sizes.turns + 1):
            for name, at, peer, how, requests in (
                ("plain", plain_pid, plain_load, "whole", sizes.answers),
                ("ours", pid, load, "whole", sizes.answers),
                ("plain single", plain_pid, plain_load, "single", sizes.answers // 4),
                ("single", pid, load, "single", sizes.answers // 4),
            ):
                rate = _rate(at, peer, how, requests)
                if turn:
                    rates.setdefault(name, []).append(rate)
    events = len(events_of_an_answer())
    what = (
        f"requests of {_BLOCKS} block keys per second of CPU time, with {events} events of an "
        f"answer of {ANSWER_TOKENS} tokens, {sizes.instances} instances"
    )
    plainly = "the same calls read by a plain FastAPI route in uvicorn"
    return [
        Row(
            name="whole-requests",
            what=f"{what}: events in batches",
            unit="requests/s",
            value=Spread.of(rates["ours"], lower_is_better=False),
            limit_what=plainly,
            limit=Spread.of(rates["plain"], lower_is_better=False),
            targets=(Target("p50", ">=", 1000.0),),
            note="one core at most: decisions and events are the event loop's",
        ),
        Row(
            name="whole-requests-single",
            what=f"{what}: a call for each event",
            unit="requests/s",
            value=Spread.of(rates["single"], lower_is_better=False),
            limit_what=plainly,
            limit=Spread.of(rates["plain single"], lower_is_better=False),
            targets=(),
        ),
    ]


def _rate(pid: int, load: PeerProcess, how: str, requests: int) -> float:
    before_s = cpu_seconds([pid])
    load.ask(f"{how} {requests}")
    return requests / (cpu_seconds([pid]) - before_s)
