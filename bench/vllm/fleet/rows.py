"""What a fleet of real vLLMs finds of what its users have said before, and what that is worth."""

from __future__ import annotations

import contextlib
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from tiffin.kvstore import Client
from tiffin.kvstore.sizes import parse_bytes

from ...serving.servers import PAGE_TOKENS, SCHEMA
from ...store.rows import MILLISECONDS, Row, Spread, Target, times
from .service import ENGINES, fleet
from .users import Prompt, arriving, conversations, ideal_tokens, last_of_each, one_by_one, send

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from ..setting import Setting
    from .service import Fleet, Way
    from .users import Served

_SEED = 1
_HOT_BLOCKS = 12
_IN_TIME_S = 1.0
_WAYS: tuple[Way, ...] = ("key spaces", "events alone", "round robin", "no pool")


def found(setting: Setting) -> list[Row]:
    """What is found beside an ideal cache, what was predicted, and after a restart."""
    sizes = setting.sizes
    prompts = conversations(sizes.users, sizes.turns, _SEED)
    rows = []
    with _started(setting, "key spaces", sizes.tight_dram) as it:
        setting.tell(f"{len(prompts)} prompts of {sizes.users} users, one at a time")
        served = one_by_one(it.gateway, prompts, "talk")
        rows.append(_found_row("fleet-found-tight", prompts, served, _blocks(sizes.tight_dram)))
    with _started(setting, "key spaces") as it:
        setting.tell(f"{len(prompts)} prompts of {sizes.users} users, one at a time")
        served = one_by_one(it.gateway, prompts, "talk")
        rows.append(_found_row("fleet-found", prompts, served, _blocks(sizes.dram)))
        rows += _predicted_rows(it, served)
        last = last_of_each(prompts)
        it.quiet()
        before = one_by_one(it.gateway, last, "before")
        it.quiet()
        setting.tell("all engines are killed and start again")
        it.restart()
        it.conductor.patch({"admission": {"mode": "predictive"}})
        # Half of what it takes to compute all: only what the pool has can be in time.
        line, *_ = _best_fit(served)

        def objective_s(one: Prompt) -> float:
            return line(len(one.tokens), 0) / 2

        after = one_by_one(it.gateway, last, "after", objective_s)
        rows.append(_restart_row(before, after))
        refused, in_time = sum(one.refused for one in after), 0
        for prompt in prompts:
            if send(it.gateway, prompt, "all", ttft_s=objective_s(prompt)).refused:
                again = send(it.gateway, prompt, "again")  # nothing of it was computed
                refused, in_time = refused + 1, in_time + (again.ttft_s <= objective_s(prompt))
        rows.append(_refused_row(len(after) + len(prompts), refused, in_time))
        for one, then in zip(after, before, strict=True):
            assert one.refused or one.answer == then.answer, "other tokens"
        return rows


def hot(setting: Setting) -> list[Row]:
    """A prompt that is asked ten times at one node is soon at the other one, too."""
    copied = []
    # Each prompt is a run of its own: what was hot before is forgotten, and copies of all prompts
    # are more than the tenth of a small node that they may take by default.
    changes = {"replication": {"node_share": 0.6}, "popularity": {"half_life_s": 2.0}}
    with _started(setting, "key spaces", more=changes) as it:
        for number in range(setting.sizes.hot):
            setting.tell(f"hot prompt {number + 1} of {setting.sizes.hot}")
            (prompt,) = conversations(1, 1, 100 + number)
            long = Prompt(0, 0, (prompt.tokens * 40)[: _HOT_BLOCKS * SCHEMA.block_tokens + 1])
            before = _held(it)
            for ask in range(10):
                send(it.gateway, long, f"hot-{number}-{ask}")
            time.sleep(2.0)
            more = [now - then for now, then in zip(_held(it), before, strict=True)]
            copied.append(min(more) / _HOT_BLOCKS)
            time.sleep(8.0)
    value = Spread.of([float(np.mean(copied))], lower_is_better=False)
    each = ", ".join(f"{share:.0%}" for share in copied)
    return [
        Row(
            "fleet-hot",
            f"share of {_HOT_BLOCKS} blocks that the second node has, 2 s after they were asked "
            "for ten times at the first",
            "of blocks",
            value,
            "all of them",
            Spread.of([1.0], lower_is_better=False),
            (Target("p50", ">=", 0.9),),
            note=f"by prompt: {each}",
        )
    ]


def ways(setting: Setting) -> list[Row]:
    """Times to first token of the same users, with what the conductor knows and without."""
    sizes = setting.sizes
    waited: dict[tuple[Way, float], list[float]] = {}
    for way in _WAYS:
        with _started(setting, way) as it:
            for seed, rate_s in enumerate(sizes.rates_s):  # users of their own
                prompts = conversations(sizes.users // 2, sizes.turns, seed)
                setting.tell(f"{way}: {len(prompts)} prompts, {rate_s:g} per second")
                served = arriving(it.gateway, prompts, f"load-{seed}", rate_s, seed)
                waited[way, rate_s] = [one.ttft_s for one in served]
    return [
        Row(
            f"fleet-{way.replace(' ', '-')}-{rate_s:g}",
            f"time to first token with {way}, {rate_s:g} requests per second",
            "ms",
            times(waited[way, rate_s], MILLISECONDS),
            "with what the engines announce",
            times(waited["key spaces", rate_s], MILLISECONDS),
            note=_percentiles(waited[way, rate_s]),
        )
        for rate_s in sizes.rates_s
        for way in _WAYS
    ]


@contextlib.contextmanager
def _started(
    setting: Setting, way: Way, dram: str = "", more: dict[str, Any] | None = None
) -> Iterator[Fleet]:
    setting.tell(f"{way}: {ENGINES} nodes, {ENGINES} vLLMs, a conductor and a gateway")
    with (
        tempfile.TemporaryDirectory(prefix="tiffin-bench-") as folder,
        fleet(setting, Path(folder), way, dram or setting.sizes.dram, more or {}) as it,
    ):
        yield it


def _blocks(dram: str) -> int:
    """How many blocks the DRAM of all nodes holds."""
    return ENGINES * (parse_bytes(dram) // SCHEMA.extent_bytes)


def _found_row(
    name: str, prompts: Sequence[Prompt], served: Sequence[Served], capacity: int
) -> Row:
    ideal = ideal_tokens(prompts, capacity)
    value = sum(one.found_in_blocks for one in served)
    total = sum(len(one.tokens) for one in prompts)
    return Row(
        name,
        f"prompt tokens found, in whole blocks, of {total:,} in {len(prompts)} prompts",
        "tokens",
        Spread.of([float(value)], lower_is_better=False),
        f"one ideal LRU cache of the {capacity} blocks that the nodes hold, each once",
        Spread.of([float(ideal)], lower_is_better=False),
        (Target("ratio", ">=", 0.97),),
    )


def _predicted_rows(it: Fleet, served: Sequence[Served]) -> list[Row]:
    near = [abs(one.expected_tokens - one.found_tokens) <= PAGE_TOKENS for one in served]
    expected = sum(one.expected_tokens for one in served)
    really = sum(one.found_tokens for one in served)
    entries = {one.request_id: one for one in it.conductor.decisions(1000, candidates=0)}
    late = served[len(served) // 2 :]  # once it is calibrated
    pairs = [(one, entries[one.request_id].predicted_ttft_s) for one in late]
    errors = [abs(p / one.ttft_s - 1) for one, p in pairs if p is not None]
    return [
        Row(
            "fleet-predicted",
            "prompts of which the engine found what the decision counted on, within one page of "
            f"{PAGE_TOKENS} tokens",
            "of prompts",
            Spread.of([float(np.mean(near))], lower_is_better=False),
            "all of them",
            Spread.of([1.0], lower_is_better=False),
            (Target("p50", ">=", 0.98),),
            note=f"{expected:,} tokens were counted on, {really:,} found: "
            f"{100 * (expected / really - 1):+.1f}%",
        ),
        Row(
            "fleet-predicted-ttft",
            "error of the predicted time to first token, p90, of the later half",
            "of the time",
            Spread.of([float(np.percentile(errors, 90))], lower_is_better=True),
            "the best line through computed and found tokens, afterwards",
            Spread.of([_best_fit(late)[1]], lower_is_better=True),
            (Target("ratio", "<=", 1.3),),
        ),
    ]


def _best_fit(served: Sequence[Served]) -> tuple[Callable[[int, int], float], float]:
    """The best line through computed and found tokens, by least squares of relative errors: seconds
    to the first token by both, and the p90 of the error."""
    seconds = np.array([one.ttft_s for one in served])
    rows = [(1, len(one.prompt.tokens) - one.found_tokens, one.found_tokens) for one in served]
    terms = np.array(rows, float) / seconds[:, None]
    best, *_ = np.linalg.lstsq(terms, np.ones(len(seconds)), rcond=None)
    error = float(np.percentile(np.abs(terms @ best - 1), 90))
    return lambda computed, found: float(np.dot(best, (1, computed, found))), error


def _restart_row(before: Sequence[Served], after: Sequence[Served]) -> Row:
    return Row(
        "fleet-restart",
        f"tokens found of {len(after)} users' last prompts after kill -9 of all engines",
        "tokens",
        Spread.of([float(sum(one.found_in_blocks for one in after))], lower_is_better=False),
        "before it",
        Spread.of([float(sum(one.found_in_blocks for one in before))], lower_is_better=False),
        (Target("ratio", ">=", 0.95),),
    )


def _refused_row(asked: int, refused: int, in_time: int) -> Row:
    return Row(
        "fleet-refused",
        "of all prompts after that, refused for an objective of half the time that computing "
        "takes, and in time when asked again without one",
        "of prompts",
        Spread.of([in_time / asked], lower_is_better=True),
        "all of them",
        Spread.of([1.0], lower_is_better=True),
        (Target("p50", "<=", 0.0),),
        note=f"{asked} asked, {refused} refused, {in_time} of these in time",
    )


def _held(it: Fleet) -> list[int]:
    """The blocks of each node."""
    found = []
    for number in range(ENGINES):
        with Client.open(f"unix:{it.pool.socket(number)}", name="bench") as client:
            found.append(int(client.statistics()["blocks"]))
    return found


def _percentiles(seconds: Sequence[float]) -> str:
    p50, p99 = (1e3 * float(np.percentile(seconds, p)) for p in (50, 99))
    in_time = np.mean([one <= _IN_TIME_S for one in seconds])
    return f"p50 {p50:,.0f} ms, p99 {p99:,.0f} ms; {in_time:.0%} within {_IN_TIME_S:g} s"
