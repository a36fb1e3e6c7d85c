"""A request in the simulated cluster, and what became of it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tiffin.conductor.records import Decision

    from ..traces.trace import TraceRequest


@dataclass(slots=True)
class SimRequest:
    """A request; times are seconds of the virtual clock. `keys` name its full blocks.

    `cached_tokens`: not computed; `compute_s`: of its prefill, on the GPU; `gaps_s`: between its
    tokens, [output_tokens - 1].
    """

    name: str
    trace: TraceRequest
    keys: tuple[bytes, ...]
    decision: Decision | None = None
    rejected: str = ""
    cached_tokens: int = 0
    compute_s: float = 0.0
    first_token_s: float | None = None
    ended_s: float | None = None
    gaps_s: list[float] = field(default_factory=list)

    @property
    def expected_cached_tokens(self) -> int:
        """Tokens of the prompt that the conductor did not expect to be computed."""
        return 0 if self.decision is None else self.decision.cached_tokens

    @property
    def ttft_s(self) -> float | None:
        """None for a request that has no first token."""
        return None if self.first_token_s is None else self.first_token_s - self.trace.arrival_s
