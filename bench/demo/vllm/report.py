"""What came of the demo with vLLM: a summary as plain values, and a table as text."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from ...serving.servers import PAGE_TOKENS, SCHEMA
from ..engines.trace import load_slice, reusable_tokens
from ..report import differing, distribution, environment, ttft_table
from .run import ANSWER_TOKENS

if TYPE_CHECKING:
    from rich.table import Table

    from .run import VllmOutcome


def summarise(outcome: VllmOutcome) -> dict[str, Any]:
    """The run in plain nested values. `hit_rate`: the share of the prompts' tokens that instances
    which prefill loaded from the pool; `expected_rate`: the share that the decisions counted on;
    `as_expected`: how many requests found that, to within a page of the engine. `reusable_rate`:
    what they could have, had the requests come one after the other. `handed_rate`: the share that
    instances which decode loaded, of all that fills blocks."""
    alone, split, options = outcome.alone, outcome.split, outcome.options
    prompt_tokens = sum(one.prompt_tokens for one in split)
    in_blocks = sum(one.prompt_tokens // SCHEMA.block_tokens * SCHEMA.block_tokens for one in split)
    before = distribution([one.ttft_s for one in alone])
    after = distribution([one.ttft_s for one in split])
    different = differing(alone, split)
    log = [outcome.decisions[one.id] for one in split]
    # Of whole blocks alone, all of which are found, the instance that prefills computes a token.
    near = [
        one.became is not None
        and one.became.found_tokens is not None
        and abs(one.became.found_tokens - (one.cached_tokens or 0)) <= PAGE_TOKENS
        for one in log
    ]
    return {
        "engine": "vllm",
        "requests": len(split),
        "prefill_workers": options.workers,
        "decode_workers": options.workers,
        "prompt_tokens": prompt_tokens,
        "hit_rate": outcome.found_tokens / prompt_tokens,
        "expected_rate": sum(one.cached_tokens or 0 for one in log) / prompt_tokens,
        "as_expected": sum(near),
        "reusable_rate": reusable_tokens(load_slice()[: len(split)]) / prompt_tokens,
        "handed_rate": outcome.handed_tokens / in_blocks,
        "ttft_without_s": before,
        "ttft_with_s": after,
        "ttft_ratio": {name: before[name] / after[name] for name in before},
        "new_tokens": ANSWER_TOKENS,
        "differing_requests": different,
        "identical": not different,
        "elapsed_s": outcome.elapsed_s,
        "options": {**asdict(options), "python": str(options.python)},
        "environment": environment(),
    }


def table(summary: dict[str, Any]) -> Table:
    """Without and with the pool, in some lines."""
    workers = summary["prefill_workers"]
    made = ttft_table(
        summary,
        f"one vLLM alone; then a gateway, a conductor, {workers} vLLM to prefill and {workers} to "
        "decode, one node",
    )
    made.add_section()
    hit, possible = summary["hit_rate"], summary["reusable_rate"]
    made.add_row("prompt tokens found", "0.0%", f"{hit:.1%}", f"of {possible:.1%}")
    made.add_row("counted on by the conductor", "", f"{summary['expected_rate']:.1%}")
    right = f"{summary['as_expected']} of {summary['requests']}"
    made.add_row("requests that found that", "", right)
    made.add_row("whole blocks handed to decode", "", f"{summary['handed_rate']:.1%}")
    same = "[green]yes[/]" if summary["identical"] else "[bold red]NO[/]"
    made.add_row("tokens identical", "", same)
    return made
