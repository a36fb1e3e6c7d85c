"""Which part keys an engine holds: the first tokens of its pages, up to a block. Pure.

A page (`block_regrouper.py`) that begins a prompt, or is not full, has a start: the part keys
(`part_keys.py`) of its leading parts that are held. Prompts with the same system prompt have a page
each and share its keys, so keys are counted: the engine holds one as long as any page has it.

The keys of one engine are bounded. The oldest start is dropped first, and of its keys those that no
other start shares: a system prompt in use stays, the texts of single requests leave.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Generic, TypeVar

from ..state.part_keys import extend_part_keys, parts_of

if TYPE_CHECKING:
    from collections.abc import Callable

# Part keys of one engine: half a million tokens of prompts that share nothing, more than most
# engines hold. Some 200 bytes each here, and 130 in the index.
ENGINE_PARTS_MAX = 32_768

Page = TypeVar("Page")


@dataclass(slots=True)
class _Start:
    """The keys of a page's first parts; the leading `held` of them are held."""

    root: bytes
    keys: list[bytes] = field(default_factory=list)
    held: int = 0


class PromptStarts(Generic[Page]):
    """The starts of one engine, by page. Not thread-safe.

    Invariant: `_copies[key]` is the number of starts whose held keys include `key`, and not 0.
    """

    def __init__(
        self,
        block_tokens: int,
        follow: Callable[[bytes, bytes], bytes],
        keys_max: int = ENGINE_PARTS_MAX,
    ) -> None:
        self._block_tokens, self._follow, self._keys_max = block_tokens, follow, keys_max
        self._starts: dict[Page, _Start] = {}  # the oldest first
        self._copies: dict[bytes, int] = {}

    def __len__(self) -> int:
        return len(self._copies)

    def keys(self) -> list[bytes]:
        """All part keys that are held."""
        return list(self._copies)

    def hold(
        self, page: Page, root: bytes, tokens: bytes, held_tokens: int
    ) -> tuple[list[bytes], list[bytes]]:
        """Of a page's `tokens`, whose keys follow `root`, the leading `held_tokens` are held now.
        Returns the keys that the engine holds from now on, and those that it holds no longer."""
        count = parts_of(held_tokens, self._block_tokens)
        if not count:
            return [], self.forget(page)
        start = self._starts.get(page)
        if start is None:
            start = self._starts[page] = _Start(root)
        before, start.held = start.held, count
        if count < before:
            return [], self._release(start.keys[count:before])
        if count > len(start.keys):
            extend_part_keys(start.keys, count, start.root, tokens, self._follow)
        return [key for key in start.keys[before:count] if self._first(key)], []

    def forget(self, page: Page) -> list[bytes]:
        """A page is gone. Returns the keys that the engine holds no longer."""
        start = self._starts.pop(page, None)
        return [] if start is None else self._release(start.keys[: start.held])

    def evict(self) -> list[bytes]:
        """Drop the oldest starts while there are too many keys; returns these."""
        gone: list[bytes] = []
        while len(self._copies) > self._keys_max:
            gone += self.forget(next(iter(self._starts)))
        return gone

    def _first(self, key: bytes) -> bool:
        """Count one start more with this key; whether it is the first."""
        copies = self._copies.get(key, 0)
        self._copies[key] = copies + 1
        return not copies

    def _release(self, keys: list[bytes]) -> list[bytes]:
        """Count one start less with each of these keys; returns those without any."""
        gone = []
        for key in keys:
            copies = self._copies[key] - 1
            if copies:
                self._copies[key] = copies
            else:
                del self._copies[key]
                gone.append(key)
        return gone
