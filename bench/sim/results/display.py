"""Tables of simulations, side by side."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.table import Table

if TYPE_CHECKING:
    from collections.abc import Sequence

    from .outcomes import Summary


def table(title: str, summaries: Sequence[Summary], goodputs: Sequence[float] = ()) -> Table:
    """A column for each summary. `goodputs`: times of the trace's rate, of each."""
    made = Table(title=title, title_justify="left")
    made.add_column("")
    for one in summaries:
        made.add_column(one.policy, justify="right")
    rows = [
        ("requests", [f"{s.requests:,}" for s in summaries]),
        ("rejected", [_rejected(s) for s in summaries]),
        *_of_the_rejected(summaries),
        ("TTFT mean", [f"{s.ttft_s.mean:.2f} s" for s in summaries]),
        *(
            (f"TTFT {name}", [f"{getattr(s.ttft_s, name):.2f} s" for s in summaries])
            for name in ("p50", "p90", "p99")
        ),
        *(
            (f"TBT {name}", [f"{getattr(s.tbt_s, name) * 1e3:.0f} ms" for s in summaries])
            for name in ("p50", "p90", "p99")
        ),
        ("second token after, mean", [f"{s.second_s.mean:.2f} s" for s in summaries]),
        ("second token after, p99", [f"{s.second_s.p99:.2f} s" for s in summaries]),
        ("met the objectives", [_share(s.attained) for s in summaries]),
        *(
            [("goodput, of this rate", [f"{times:.2f} x" for times in goodputs])]
            if goodputs
            else []
        ),
        ("prompt tokens found", [f"{s.hit_share:.1%}" for s in summaries]),
        *_tiers(summaries),
        ("an ideal pool's", [f"{s.ideal_hit_share:.1%}" for s in summaries]),
        ("GPU time of a prefill", [f"{s.compute_s:.3f} s" for s in summaries]),
        ("moved", [f"{s.moved_bytes / 1e12:.2f} TB" for s in summaries]),
        ("of it for prompts", [f"{s.usage.fetched_bytes / 1e12:.2f} TB" for s in summaries]),
        ("evenness of prefills", [f"{s.usage.evenness:.3f}" for s in summaries]),
        *_fairness(summaries),
        ("predicted TTFT, bias", [f"{s.ttft_bias:+.1%}" for s in summaries]),
        ("predicted TTFT, p90 error", [f"{s.ttft_error_p90:.1%}" for s in summaries]),
    ]
    for name, values in rows:
        made.add_row(name, *values)
    return made


def _of_the_rejected(summaries: Sequence[Summary]) -> list[tuple[str, list[str]]]:
    if not any(summary.rejected for summary in summaries):
        return []
    return [
        ("that would have been in time", [f"{s.usage.refused_in_time:,}" for s in summaries]),
        ("GPU time of theirs", [f"{s.usage.wasted_s:.0f} s" for s in summaries]),
    ]


def _tiers(summaries: Sequence[Summary]) -> list[tuple[str, list[str]]]:
    """Where they were found, if that is more than one place."""
    found = [summary.usage.hit_share_by_tier for summary in summaries]
    names = sorted({name for one in found for name in one})
    if len(names) < 2:
        return []
    return [(f"  {name}", [_share(one.get(name)) for one in found]) for name in names]


def _fairness(summaries: Sequence[Summary]) -> list[tuple[str, list[str]]]:
    found = [summary.usage.fairness for summary in summaries]
    shown = ["" if value is None else f"{value:.3f}" for value in found]
    return [("fairness to tenants", shown)] if any(shown) else []


def _share(share: float | None) -> str:
    return "" if share is None else f"{share:.1%}"


def _rejected(summary: Summary) -> str:
    by_reason = ", ".join(f"{count:,} {reason}" for reason, count in summary.rejected.items())
    return by_reason or "0"
