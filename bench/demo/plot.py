"""The plot: times to first token without and with the pool, and in an overload."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .report import ms

if TYPE_CHECKING:
    from pathlib import Path

    from .run import DemoOutcome

WITHOUT_COLOUR = "#9aa0a6"
INK = "#333333"
MET, MISSED, REJECTED = "#2a788e", "#d1495b", "#b8bcc2"


def plot(outcome: DemoOutcome, summary: dict[str, Any], path: Path) -> None:
    """Write a PNG. Upper plot: time to first token against prompt length, both passes; lower plot:
    against the time of arrival, for both modes of admission."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 9), dpi=150, layout="constrained")
    parts: Any = figure.subfigures(2, 1, height_ratios=(1.35, 1))
    upper, lower = parts
    _lengths(upper, outcome, summary)
    modes = lower.subplots(1, max(len(outcome.overload), 1), sharey=True, squeeze=False)[0]
    for axes, one in zip(modes, outcome.overload, strict=False):
        _arrivals(axes, one, summary)
    if outcome.overload:
        modes[0].set_ylabel("time to first token (s)", color=INK)
        lower.suptitle(
            f"Overload: {summary['overload_rate_s']:.1f} requests per second, the objective is "
            f"{summary['ttft_objective_s']:.1f} s",
            x=0.01, ha="left", color=INK, fontsize=12,
        )  # fmt: skip
    figure.savefig(path)


def _lengths(figure: Any, outcome: DemoOutcome, summary: dict[str, Any]) -> None:
    from matplotlib.ticker import FuncFormatter

    axes = figure.subplots()
    alone, conducted = outcome.alone, outcome.conducted
    lengths = [one.prompt_tokens for one in alone]
    before_s, after_s = [one.ttft_s for one in alone], [one.ttft_s for one in conducted]
    share = [one.hit_tokens / one.prompt_tokens for one in conducted]
    axes.vlines(lengths, after_s, before_s, color=WITHOUT_COLOUR, alpha=0.35, linewidth=0.8)
    axes.scatter(
        lengths, before_s, s=26, facecolors="white", edgecolors=WITHOUT_COLOUR, linewidths=1.2,
        label=f"without the pool (median {ms(summary['ttft_without_s']['p50'])})",
    )  # fmt: skip
    dots = axes.scatter(
        lengths, after_s, s=30, c=share, cmap="viridis_r", vmin=0, vmax=1, zorder=3
    )  # fmt: skip
    median = f"with pool and conductor (median {ms(summary['ttft_with_s']['p50'])})"
    axes.scatter([], [], s=30, color=dots.cmap(0.6), label=median)
    percent = FuncFormatter(lambda part, _: f"{part:.0%}")
    bar = figure.colorbar(dots, ax=axes, pad=0.015, aspect=32, format=percent)
    bar.set_label("share of the prompt found in the pool", color=INK)
    bar.outline.set_visible(False)
    _dress_lengths(axes, summary)


def _dress_lengths(axes: Any, summary: dict[str, Any]) -> None:
    axes.set_title(
        "What was found in the pool is not computed again: first tokens come sooner",
        loc="left", color=INK, fontsize=12, pad=26,
    )  # fmt: skip
    axes.text(
        0, 1.025,
        f"{summary['requests']} requests of a chat service; {summary['prefill_workers']} prefill "
        f"and {summary['decode_workers']} decode workers; {summary['hit_rate']:.0%} of all tokens "
        "found. Lines join a request's two passes.",
        transform=axes.transAxes, color="#666666", fontsize=8.5, in_layout=False,
    )  # fmt: skip
    axes.set_xlabel("prompt length (tokens)", color=INK)
    axes.set_ylabel("time to first token (s)", color=INK)
    axes.set_xlim(0, 4200)
    axes.set_xticks(range(0, 4097, 512))
    _dress(axes)
    axes.legend(frameon=False, loc="upper left")


def _arrivals(axes: Any, one: Any, summary: dict[str, Any]) -> None:
    """Plot one mode. A rejected request is a mark at the bottom."""
    objective_s, found = summary["ttft_objective_s"], summary["overload"][one.mode]
    admitted = [served for served in one.served if not served.rejected]
    for colour, word, within in ((MET, "in time", True), (MISSED, "too late", False)):
        those = [served for served in admitted if (served.ttft_s <= objective_s) == within]
        axes.scatter(
            [served.at_s for served in those], [served.ttft_s for served in those],
            s=22, color=colour, label=f"{len(those)} {word}", zorder=3,
        )  # fmt: skip
    rejected = [served.at_s for served in one.served if served.rejected]
    axes.scatter(
        rejected, [0.0] * len(rejected), s=26, marker="x", color=REJECTED, clip_on=False,
        label=f"{len(rejected)} rejected",
    )  # fmt: skip
    axes.axhline(objective_s, color=INK, linewidth=0.9, linestyle=(0, (4, 3)))
    axes.set_title(
        f"admission {one.mode}: {found['met_share']:.0%} of the admitted in time",
        loc="left", color=INK, fontsize=10,
    )  # fmt: skip
    axes.set_xlabel("arrival (s)", color=INK)
    _dress(axes)
    axes.legend(frameon=False, fontsize=8.5, loc="upper left")


def _dress(axes: Any) -> None:
    axes.set_ylim(bottom=0)
    axes.grid(axis="y", color="#e6e6e6", linewidth=0.8)
    axes.set_axisbelow(True)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
