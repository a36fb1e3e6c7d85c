"""What the demo found: a summary for machines, a table and a plot for people."""

from __future__ import annotations

import os
import platform
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from rich.table import Table

from tiffin.kvstore.sizes import format_bytes

from .trace import BLOCK_TOKENS, load_slice, reusable_tokens

if TYPE_CHECKING:
    from collections.abc import Sequence

    from .run import Outcome
    from .worker import Row

PERCENTILES = (50, 90, 99)

WITHOUT_COLOUR = "#9aa0a6"
INK = "#333333"


def summarise(outcome: Outcome) -> dict[str, Any]:
    """The run in plain nested values. `reusable_rate` is what an unlimited pool could have given
    if the requests had come one after the other. `found_blocks` counts each block of each request
    once: read where it lay at the worker's own node, or over the network."""
    without, with_pool = _passes(outcome.rows)
    prompt_tokens = sum(row.prompt_tokens for row in with_pool)
    requests = load_slice()[: outcome.options.requests]
    before, after = _distribution(without), _distribution(with_pool)
    counters = outcome.counters
    found = sum(row.hit_tokens for row in with_pool) // BLOCK_TOKENS
    return {
        "requests": len(with_pool),
        "workers": outcome.options.workers,
        "nodes": outcome.options.nodes,
        "prompt_tokens": prompt_tokens,
        "hit_rate": sum(row.hit_tokens for row in with_pool) / prompt_tokens,
        "reusable_rate": reusable_tokens(requests) / prompt_tokens,
        "ttft_without_s": before,
        "ttft_with_s": after,
        "ttft_ratio": {name: before[name] / after[name] for name in before},
        "load_p50_s": _median([row.load_s for row in with_pool if row.hit_tokens]),
        "save_p50_s": _median([row.save_s for row in with_pool]),
        "found_blocks": {
            "home": found - outcome.network["blocks"],
            "network": outcome.network["blocks"],
        },
        "network_bytes": outcome.network["bytes"],
        "nvme_blocks": counters["nvme_hits"],
        "nvme_bytes": counters["nvme_hit_bytes"],
        "pool_failures": sum({row.worker: row.failures for row in with_pool}.values()),
        "differing_requests": differing(outcome.rows),
        "identical": not differing(outcome.rows),
        "pass_s": outcome.pass_s,
        "elapsed_s": outcome.elapsed_s,
        "options": asdict(outcome.options),
        "environment": environment(),
    }


def differing(rows: Sequence[Row]) -> list[int]:
    """Requests whose tokens with the pool are not those without it."""
    without, with_pool = _passes(rows)
    pairs = zip(without, with_pool, strict=True)
    return [a.request for a, b in pairs if a.tokens != b.tokens or a.request != b.request]


def environment() -> dict[str, Any]:
    """What the numbers depend on."""
    return {
        "cpu": _cpu_name(),
        "cores": os.cpu_count(),
        "load_average_1m": round(os.getloadavg()[0], 1),
        "python": platform.python_version(),
        **{name: version(name) for name in ("torch", "transformers", "numpy")},
    }


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.machine()
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.machine())


def _passes(rows: Sequence[Row]) -> tuple[list[Row], list[Row]]:
    """Without and with the pool, each in order of the requests."""
    ordered = sorted(rows, key=lambda row: row.request)
    return [r for r in ordered if not r.pool], [r for r in ordered if r.pool]


def _distribution(rows: Sequence[Row]) -> dict[str, float]:
    times_s = [row.ttft_s for row in rows]
    numbers = {f"p{p}": float(np.percentile(times_s, p)) for p in PERCENTILES}
    return {"mean": float(np.mean(times_s)), **numbers}


def _median(times_s: Sequence[float]) -> float:
    return float(np.median(times_s)) if times_s else 0.0


# -- for people ------------------------------------------------------------------------------------


def table(summary: dict[str, Any]) -> Table:
    """The summary in a dozen lines."""
    made = Table(
        title=f"{summary['requests']} requests, {summary['prompt_tokens']:,} prompt tokens, "
        f"{summary['workers']} processes, {_count(summary['nodes'], 'node')}, "
        f"{summary['elapsed_s']:.0f} s in all",
        title_justify="left",
    )
    made.add_column("")
    for name in ("without the pool", "with the pool", "ratio"):
        made.add_column(name, justify="right")
    for name, before_s in summary["ttft_without_s"].items():
        after_s, ratio = summary["ttft_with_s"][name], summary["ttft_ratio"][name]
        made.add_row(f"TTFT {name}", _ms(before_s), _ms(after_s), f"{ratio:.2f}×")
    seconds = summary["pass_s"]
    made.add_row("whole pass", *(f"{seconds[name]:.1f} s" for name in seconds), end_section=True)
    hit, possible = summary["hit_rate"], summary["reusable_rate"]
    made.add_row("prompt tokens found", "0.0%", f"{hit:.1%}", f"of {possible:.1%}")
    found = summary["found_blocks"]
    made.add_row("read at home", "", f"{found['home']} blocks")
    if summary["nodes"] > 1:
        moved = f"{found['network']} blocks, {format_bytes(summary['network_bytes'])}"
        made.add_row("read over TCP", "", moved)
    promoted = f"{summary['nvme_blocks']} blocks, {format_bytes(summary['nvme_bytes'])}"
    made.add_row("of all these from NVMe", "", promoted)
    made.add_row("load, median of hits", "", _ms(summary["load_p50_s"]))
    made.add_row("save after the answer, median", "", _ms(summary["save_p50_s"]))
    same = "[green]yes[/]" if summary["identical"] else "[bold red]NO[/]"
    made.add_row("tokens identical", "", same)
    return made


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" + ("" if number == 1 else "s")


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:,.1f} ms" if seconds < 0.1 else f"{seconds * 1e3:,.0f} ms"


def plot(rows: Sequence[Row], summary: dict[str, Any], path: Path) -> None:
    """Time to first token against prompt length, both passes, as a PNG."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import FuncFormatter

    without, with_pool = _passes(rows)
    figure = Figure(figsize=(9, 5.4), dpi=150, layout="constrained")
    axes = figure.add_subplot()
    lengths = [row.prompt_tokens for row in without]
    before_s, after_s = ([row.ttft_s for row in rows] for rows in (without, with_pool))
    share = [row.hit_tokens / row.prompt_tokens for row in with_pool]
    axes.vlines(lengths, after_s, before_s, color=WITHOUT_COLOUR, alpha=0.35, linewidth=0.8)
    axes.scatter(
        lengths, before_s, s=26, facecolors="white", edgecolors=WITHOUT_COLOUR, linewidths=1.2,
        label=f"without the pool (median {_ms(summary['ttft_without_s']['p50'])})",
    )  # fmt: skip
    dots = axes.scatter(
        lengths, after_s, s=30, c=share, cmap="viridis_r", vmin=0, vmax=1, zorder=3
    )  # fmt: skip
    median = f"with the pool (median {_ms(summary['ttft_with_s']['p50'])})"
    axes.scatter([], [], s=30, color=dots.cmap(0.6), label=median)
    percent = FuncFormatter(lambda part, _: f"{part:.0%}")
    bar = figure.colorbar(dots, ax=axes, pad=0.015, aspect=32, format=percent)
    bar.set_label("share of the prompt found in the pool", color=INK)
    bar.outline.set_visible(False)
    _dress(axes, summary)
    figure.savefig(path)


def _dress(axes: Any, summary: dict[str, Any]) -> None:
    axes.set_title(
        "What was found in the pool is not computed again: first tokens come sooner",
        loc="left", color=INK, fontsize=12, pad=26,
    )  # fmt: skip
    axes.text(
        0, 1.025,
        f"{summary['requests']} requests of a chat service, {summary['workers']} processes, "
        f"{_count(summary['nodes'], 'node')}; {summary['hit_rate']:.0%} of all tokens found. "
        "Lines join a request's two passes.",
        transform=axes.transAxes, color="#666666", fontsize=8.5, in_layout=False,
    )  # fmt: skip
    axes.set_xlabel("prompt length (tokens)", color=INK)
    axes.set_ylabel("time to first token (s)", color=INK)
    axes.set_xlim(0, 4200)
    axes.set_xticks(range(0, 4097, 512))
    axes.set_ylim(bottom=0)
    axes.grid(axis="y", color="#e6e6e6", linewidth=0.8)
    axes.set_axisbelow(True)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    axes.legend(frameon=False, loc="upper left")
