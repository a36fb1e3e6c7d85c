"""A comparison as a table, and as plain data."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from rich.table import Table

from .comparison import fidelity, measured

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from .comparison import Error, Fidelity, Measured, Served

    Row = tuple[str, Callable[[Measured], float | None], Callable[[float], str]]


@dataclass(frozen=True, slots=True)
class Report:
    """What was observed, the replay of what was in force, and the replay with changes, if any.
    `warnings`: why the last two may say little. `judged`: by the numbers of which requests the
    replay is; None: all."""

    title: str
    change: str
    observed: Sequence[Served]
    replayed: Sequence[Served]
    whatif: Sequence[Served] | None
    warnings: Sequence[str] = ()
    judged: Callable[[int], bool] | None = None

    @property
    def fidelity(self) -> Fidelity:
        """How far the replay is from what was observed, of the requests that are `judged`."""
        pairs = zip(self.observed, self.replayed, strict=True)
        kept = [pair for n, pair in enumerate(pairs) if self.judged is None or self.judged(n)]
        return fidelity([truth for truth, _ in kept], [ours for _, ours in kept])

    def plain(self) -> dict[str, Any]:
        """For JSON."""
        near = self.fidelity
        return {
            "recording": self.title,
            "change": self.change,
            "observed": asdict(measured(self.observed)),
            "replayed": asdict(measured(self.replayed)),
            "fidelity": asdict(near),
            "whatif": None if self.whatif is None else asdict(measured(self.whatif)),
            "warnings": [*self.warnings, *near.faults()],
        }


def _seconds(value: float) -> str:
    return f"{value:.3f} s"


def _milliseconds(value: float) -> str:
    return f"{value * 1e3:.1f} ms"


def _share(value: float) -> str:
    return f"{value:.1%}"


_QUANTILES = ("mean", "p50", "p90", "p99")
_ROWS: list[Row] = [
    *((f"TTFT {q}", lambda m, q=q: getattr(m.ttft_s, q), _seconds) for q in _QUANTILES),
    *((f"TBT {q}", lambda m, q=q: getattr(m.tbt_s, q), _milliseconds) for q in _QUANTILES),
    ("prompt tokens found", lambda m: m.hit_share, _share),
    ("rejected", lambda m: float(sum(m.rejected.values())), lambda value: f"{value:,.0f}"),
    ("met their objectives", lambda m: m.attained, _share),
]


def table(report: Report) -> Table:
    """Side by side: observed, replayed, and with the change, each beside what it is compared to."""
    made = Table(title=report.title, title_justify="left")
    made.add_column("")
    columns = ["observed", "replayed", "off by"]
    whatif = None if report.whatif is None else measured(report.whatif)
    if whatif is not None:
        columns += ["what if", "change"]
    for name in columns:
        made.add_column(name, justify="right")
    truth, replayed = measured(report.observed), measured(report.replayed)
    for label, of, shown in _ROWS:
        cells = [_cell(of(truth), shown), _cell(of(replayed), shown)]
        cells.append(_difference(of(replayed), of(truth), shown))
        if whatif is not None:
            cells += [_cell(of(whatif), shown), _difference(of(whatif), of(replayed), shown)]
        made.add_row(label, *cells)
    return made


def in_words(report: Report) -> list[str]:
    """How far the replay is from what was observed, request by request."""
    near = report.fidelity
    pairs = (("TTFT", near.ttft), ("TBT", near.tbt))
    return [_error(name, error) for name, error in pairs if error is not None]


def _error(name: str, error: Error) -> str:
    return (
        f"replayed {name} of {error.requests:,} requests: bias {error.bias:+.1%}, "
        f"nine of ten within {error.p90:.1%}"
    )


def _cell(value: float | None, shown: Callable[[float], str]) -> str:
    return "" if value is None else shown(value)


def _difference(ours: float | None, other: float | None, shown: Callable[[float], str]) -> str:
    """Relative for seconds and counts, points for shares."""
    if ours is None or other is None:
        return ""
    if shown is _share:
        return f"{(ours - other) * 100:+.1f} points"
    return f"{ours / other - 1:+.1%}" if other else ""
