"""The gaps between the tokens of an answer while other requests load from the pool."""

from __future__ import annotations

from statistics import median
from typing import TYPE_CHECKING, Any

from ..store.rows import Row, Spread, Target
from ..vllm import contenders
from .engine.engine import EngineOptions
from .engine_process import engine, model

if TYPE_CHECKING:
    from .engine_process import GroupProcess
    from .setting import Setting, Sizes

# Eight prompts of 32 MiB do not fit in the engine's own cache.
_PROMPTS = 8
_PAGES = 160
_BESIDE = 1
# A turn in which a prompt was computed is measured again, so many times in a row at most: a lookup
# that is not answered in time is a miss, and computing takes as long as a hundred gaps.
_ATTEMPTS = 3
_QUIET, _OWN, _POOL = "nothing", "own", "pool"


def decode_gaps(setting: Setting) -> list[Row]:
    """One answer's gaps, in turns: quiet, beside requests whose prompt is in the engine's own
    cache, and beside requests that load theirs from the pool."""
    sizes = setting.sizes
    turns: dict[str, list[dict[str, Any]]] = {_QUIET: [], _OWN: [], _POOL: []}
    with model(setting) as folder, contenders.node() as ours:
        options = EngineOptions(folder, ours.transfer, False, sizes.tokens + 64, _PAGES)
        with engine(setting, options) as process:
            process.tell(
                "decode_gaps",
                gaps=sizes.gaps,
                tokens=sizes.tokens,
                prompts=_PROMPTS,
                beside=_BESIDE,
            )
            for turn in range(sizes.gap_turns):
                setting.tell(f"turn {turn + 1} of {sizes.gap_turns}")
                for beside, found in turns.items():
                    found.append(_turn(process, beside))
    return rows(sizes, turns)


def _turn(process: GroupProcess, beside: str) -> dict[str, Any]:
    """What was found in a turn in which no prompt had to be computed, or in the last attempt.
    `repeated`: how many turns were measured again."""
    found: dict[str, Any] = {}
    for repeated in range(_ATTEMPTS):
        found = {**process.tell("gaps", beside=beside), "repeated": repeated}
        if not found["computed"]:
            break
    return found


def rows(sizes: Sizes, turns: dict[str, list[dict[str, Any]]]) -> list[Row]:
    """The rows, of the turns beside nothing, the engine's own cache, and the pool. Raises
    AssertionError if requests had found in the engine's own cache what they had to load."""
    for turn in turns[_POOL]:
        least = (turn["requests"] - turn["computed"]) * (sizes.tokens // 512 * 512)
        assert turn["loaded"] >= least, f"only {turn['loaded']} of {least} tokens were loaded"
    mib = sizes.tokens // 512 * 4
    return [
        _row(
            "decode-gaps",
            f"p99 of {sizes.gaps} gaps between the tokens of an answer, while requests load {mib} "
            "MiB each from the node on this host, one after the other",
            turns[_POOL],
            turns[_QUIET],
            (Target("ratio", "<=", 1.5),),
        ),
        _row(
            "decode-gaps-own-cache",
            "the same while the prompts of these requests are in vLLM's own prefix cache",
            turns[_OWN],
            turns[_QUIET],
            (),
        ),
    ]


def _row(
    name: str,
    what: str,
    found: list[dict[str, Any]],
    quiet: list[dict[str, Any]],
    targets: tuple[Target, ...],
) -> Row:
    return Row(
        name=name,
        what=what,
        unit="ms",
        value=_p99s(found),
        limit_what="p99 of as many gaps of the same engine with nothing beside them, in turns",
        limit=_p99s(quiet),
        targets=targets,
        note=f"{_note(found)}; median gaps {_median(found):.1f} and {_median(quiet):.1f} ms",
    )


def _note(turns: list[dict[str, Any]]) -> str:
    requests = sum(turn["requests"] for turn in turns)
    computed = sum(turn["computed"] for turn in turns)
    loaded = sum(turn["loaded"] for turn in turns)
    repeated = sum(turn["repeated"] for turn in turns)
    note = f"{len(turns)} turns; {requests} requests beside them; {loaded} tokens loaded"
    if repeated:
        note += f"; {repeated} turns measured again, as a prompt was computed"
    return f"{note}; {computed} prompts computed all the same" if computed else note


def _median(turns: list[dict[str, Any]]) -> float:
    return float(median(gap for turn in turns for gap in turn["gaps"]))


def _p99s(turns: list[dict[str, Any]]) -> Spread:
    slow = [sorted(turn["gaps"])[len(turn["gaps"]) * 99 // 100] for turn in turns]
    return Spread.of(slow, lower_is_better=True)
