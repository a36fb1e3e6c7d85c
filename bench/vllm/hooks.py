"""What the connector costs an engine that never finds anything in the pool: the time that vLLM's
threads spend in its hooks, and the CPU time of its own threads."""

from __future__ import annotations

import json
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..store.rows import MICROSECONDS, Row, Target, times
from ..vllm import contenders
from .engine.engine import EngineOptions
from .engine_process import engine, model

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from .engine_process import GroupProcess
    from .setting import Setting

# The same names are in engine/timed_connector.py, which only vLLM's Python can import.
_FOLDER_VARIABLE = "TIFFIN_BENCH_HOOKS"
_SHARE = 0.01
_SIDES = ("scheduler", "worker")


@dataclass(frozen=True, slots=True)
class Load:
    """Requests that are served four at a time: prompts of `tokens` tokens that nobody asked for
    before, and an answer of `answer` tokens to each."""

    name: str
    what: str
    requests: int
    tokens: int
    answer: int


_LOADS = (
    Load("short", "prompts too short to be looked up or saved", 16, 200, 64),
    Load("saving", "prompts that are looked up, found nowhere and saved", 8, 1600, 64),
)


@dataclass(frozen=True, slots=True)
class Share:
    """One turn: seconds of the turn's steps, and of these in the hooks of each side, by name;
    `thread_s`: CPU time of the connector's threads."""

    steps: int
    step_s: float
    hook_s: dict[str, dict[str, float]]
    thread_s: float


def hooks(setting: Setting) -> list[Row]:
    """Both sides' hooks and the threads, under each load."""
    shares: dict[str, list[Share]] = {load.name: [] for load in _LOADS}
    with (
        model(setting) as model_folder,
        contenders.node() as ours,
        tempfile.TemporaryDirectory(prefix="tiffin-bench-") as folder,
    ):
        transfer = {
            **ours.transfer,
            "kv_connector": "TimedTiffinConnector",
            "kv_connector_module_path": "tiffin.bench.vllm.engine.timed_connector",
        }
        options = EngineOptions(model_folder, transfer, False, setting.sizes.tokens + 64)
        with engine(setting, options, {_FOLDER_VARIABLE: folder}) as process:
            for turn in range(setting.sizes.hook_turns + 1):
                setting.tell(f"turn {turn} of {setting.sizes.hook_turns}")
                for load in _LOADS:
                    began, ended = _serve(process, load)
                    if turn:  # the first one warms up
                        shares[load.name].append(_share(Path(folder), began, ended))
    return [row for load in _LOADS for row in rows(load, shares[load.name])]


def _serve(process: GroupProcess, load: Load) -> tuple[float, float]:
    began, ended = process.tell(
        "serve", requests=load.requests, tokens=load.tokens, answer=load.answer
    )
    return began, ended


def _share(folder: Path, began: float, ended: float) -> Share:
    steps, step_s, thread_s = 0, 0.0, 0.0
    hook_s: dict[str, dict[str, float]] = {}
    for side in _SIDES:
        (path,) = folder.glob(f"{side}-*.jsonl")
        samples = [json.loads(line) for line in path.read_text().splitlines()]
        first, last = between(samples, began, ended)
        steps, step_s = last["steps"] - first["steps"], last["at_s"] - first["at_s"]
        thread_s += last["thread_s"] - first["thread_s"]
        before = first["hook_s"]
        hook_s[side] = {name: s - before.get(name, 0.0) for name, s in last["hook_s"].items()}
    return Share(steps, step_s, hook_s, thread_s)


def between(
    samples: Iterable[dict[str, Any]], began: float, ended: float
) -> tuple[dict[str, Any], dict[str, Any]]:
    """The first and the last sample of a turn. Raises AssertionError if there are not two."""
    inside = [sample for sample in samples if began <= sample["at_s"] <= ended]
    assert len(inside) >= 2, "the turn was too short to be sampled twice"
    return inside[0], inside[-1]


def rows(load: Load, shares: Sequence[Share]) -> list[Row]:
    """A row for each side's hooks, and one for the threads."""
    found = [_row(load, side, shares) for side in _SIDES]
    threads = [share.thread_s / share.steps for share in shares]
    return [
        *found,
        _beside_steps(
            f"hooks-{load.name}-threads",
            f"CPU time of the connector's threads, per step; {load.what}",
            threads,
            shares,
        ),
    ]


def _row(load: Load, side: str, shares: Sequence[Share]) -> Row:
    seconds = [sum(share.hook_s[side].values()) / share.steps for share in shares]
    return _beside_steps(
        f"hooks-{load.name}-{side}",
        f"time in the connector's hooks on the {side}'s thread, per step; {load.what}",
        seconds,
        shares,
        note=_costliest(side, shares),
    )


def _beside_steps(
    name: str, what: str, seconds: Sequence[float], shares: Sequence[Share], note: str = ""
) -> Row:
    return Row(
        name=name,
        what=what,
        unit="us",
        value=times(seconds, MICROSECONDS),
        limit_what="the step",
        limit=times([share.step_s / share.steps for share in shares], MICROSECONDS),
        targets=(Target("ratio", "<=", _SHARE),),
        note=note,
    )


def _costliest(side: str, shares: Sequence[Share], count: int = 3) -> str:
    """The hooks that take the most, by their mean per step."""
    steps = sum(share.steps for share in shares)
    total: dict[str, float] = {}
    for share in shares:
        for name, seconds in share.hook_s[side].items():
            total[name] = total.get(name, 0.0) + seconds
    costly = sorted(total.items(), key=lambda item: -item[1])[:count]
    return ", ".join(f"{name} {s / steps * MICROSECONDS:.1f} us" for name, s in costly)
