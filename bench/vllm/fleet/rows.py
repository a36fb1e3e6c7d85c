"""What a fleet of real vLLMs finds of what its users have said before, and what that is worth."""

from __future__ import annotations

import contextlib
import tempfile
import time
from collections import defaultdict
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from tiffin.kvstore import Client
from tiffin.kvstore.sizes import parse_bytes

from ...serving.servers import PAGE_TOKENS, SCHEMA
from ...store.rows import MILLISECONDS, Row, Spread, Target, single, times
from .service import ENGINES, fleet
from .users import (
    Prompt,
    arriving,
    at_most,
    conversations,
    ideal_tokens,
    last_of_each,
    one_by_one,
    send,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from numpy.typing import NDArray

    from tiffin.conductor.cost.latency_profiles import Profile

    from ..setting import Setting
    from .service import Fleet, Way
    from .users import Served

_SEED = 1
_HOT_BLOCKS = 12
_IN_TIME_S = 1.0
# With three quarters of a prompt in the pool it is in time, and when all is computed never, unless
# times are off by half. Who is at the limit is refused or late by chance.
_OF_COMPUTING, _POOL_HAS = 0.6, 0.75
_WAYS: tuple[Way, ...] = ("key spaces", "events alone", "round robin", "no pool")
_TARGETS: dict[Way, tuple[Target, ...]] = {
    "events alone": (Target("ratio", ">=", 0.95),),
    "round robin": (Target("ratio", ">=", 0.95),),
    "no pool": (Target("ratio", ">=", 1.5),),
}


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
        after = one_by_one(it.gateway, last, "after")
        rows.append(_restart_row(before, after))
        for one, then in zip(after, before, strict=True):
            assert one.answer == then.answer, "other tokens"
        return rows


def refused(setting: Setting) -> list[Row]:
    """Who is refused early after a restart of all engines, and would have been in time."""
    sizes = setting.sizes
    known = conversations(sizes.users // 2, sizes.turns, _SEED)
    new = conversations(sizes.refused, 1, _SEED + 1)
    with _started(setting, "key spaces") as it:
        setting.tell(f"{len(known)} prompts of {sizes.users // 2} users, one at a time")
        served = one_by_one(it.gateway, known, "talk")
        computed = [one.ttft_s / len(one.prompt.tokens) for one in served if not one.found_tokens]
        token_s = float(np.median(computed))
        it.quiet()
        setting.tell("all engines are killed and start again")
        it.restart()
        it.conductor.patch({"admission": {"mode": "predictive"}})

        def objective_s(one: Prompt) -> float:
            """Of the time that computing it takes."""
            return _OF_COMPUTING * token_s * len(one.tokens)

        def ask_all(prompts: Sequence[Prompt]) -> _Asked:
            setting.tell(f"{len(prompts)} prompts with an objective")
            shares, again = [], []
            for one in prompts:
                first = send(it.gateway, one, "ask", ttft_s=objective_s(one))
                if first.refused:  # so nothing of it was computed
                    again.append(send(it.gateway, one, "again").ttft_s / objective_s(one))
                else:
                    shares.append(first.ttft_s / objective_s(one))
            return _Asked(np.array(shares), np.array(again))

        held = [one for one in known if _held_share(one) >= _POOL_HAS]
        return [_refused_row(ask_all(held), ask_all(new))]


def _held_share(prompt: Prompt) -> float:
    """The whole blocks of a prompt, but its last token, which an engine computes."""
    tokens = len(prompt.tokens)
    return (tokens - 1) // SCHEMA.block_tokens * SCHEMA.block_tokens / tokens


class _Asked(NamedTuple):
    """Prompts with objectives: times to first token as shares of them, of those that were taken,
    and of those that were refused and asked again without one."""

    taken: NDArray[np.float64]
    again: NDArray[np.float64]


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
    with _started(setting, "key spaces") as it:
        talk = conversations(sizes.users // 2, sizes.turns, _SEED)
        profile, most_s = it.profile, at_most(it.gateway, talk, "most")
    setting.tell(f"the fleet serves {most_s:.2f} requests per second")
    # By way and load, a list for each run.
    waited: dict[tuple[Way, float], list[list[float]]] = defaultdict(list)
    for run in range(sizes.runs):
        for way in _WAYS if run == 0 else _WAYS[:-1]:  # without a pool it is far behind
            with _started(setting, way, profile=profile) as it:
                for number, load in enumerate(sizes.loads):
                    seed = 2 + run * len(sizes.loads) + number  # users of their own
                    prompts = conversations(sizes.users // 3, sizes.turns, seed)
                    setting.tell(f"run {run + 1}, {way}: {len(prompts)} prompts, load {load:g}")
                    served = arriving(it.gateway, prompts, f"l-{seed}", load * most_s, seed)
                    waited[way, load].append([one.ttft_s for one in served])
    return [
        _way_row(way, load, load * most_s, waited[way, load], waited["key spaces", load])
        for load in sizes.loads
        for way in _WAYS
    ]


def _way_row(
    way: Way, load: float, rate_s: float, runs: list[list[float]], best: list[list[float]]
) -> Row:
    """`runs`, `best`: seconds of each run, of a way and with key spaces. Only what is in both is
    compared: users of the same seeds."""
    best, all_runs = best[: len(runs)], list(chain(*runs))
    percents = (50, 99)
    by_run = np.percentile(runs, percents, axis=1) / np.percentile(best, percents, axis=1)
    each = "; ".join(
        f"p{percent} by run " + ", ".join(f"{ratio:.2f}" for ratio in ratios)
        for percent, ratios in zip(percents, by_run, strict=True)
    )
    return Row(
        f"fleet-{way.replace(' ', '-')}-{load:g}",
        f"time to first token with {way} at {load:g} of what the fleet serves: {rate_s:.2f} "
        "requests per second",
        "ms",
        times(all_runs, MILLISECONDS),
        "with what the engines announce",
        times(list(chain(*best)), MILLISECONDS),
        _TARGETS.get(way, ()),
        note=f"{_percentiles(all_runs)}; {each}",
    )


@contextlib.contextmanager
def _started(
    setting: Setting,
    way: Way,
    dram: str = "",
    more: dict[str, Any] | None = None,
    profile: Profile | None = None,
) -> Iterator[Fleet]:
    setting.tell(f"{way}: {ENGINES} nodes, {ENGINES} vLLMs, a conductor and a gateway")
    with (
        tempfile.TemporaryDirectory(prefix="tiffin-bench-") as folder,
        fleet(setting, Path(folder), way, dram or setting.sizes.dram, more or {}, profile) as it,
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


def _refused_row(known: _Asked, new: _Asked) -> Row:
    again = np.concatenate((known.again, new.again))
    taken = np.concatenate((known.taken, new.taken))
    least = f", the quickest in {again.min():.2f} of it" if len(again) else ""
    held, nobody = (
        f"{len(one.again)} of {len(one.again) + len(one.taken)}" for one in (known, new)
    )
    return Row(
        "fleet-refused",
        f"prompts refused for an objective of {_OF_COMPUTING:g} of the time that computing takes, "
        f"though in time when asked again without one, of {len(again)} refused",
        "prompts",
        single(float((again <= 1).sum())),
        "all that were asked",
        single(float(len(again) + len(taken))),
        (Target("p50", "<=", 0.0),),
        note=f"refused: {held} of which the pool has three quarters, {nobody} that nobody has"
        f"{least}; {int((taken > 1).sum())} of {len(taken)} that were taken were late",
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
