"""Times to the first token, and the rows that they make."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ..store.rows import Row, Spread, Target

if TYPE_CHECKING:
    from collections.abc import Mapping

    from .setting import Sizes

_OWN = "the same prompt from vLLM's own prefix cache, in turns"


@dataclass(slots=True)
class Times:
    """Milliseconds to the first token, by request; `cached`: tokens that were not computed;
    `repeated`: how many were measured again because not all of a prompt had been loaded."""

    expected: list[int] = field(default_factory=list)
    cold: list[float] = field(default_factory=list)
    loaded: list[float] = field(default_factory=list)
    own: list[float] = field(default_factory=list)
    cached: list[int] = field(default_factory=list)
    repeated: int = 0

    def computed(self, found: Mapping[str, Any]) -> None:
        """Take in what `FirstTokens.compute` found."""
        self.expected, self.cold = found["tokens"], found["cold"]

    def add(self, turn: Mapping[str, Any]) -> None:
        """Take in what `FirstTokens.turn` found. Raises AssertionError for wrong tokens."""
        assert turn["tokens"] == self.expected, "other tokens than were computed"
        self.loaded += turn["loaded"]
        self.own += turn["own"]
        self.cached += turn["cached"]
        self.repeated += turn["repeated"]

    def row(self, sizes: Sizes, name: str, source: str, bound: float | None) -> Row:
        """What loading takes beside vLLM's own cache. `bound`: the target of the ratio."""
        cold = sorted(self.cold)[len(self.cold) // 2]
        return Row(
            name=name,
            what=f"first token of {sizes.tokens} tokens, {max(self.cached)} of them loaded "
            f"{source}",
            unit="ms",
            value=_spread(self.loaded),
            limit_what=_OWN,
            limit=_spread(self.own),
            targets=(Target("ratio", "<=", bound),) if bound else (),
            note="; ".join([f"computed: {cold:.0f} ms", *self._again()]),
        )

    def _again(self) -> list[str]:
        if not self.repeated:
            return []
        count = len(self.loaded) + self.repeated
        return [f"{self.repeated} of {count} measured again: not all was loaded"]


def added(name: str, ours: Times, peer: Times, peer_what: str, bound: float | None = 0.7) -> Row:
    """What loading adds to vLLM's own prefix cache, beside what a peer adds. `bound`: the target of
    the ratio."""
    again = [*(f"ours: {text}" for text in ours._again()), *(f"peer: {t}" for t in peer._again())]
    return Row(
        name=f"added-beside-{name}",
        what="what loading from the node on this host adds to vLLM's own prefix cache",
        unit="ms",
        value=_added(ours),
        limit_what=f"what {peer_what} adds, in turns",
        limit=_added(peer),
        targets=(Target("ratio", "<=", bound),) if bound else (),
        note="; ".join(again),
    )


def _added(times: Times) -> Spread:
    return _spread([a - b for a, b in zip(times.loaded, times.own, strict=True)])


def _spread(milliseconds: list[float]) -> Spread:
    return Spread.of(milliseconds, lower_is_better=True)
