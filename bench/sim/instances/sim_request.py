"""A request in the simulated cluster, and what became of it."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tiffin.conductor.records import Decision

    from ...traces.trace import TraceRequest


@dataclass(slots=True)
class SimRequest:
    """A request; times are seconds of the virtual clock. `keys` name its full blocks.

    `cached_tokens`: not computed; `by_tier` has these tokens by the tier that they were in: "hbm",
    "dram", "nvme" of its own node, or "fetched". `compute_s`: of its prefill, on the GPU; `gaps_s`:
    between its tokens, [output_tokens - 1].
    """

    name: str
    trace: TraceRequest
    keys: tuple[bytes, ...]
    decision: Decision | None = None
    rejected: str = ""
    fetched_blocks: int = 0
    cached_tokens: int = 0
    by_tier: dict[str, int] = field(default_factory=dict)
    compute_s: float = 0.0
    first_token_s: float | None = None
    ended_s: float | None = None
    gaps_s: list[float] = field(default_factory=list)

    def cut_at(self, tokens: int | None) -> None:
        """Its answer ends after so many tokens, if it would be longer."""
        if tokens is not None and tokens < self.trace.output_tokens:
            self.trace = replace(self.trace, output_tokens=tokens)

    @property
    def expected_cached_tokens(self) -> int:
        """Tokens of the prompt that the conductor did not expect to be computed."""
        return 0 if self.decision is None else self.decision.cached_tokens

    @property
    def ttft_s(self) -> float | None:
        """None for a request that has no first token."""
        return None if self.first_token_s is None else self.first_token_s - self.trace.arrival_s
