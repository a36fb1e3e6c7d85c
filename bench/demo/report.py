"""The demo's results: a summary as plain values, and tables as text. The plot is in `plot.py`."""

from __future__ import annotations

import os
import platform
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
from rich.table import Table

from tiffin.kvstore.sizes import format_bytes

from ..environment import library_version
from ..traces.trace import BLOCK_TOKENS
from .engines.model import NEW_TOKENS
from .engines.trace import load_slice, reusable_tokens
from .overload import in_time
from .overload import summarise as summarise_overload

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from .router import ServedRequest
    from .run import Alone, DemoOutcome

PERCENTILES = (50, 90, 99)


def summarise(outcome: DemoOutcome) -> dict[str, Any]:
    """The run in plain nested values. `reusable_rate` is the share of tokens that an unlimited pool
    could have saved if the requests had come one after the other. `found_blocks` counts the blocks
    that prefill workers read, `handed_blocks` those that decode workers read, each split into
    blocks from the worker's own node and blocks over the network."""
    alone, conducted, options = outcome.alone, outcome.conducted, outcome.options
    prompt_tokens = sum(one.prompt_tokens for one in conducted)
    before = distribution([one.ttft_s for one in alone])
    after = distribution([one.ttft_s for one in conducted])
    counters, network = outcome.counters, outcome.network
    return {
        "requests": len(conducted),
        "prefill_workers": options.workers,
        "decode_workers": options.workers,
        "nodes": options.nodes,
        "prompt_tokens": prompt_tokens,
        "hit_rate": sum(one.hit_tokens for one in conducted) / prompt_tokens,
        "reusable_rate": reusable_tokens(load_slice()[: options.requests]) / prompt_tokens,
        "ttft_without_s": before,
        "ttft_with_s": after,
        "ttft_ratio": {name: before[name] / after[name] for name in before},
        "ttft_predicted_ratio": _ratios(conducted),
        "load_p50_s": _median([one.load_s for one in conducted if one.hit_tokens]),
        "save_p50_s": _median([one.save_s for one in conducted]),
        "found_blocks": _blocks([one.hit_tokens for one in conducted], network["prefill"]),
        "handed_blocks": _blocks([one.moved_tokens for one in conducted], network["decode"]),
        "handed_p50_s": _median([one.move_s for one in conducted if one.moved_tokens]),
        "network_bytes": sum(one["bytes"] for one in network.values()),
        "nvme_blocks": counters["nvme_hits"],
        "nvme_bytes": counters["nvme_hit_bytes"],
        "pool_failures": outcome.pool_failures,
        "new_tokens": NEW_TOKENS,
        "differing_requests": differing(alone, conducted),
        "identical": not differing(alone, conducted),
        "ttft_objective_s": outcome.ttft_objective_s,
        "overload_rate_s": outcome.overload_rate_s,
        "goodput_before_s": in_time(conducted, outcome.ttft_objective_s)
        / outcome.pass_s["with the pool"],
        "overload": {
            one.mode: summarise_overload(one, outcome.ttft_objective_s) for one in outcome.overload
        },
        "pass_s": outcome.pass_s,
        "elapsed_s": outcome.elapsed_s,
        "options": asdict(options),
        "environment": environment(),
    }


def rows(outcome: DemoOutcome, summary: dict[str, Any]) -> dict[str, Any]:
    """The contents of the JSON file: the summary, each request of each pass, each decision. Unknown
    values are null."""
    told = {
        "summary": summary,
        "profile": outcome.profile,
        "without_the_pool": outcome.alone,
        "with_the_pool": outcome.conducted,
        "overload": {one.mode: one.served for one in outcome.overload},
        "decisions": list(outcome.decisions.values()),
    }
    plain: dict[str, Any] = msgspec.json.decode(msgspec.json.encode(told))  # NaN becomes null
    return plain


def differing(alone: Sequence[Alone], conducted: Sequence[ServedRequest]) -> list[int]:
    """Requests whose tokens differ from those of a single process, or which have no answer."""
    answers = {one.request: one.tokens for one in conducted}
    return [one.request for one in alone if answers.get(one.request) != one.tokens]


def environment() -> dict[str, Any]:
    """The environment that the numbers depend on."""
    return {
        "cpu": _cpu_name(),
        "cores": os.cpu_count(),
        "load_average_1m": round(os.getloadavg()[0], 1),
        "python": platform.python_version(),
        **{name: library_version(name) for name in ("torch", "transformers", "numpy")},
    }


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.machine()
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.machine())


def distribution(times_s: Sequence[float]) -> dict[str, float]:
    """Their mean and PERCENTILES, by name."""
    numbers = {f"p{p}": float(np.percentile(times_s, p)) for p in PERCENTILES}
    return {"mean": float(np.mean(times_s)), **numbers}


def _ratios(conducted: Sequence[ServedRequest]) -> dict[str, float]:
    """Percentiles of observed over predicted time to first token."""
    ratios = [one.ttft_s / one.predicted_ttft_s for one in conducted]
    return {f"p{p}": float(np.percentile(ratios, p)) for p in (10, 50, 90)}


def _blocks(tokens: Sequence[int], network: dict[str, int]) -> dict[str, int]:
    """How many blocks of these prompts were read at home, and how many over the network."""
    return {
        "home": sum(tokens) // BLOCK_TOKENS - network["blocks"],
        "network": network["blocks"],
    }


def _median(times_s: Sequence[float]) -> float:
    return float(np.median(times_s)) if times_s else 0.0


# -- for people ------------------------------------------------------------------------------------


def ttft_table(summary: dict[str, Any], what: str) -> Table:
    """Times to first token without and with the pool, which is `what`. Others add their rows."""
    made = Table(
        title=f"{summary['requests']} requests, {summary['prompt_tokens']:,} prompt tokens: {what}",
        title_justify="left",
    )
    made.add_column("")
    for name in ("without the pool", "with the pool", "ratio"):
        made.add_column(name, justify="right")
    for name, before_s in summary["ttft_without_s"].items():
        after_s, ratio = summary["ttft_with_s"][name], summary["ttft_ratio"][name]
        made.add_row(f"TTFT {name}", ms(before_s), ms(after_s), f"{ratio:.2f}×")
    return made


def table(summary: dict[str, Any]) -> Table:
    """The trace without and with the pool, in some lines."""
    workers = summary["prefill_workers"]
    made = ttft_table(
        summary,
        f"{_count(workers, 'process')} alone; then a conductor, {workers} prefill and "
        f"{summary['decode_workers']} decode workers, {_count(summary['nodes'], 'node')}",
    )
    seconds = summary["pass_s"]
    passes = (seconds["without the pool"], seconds["with the pool"])
    made.add_row("whole pass", *(f"{one:.1f} s" for one in passes), end_section=True)
    hit, possible = summary["hit_rate"], summary["reusable_rate"]
    made.add_row("prompt tokens found", "0.0%", f"{hit:.1%}", f"of {possible:.1%}")
    for what, key in (("found by prefill", "found_blocks"), ("handed to decode", "handed_blocks")):
        made.add_row(f"{what}, at home", "", f"{summary[key]['home']} blocks")
        if summary["nodes"] > 1:
            made.add_row(f"{what}, over TCP", "", f"{summary[key]['network']} blocks")
    if summary["nodes"] > 1:
        made.add_row("over TCP in all", "", format_bytes(summary["network_bytes"]))
    promoted = f"{summary['nvme_blocks']} blocks, {format_bytes(summary['nvme_bytes'])}"
    made.add_row("of all these from NVMe", "", promoted)
    made.add_row("load, median of hits", "", ms(summary["load_p50_s"]))
    made.add_row("save, median", "", ms(summary["save_p50_s"]))
    off = summary["ttft_predicted_ratio"]
    spread = f"{off['p10']:.2f} to {off['p90']:.2f}"
    made.add_row("TTFT, observed / predicted", "", f"{off['p50']:.2f}", spread)
    same = "[green]yes[/]" if summary["identical"] else "[bold red]NO[/]"
    made.add_row("tokens identical", "", same)
    return made


def overload_table(summary: dict[str, Any]) -> Table:
    """Both modes of admission. What was served in time stands beside that of the pass before, in
    which nobody asks for more than the workers do."""
    modes, before_s = summary["overload"], summary["goodput_before_s"]
    arrived = next(iter(modes.values()))["arrived"]
    made = Table(
        title=f"overload: {arrived} requests, {summary['overload_rate_s']:.1f} per second, each "
        f"wants its first token within {summary['ttft_objective_s']:.1f} s",
        title_justify="left",
    )
    made.add_column("admission")
    for mode in modes:
        made.add_column(mode, justify="right")
    cells: dict[str, Callable[[dict[str, Any]], str]] = {
        "admitted": lambda one: f"{one['admitted']}",
        "rejected": lambda one: f"{one['rejected']}",
        "met the objective": lambda one: f"{one['met']}",
        "share of the admitted that met it": lambda one: f"{one['met_share']:.0%}",
        "goodput: in time, per second": lambda one: f"{one['goodput_s']:.2f}",
        f"of the {before_s:.2f} before the overload": (
            lambda one: f"{one['goodput_s'] / before_s:.0%}" if before_s else ""
        ),
        "TTFT p50": lambda one: ms(one["ttft_p50_s"]),
        "TTFT p90": lambda one: ms(one["ttft_p90_s"]),
    }
    for name, cell in cells.items():
        made.add_row(name, *(cell(one) for one in modes.values()))
    made.add_section()
    outcomes = dict.fromkeys(name for one in modes.values() for name in one["shadow"])
    for name in outcomes:
        words = f"counted by the conductor: {name.replace('_', ' ')}"
        made.add_row(words, *(f"{one['shadow'].get(name, 0)}" for one in modes.values()))
    return made


def _count(number: int, noun: str) -> str:
    plural = f"{noun}es" if noun.endswith("s") else f"{noun}s"
    return f"{number} {noun if number == 1 else plural}"


def ms(seconds: float) -> str:
    """Milliseconds as text, with a decimal if the number is small."""
    return f"{seconds * 1e3:,.1f} ms" if seconds < 0.1 else f"{seconds * 1e3:,.0f} ms"
