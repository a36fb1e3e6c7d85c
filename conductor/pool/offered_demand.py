"""Which requests are new demand, and which are refused ones that come again. Pure.

A fleet is too small by those whom it refuses, so the planner counts every request that is offered,
refused or not. Who was refused comes again, as Retry-After says, and must count once however often
it comes. A retry is known by its prompt: the same tenant, model, length and last block key, which
hashes all tokens before it; without keys by its id. It is one within `RETRY_S` of the last refusal.
Clients that retry a prompt without keys under a new id count again, and so does a retry at another
conductor.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ..records import Request

# Twice the longest Retry-After by default: who comes later, comes anew.
RETRY_S = 120.0
# Refused requests that are remembered, of the last `RETRY_S`, and at most: 12 MB. At 500 refusals a
# second, those of two minutes.
REFUSED_MAX = 65_536


class OfferedDemand:
    """Remembers who was refused. Not thread-safe."""

    def __init__(self) -> None:
        self._refused: OrderedDict[tuple[object, ...], float] = OrderedDict()

    def __len__(self) -> int:
        """How many refused requests are remembered."""
        return len(self._refused)

    def is_new(self, request: Request, now: float) -> bool:
        """Whether a request is not the retry of a refused one; then that is forgotten, as it was
        counted before."""
        if not self._refused:
            return True
        at = self._refused.pop(_prompt(request), None)
        return at is None or now > at + RETRY_S

    def counted(self, request: Request, now: float) -> None:
        """A request that was counted was refused, or lost its place: it may come again."""
        prompt = _prompt(request)
        self._refused[prompt] = now
        self._refused.move_to_end(prompt)
        oldest = next(iter(self._refused.values()))
        while oldest + RETRY_S < now or len(self._refused) > REFUSED_MAX:
            self._refused.popitem(last=False)
            oldest = next(iter(self._refused.values()))


def _prompt(request: Request) -> tuple[object, ...]:
    if request.keys:
        return request.tenant, request.model, request.prompt_tokens, request.keys[-1]
    return (request.id,)
