"""Runs the demo with vLLM and prints what came of it."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import msgspec
import typer
from rich.console import Console

from ...demo import decisions
from ..vllm import report
from .run import VllmOptions, run

if TYPE_CHECKING:
    from pathlib import Path

QUICK_REQUESTS = 8


def show(
    chosen: dict[str, Any], quick: bool, out: Path, as_json: bool, console: Console
) -> dict[str, Any]:
    """Run, print decisions and a table, and write `demo-vllm.json` to `out`; returns the summary.
    `chosen`: of VllmOptions, None for a default. Raises ProcessFailed."""
    defaults = {"requests": QUICK_REQUESTS} if quick else {}
    options = VllmOptions(**{**defaults, **{k: v for k, v in chosen.items() if v is not None}})
    outcome = run(options, Console(quiet=True) if as_json else console)
    summary = report.summarise(outcome)
    rows = {
        "summary": summary,
        "without the pool": [asdict(one) for one in outcome.alone],
        "with the pool": [asdict(one) for one in outcome.split],
        "decisions": list(outcome.decisions.values()),
    }
    out.mkdir(parents=True, exist_ok=True)
    data = out / "demo-vllm.json"
    data.write_bytes(msgspec.json.format(msgspec.json.encode(rows), indent=1))
    if as_json:
        typer.echo(json.dumps(summary, indent=2))
        return summary
    console.print("\nsome decisions, and why", style="italic")
    log = outcome.decisions
    for line in decisions.words(decisions.chosen(outcome.split, log), log):
        console.print(line, highlight=False, markup=False, soft_wrap=True)
    console.print()
    console.print(report.table(summary))
    elapsed = f"{summary['elapsed_s']:.0f} s in all"
    console.print(f"rows and decisions: {data}, {elapsed}", highlight=False)
    return summary
