"""What a trace is: when requests arrive, how long they are, and which blocks they share."""

from __future__ import annotations

from dataclasses import dataclass

BLOCK_TOKENS = 512  # what the public traces hash


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """One request. `arrival_s` is seconds after the trace's start.

    `blocks` has an id for each block of the prompt, the last of which may be partial. Equal ids are
    equal tokens, and equal tokens before them. It is empty if the trace does not say.
    """

    arrival_s: float
    prompt_tokens: int
    output_tokens: int
    blocks: tuple[int, ...] = ()
    tenant: str = ""

    def full_blocks(self, block_tokens: int = BLOCK_TOKENS) -> int:
        """How many of `blocks` are full: only these can be reused by a longer prompt."""
        return min(len(self.blocks), self.prompt_tokens // block_tokens)


@dataclass(frozen=True, slots=True)
class Trace:
    """Requests in order of arrival."""

    name: str
    requests: tuple[TraceRequest, ...]
    block_tokens: int = BLOCK_TOKENS

    @property
    def span_s(self) -> float:
        """Seconds from the first arrival to the last."""
        return self.requests[-1].arrival_s - self.requests[0].arrival_s if self.requests else 0.0

    @property
    def rate(self) -> float:
        """Requests per second; 0 if all came at once."""
        return (len(self.requests) - 1) / self.span_s if self.span_s else 0.0

    @property
    def prompt_tokens(self) -> int:
        """Tokens of all prompts."""
        return sum(request.prompt_tokens for request in self.requests)

    @property
    def has_blocks(self) -> bool:
        """Whether the trace says which blocks its prompts share."""
        return any(request.blocks for request in self.requests)

    def full_blocks(self, request: TraceRequest) -> tuple[int, ...]:
        """The ids of the request's full blocks."""
        return request.blocks[: request.full_blocks(self.block_tokens)]
