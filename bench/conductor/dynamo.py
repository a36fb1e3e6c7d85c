"""Rows that compare decisions with Dynamo's scheduler, as a Python program embeds it, in turns.

Dynamo's `SelectionService` runs in a Python environment of its own, given by `--dynamo`;
`docs/benchmarks.md` says how to make one. Its process times its calls itself, and sleeps between
them.

`select` reserves nothing, as `pipeline.decide`, and `select_and_reserve` does, as
`Conductor.schedule`. Both sides have as many requests in flight. Dynamo's index is empty, because
only engines can fill it, over ZeroMQ: the time to find the holders of 256 blocks would come on top
of its numbers, and is included in ours.
"""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import TYPE_CHECKING

from ..store.rows import MICROSECONDS, Row, Side, Target, interleave, times
from ..suite import Missing
from .decision import HOT, PRIVATE, Traffic, scene
from .processes.peer import PeerProcess, peer
from .setting import BLOCK_TOKENS

if TYPE_CHECKING:
    from collections.abc import Iterator

    from .setting import Setting

_PEER = Path(__file__).with_name("processes") / "dynamo_peer.py"
# Consecutive calls of either side: a decision right after another finds its caches warm.
_CALLS = 10
_WARM_CALLS = 100
_NOTE = "Dynamo's index is empty, ours is not"


def dynamo(setting: Setting) -> list[Row]:
    """The same decisions from Dynamo and from us. Raises Missing, NodeUnavailable."""
    with selection_service(setting) as theirs:
        return [row for kind in (PRIVATE, HOT) for row in _compared(setting, theirs, kind)]


@contextlib.contextmanager
def selection_service(setting: Setting) -> Iterator[PeerProcess]:
    """Dynamo's SelectionService in a process, with the workers of the setting. Raises Missing."""
    python, sizes = setting.dynamo, setting.sizes
    if python is None:
        raise Missing("give --dynamo PYTHON, of an environment that has ai-dynamo-runtime")
    if not python.exists():
        raise Missing(f"{python} is not there; docs/benchmarks.md says how to install Dynamo")
    numbers = (sizes.instances, sizes.prompt_blocks, BLOCK_TOKENS)
    command = [str(python), str(_PEER), *map(str, numbers)]
    with peer("Dynamo", command) as theirs:
        yield theirs


def _compared(setting: Setting, theirs: PeerProcess, kind: str) -> list[Row]:
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
    theirs: PeerProcess, word: str, traffic: Traffic, rounds: int
) -> tuple[list[float], list[float]]:
    """Seconds of each call, ours and Dynamo's."""
    theirs.ask(f"{word} {_WARM_CALLS}")
    limit: list[float] = []

    def ask() -> None:
        limit.extend(theirs.ask(f"{word} {_CALLS}"))

    if word == "select":
        ours = Side(traffic.decide, traffic.go_on)
    else:
        ours = Side(traffic.schedule, traffic.next)
    _, *found = interleave([Side(ask), *[ours] * _CALLS], rounds=max(1, rounds // _CALLS))
    counted = len(found[0]) * _CALLS  # without the warm-up calls, which our side leaves out too
    return [second for taken in found for second in taken], limit[-counted:]
