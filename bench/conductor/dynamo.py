"""Rows against Dynamo's scheduler, as a Python program embeds it, in turns with ours.

Dynamo's `SelectionService` lives in a Python of its own, given by `--dynamo`; `docs/benchmarks.md`
says how to make one. It keeps the time of its calls itself, and sleeps when nobody asks it.

`select` books nothing, as `deciding.decide`, and `select_and_reserve` does, as
`Conductor.schedule`. As many requests are in flight on either side. Its index is empty, because
only engines can fill it, over ZeroMQ: what it takes to find the holders of 256 blocks would come on
top, and is in ours.
"""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import TYPE_CHECKING

from ..store.rows import MICROSECONDS, Row, Side, Target, interleave, times
from .decision import HOT, PRIVATE, Traffic, scene
from .peer import Peer, peer
from .setting import BLOCK_TOKENS, Missing

if TYPE_CHECKING:
    from collections.abc import Iterator

    from .setting import Setting

_PEER = Path(__file__).with_name("dynamo_peer.py")
# In a row, of either side: a decision that follows another finds its caches warm.
_CALLS = 10
_WARM_CALLS = 100
_NOTE = "Dynamo's index is empty, ours is not"


def dynamo(setting: Setting) -> list[Row]:
    """The same decisions from Dynamo and from us. Raises Missing, NodeUnavailable."""
    with _dynamo(setting) as theirs:
        return [row for kind in (PRIVATE, HOT) for row in _compared(setting, theirs, kind)]


@contextlib.contextmanager
def _dynamo(setting: Setting) -> Iterator[Peer]:
    python, sizes = setting.dynamo, setting.sizes
    if python is None:
        raise Missing("give --dynamo PYTHON, of an environment that has ai-dynamo-runtime")
    if not python.exists():
        raise Missing(f"{python} is not there; docs/benchmarks.md says how to install Dynamo")
    numbers = (sizes.instances, sizes.prompt_blocks, BLOCK_TOKENS)
    command = [str(python), str(_PEER), *map(str, numbers)]
    with peer("Dynamo", command) as theirs:
        yield theirs


def _compared(setting: Setting, theirs: Peer, kind: str) -> list[Row]:
    sizes = setting.sizes
    setting.tell(scene(sizes, kind))
    traffic = Traffic(sizes, kind)
    theirs.ask(f"hold {traffic.in_flight}")
    rows = []
    for name, call, title, targets in (
        ("select", "select", "decision", (Target("ratio", "<=", 1.0),)),
        ("reserve", "select_and_reserve", "decision, reserved and logged", ()),
    ):
        found, limit = _in_turns(theirs, name, traffic, sizes.rounds)
        rows.append(
            Row(
                name=f"dynamo-{name}-{kind}",
                what=f"one {title}: {scene(sizes, kind)}",
                unit="us",
                value=times(found, MICROSECONDS),
                limit_what=f"Dynamo's SelectionService.{call} of as many blocks and workers",
                limit=times(limit, MICROSECONDS),
                targets=targets,
                note=_NOTE,
            )
        )
    return rows


def _in_turns(
    theirs: Peer, word: str, traffic: Traffic, rounds: int
) -> tuple[list[float], list[float]]:
    """Seconds of each call, ours and theirs."""
    theirs.ask(f"{word} {_WARM_CALLS}")
    limit: list[float] = []

    def ask() -> None:
        limit.extend(theirs.ask(f"{word} {_CALLS}"))

    if word == "select":
        ours = Side(traffic.decide, traffic.go_on)
    else:
        ours = Side(traffic.schedule, traffic.next)
    _, *found = interleave([Side(ask), *[ours] * _CALLS], rounds=max(1, rounds // _CALLS))
    counted = len(found[0]) * _CALLS  # without those before, which were not measured here either
    return [second for taken in found for second in taken], limit[-counted:]
