"""Regroups an engine's small blocks, known by the engine's hashes, into pool blocks and keys. Pure.

An engine publishes blocks of 16 tokens or so under hashes that only this engine understands, each
with its parent's hash. Pool blocks have 512 tokens, and their keys follow from the tokens and the
key before them (kvstore/format/keys.py). So the engine's blocks, here parts, are laid out in pages:

    page = up to 32 consecutive parts, from a boundary of pool blocks on: their hashes and tokens
    key  = H(key of the page before ‖ tokens), known once the page is full

A tier holds a key exactly while it holds all parts of the key's page. Prompts that diverge inside a
page have a page each, and the parts that they share are in both. Of a page that begins a prompt, or
is not full, the parts held in HBM have keys, too: a prefix may end within a block
(`prompt_starts.py`).

The behaviour of engines, and its consequences:

- Engines never announce re-used blocks again: a late subscriber receives events of deep blocks and
  never of the roots. Without the root there is no key; such parts wait, bounded, for their parent.
- The same hash can be stored several times, in several physical blocks, and each of them is removed
  with an event of its own. Copies are counted (`counts_copies`), or the first removal would hide
  the others.
- A removed hash may come back: its page remembers it as long as other parts of the page are held.
- Events may name parts without tokens (offloading connectors): these are the parts known by hash.
- Blocks that depend on more than tokens (images, salts) have no pool key; they are called foreign.
  Their hashes are remembered, so that their children do not wait for a parent.

Memory: some 200 bytes per part of 16 tokens, as `bench/conductor/index.py` measures.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

from tiffin.kvstore.format.keys import digest_of, root_key

from ..errors import InvalidRequest
from ..state.prefix_index import TIERS
from .prompt_starts import PromptStarts

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from tiffin.kvstore import KVSchema

TOKEN_BYTES = 4

# The most parts of one engine: 4 million tokens in parts of 16, some 50 MB. The oldest pages are
# evicted.
PARTS_MAX = 262_144

# Parts that wait for a parent, and for how long: a million tokens in parts of 16. An engine's live
# events come within milliseconds of each other, so this long is for the events of a replay.
WAITING_MAX = 65_536
WAITING_S = 60.0

# How many sizes of refused parts have a count of their own; an engine has one or two.
_SIZES_MAX = 8

# Remembered hashes of foreign parts: as many tokens, 100 bytes each.
FOREIGN_MAX = 65_536


@dataclass(frozen=True, slots=True)
class EngineChain:
    """Computes pool keys from tokens, for one model: `root` gives the key before the first block of
    a namespace, `follow` the key of `block_tokens` tokens after a key."""

    block_tokens: int
    root: Callable[[str], bytes]
    follow: Callable[[bytes, bytes], bytes]

    @classmethod
    def of(cls, schema: KVSchema, secret: bytes = b"") -> EngineChain:
        """The keys of the pool's blocks of this schema. Raises InvalidInput for a bad secret."""
        digest = digest_of(schema.hash, secret)
        return cls(
            schema.block_tokens,
            lambda namespace: root_key(schema, namespace, secret),
            lambda parent, tokens: digest(parent + tokens),
        )


@dataclass(frozen=True, slots=True)
class EngineStored:
    """The engine has these blocks of `part_tokens` tokens in a tier, each the child of the one
    before it; `parent` is the first block's parent, None at the start of a prompt.

    `tokens` are the blocks' tokens as little-endian uint32; empty if the event has none.
    `namespace` is None for blocks without a pool key.
    """

    hashes: Sequence[int]
    parent: int | None
    tokens: bytes
    part_tokens: int
    tier: str = "hbm"
    namespace: str | None = ""


@dataclass(frozen=True, slots=True)
class EngineRemoved:
    """The engine has removed these blocks from a tier. `copies`: how many other copies of each are
    left there, if the event has that."""

    hashes: Sequence[int]
    tier: str = "hbm"
    copies: Sequence[int] = ()


class Change(NamedTuple):
    """A tier now holds these keys (`added`), or no longer holds them; in the events' order.
    `parts`: they are part keys."""

    tier: str
    added: bool
    keys: list[bytes]
    parts: bool = False

    @property
    def kind(self) -> tuple[str, bool, bool]:
        return self.tier, self.added, self.parts


class _Changes(list[Change]):
    """Collects changes: consecutive ones of the same kind are merged. `touched` are the pages whose
    held parts may have changed: what becomes of their part keys is found out at the end, once for
    all parts."""

    def __init__(self) -> None:
        super().__init__()
        self.touched: dict[_Page, None] = {}

    def note(self, tier: int, added: bool, key: bytes) -> None:
        self._merge(Change(TIERS[tier], added, [key]))

    def note_parts(self, fresh: list[bytes], gone: list[bytes]) -> None:
        for added, keys in ((True, fresh), (False, gone)):
            if keys:
                self._merge(Change(TIERS[0], added, keys, parts=True))

    def _merge(self, one: Change) -> None:
        if self and self[-1].kind == one.kind:
            self[-1].keys.extend(one.keys)
        else:
            self.append(one)


class _Page:
    """Consecutive parts, the `first` ones of a prompt or later ones. `held` has a bit per part, for
    each of TIERS. `key` is None until the page is full. Compared by identity."""

    __slots__ = ("first", "hashes", "held", "key", "parent_key", "tokens")

    def __init__(self, parent_key: bytes, *, first: bool) -> None:
        self.parent_key, self.first = parent_key, first
        self.hashes: list[int] = []
        self.tokens = b""
        self.held = [0] * len(TIERS)
        self.key: bytes | None = None


_Pages: TypeAlias = "_Page | list[_Page]"


@dataclass(slots=True)
class _Waiting:
    """An event whose parent is not known yet; `gone` are its parts that were removed since."""

    event: EngineStored
    until: float
    gone: set[int] = field(default_factory=set)


@dataclass(slots=True)
class Counts:
    """Counts of parts that were not folded into keys, by reason."""

    unknown_parents: int = 0  # parts that came before their parent
    expired_parts: int = 0  # those of them whose parent did not come in time
    foreign_parts: int = 0  # parts without a pool key
    unknown_parts: int = 0  # named without tokens, and never seen
    refused_parts: int = 0  # of a size that does not divide the pool's blocks
    evicted_parts: int = 0  # of evicted pages


class Folder:
    """The pages of one engine; `starts` has its part keys. Not thread-safe.

    Invariants: `_parts[h]` are the pages that have h, and all of them are in `_pages`; a page
    exists while any of its parts is held in any tier; `waiting_parts` counts the parts in
    `_waiting`.
    """

    def __init__(
        self, chain: EngineChain, *, counts_copies: bool = True, parts_max: int = PARTS_MAX
    ) -> None:
        self.counts = Counts()
        self.refused_sizes: Counter[str] = Counter()  # `refused_parts`, by what they are
        self._chain = chain
        self._counts_copies = counts_copies
        self._parts_max = parts_max
        self.reset()

    def reset(self) -> None:
        """Forget everything: the engine's cache was cleared, or the engine has restarted."""
        self._part_tokens = 0
        self._page_parts = 0
        self._parts: dict[int, _Pages] = {}
        self._pages: dict[_Page, None] = {}  # a set in insertion order
        self.starts: PromptStarts[_Page] = PromptStarts(
            self._chain.block_tokens, self._chain.follow
        )
        self._copies: dict[tuple[int, int], int] = {}  # (hash, tier) -> copies beyond the first
        self._waiting: OrderedDict[int, list[_Waiting]] = OrderedDict()  # by parent
        self._waiting_for: dict[int, _Waiting] = {}  # by each of their own hashes
        self.waiting_parts = 0
        self._foreign: dict[int, None] = {}

    def __len__(self) -> int:
        """Parts that are held or remembered."""
        return len(self._parts)

    def keys(self, tier: str) -> list[bytes]:
        """All keys that are held in a tier."""
        at = TIERS.index(tier)
        return [page.key for page in self._pages if page.key is not None and self._full(page, at)]

    # -- events ------------------------------------------------------------------------------------

    def stored(self, event: EngineStored, now: float) -> list[Change]:
        """The changes of keys. A key that is held already may be reported again: that is
        idempotent.

        Raises InvalidRequest if tokens and hashes don't fit each other, or the tier is unknown.
        """
        self._check(event)
        changes = _Changes()
        self._expire(now)
        if not event.hashes:
            return changes
        if not event.tokens:
            self._named(event, changes)
            return self._with_starts(changes)
        if not self._fits(event.part_tokens):
            self._refuse(event)
            return changes
        ready = [_Waiting(event, now)]
        while ready:
            one = ready.pop()
            if self._place(one.event, now, changes):
                for part in sorted(one.gone & self._parts.keys()):
                    if part in self._parts:  # not forgotten with an earlier part's page
                        self._remove(part, TIERS.index(one.event.tier), None, changes)
                for part in one.event.hashes:
                    ready += self._take_waiting(part)
        self._evict(changes)
        return self._with_starts(changes)

    def removed(self, event: EngineRemoved) -> list[Change]:
        """The changes of keys; unknown hashes are ignored."""
        changes = _Changes()
        tier = TIERS.index(event.tier)
        copies: Sequence[int | None] = event.copies or [None] * len(event.hashes)
        for part, left in zip(event.hashes, copies, strict=False):
            if part in self._parts:
                self._remove(part, tier, left, changes)
                continue
            self._foreign.pop(part, None)
            waiting = self._waiting_for.get(part)
            if waiting is not None and waiting.event.tier == event.tier:
                waiting.gone.add(part)
        return self._with_starts(changes)

    # -- the pieces of `stored` --------------------------------------------------------------------

    def _check(self, event: EngineStored) -> None:
        if event.tier not in TIERS:
            raise InvalidRequest(f"no tier {event.tier!r}; there are {', '.join(TIERS)}")
        expected = len(event.hashes) * event.part_tokens * TOKEN_BYTES
        if event.tokens and (len(event.tokens) != expected or event.part_tokens < 1):
            raise InvalidRequest(
                f"{len(event.hashes)} blocks of {event.part_tokens} tokens with "
                f"{len(event.tokens) // TOKEN_BYTES} tokens: all tokens of all blocks are needed"
            )

    def _refuse(self, event: EngineStored) -> None:
        self.counts.refused_parts += len(event.hashes)
        what = f"blocks of {event.part_tokens} tokens, in a pool of {self._chain.block_tokens},"
        if what not in self.refused_sizes and len(self.refused_sizes) >= _SIZES_MAX:
            what = "blocks of other sizes"
        self.refused_sizes[what] += len(event.hashes)

    def _fits(self, part_tokens: int) -> bool:
        """Whether parts of this size divide a pool block; the first accepted size is the engine's
        only one."""
        if not self._part_tokens and self._chain.block_tokens % part_tokens == 0:
            self._part_tokens = part_tokens
            self._page_parts = self._chain.block_tokens // part_tokens
        return part_tokens == self._part_tokens

    def _named(self, event: EngineStored, changes: _Changes) -> None:
        tier = TIERS.index(event.tier)
        for part in event.hashes:
            if part in self._parts:
                self._hold(part, tier, changes)
            else:
                self.counts.unknown_parts += 1

    def _place(self, event: EngineStored, now: float, changes: _Changes) -> bool:
        """Append parts after their parents; False if they are foreign, or the parent is unknown."""
        parent, parts = event.parent, self._parts
        if event.namespace is None or parent in self._foreign:
            self._disown(event.hashes)
            return False
        if parent is not None and parent not in parts and event.hashes[0] not in parts:
            self._wait(event, parent, now)
            return False
        tier = TIERS.index(event.tier)
        nbytes = event.part_tokens * TOKEN_BYTES
        for at, part in enumerate(event.hashes):
            if part not in parts:
                tokens = event.tokens[at * nbytes : (at + 1) * nbytes]
                self._append(parent, part, tokens, event.namespace)
            self._hold(part, tier, changes)
            parent = part
        return True

    def _append(self, parent: int | None, part: int, tokens: bytes, namespace: str) -> None:
        page = self._page_after(parent, namespace)
        page.hashes.append(part)
        page.tokens += tokens
        self._parts[part] = page
        if len(page.hashes) == self._page_parts:
            page.key = self._chain.follow(page.parent_key, page.tokens)

    def _page_after(self, parent: int | None, namespace: str) -> _Page:
        """The page for the next part after `parent`: the page that ends with `parent`, a new page
        if that one is full, or a branch, a copy of the head of a page that continues otherwise."""
        if parent is None:
            return self._new_page(self._chain.root(namespace), first=True)
        pages = self._pages_of(parent)
        for page in pages:
            if page.hashes[-1] == parent:
                return page if page.key is None else self._new_page(page.key)
        page = pages[0]
        count = page.hashes.index(parent) + 1
        branch = self._new_page(page.parent_key, first=page.first)
        branch.hashes = page.hashes[:count]
        branch.tokens = page.tokens[: count * self._part_tokens * TOKEN_BYTES]
        branch.held = [bits & ((1 << count) - 1) for bits in page.held]
        for shared in branch.hashes:
            self._parts[shared] = [*self._pages_of(shared), branch]
        return branch

    def _new_page(self, parent_key: bytes, *, first: bool = False) -> _Page:
        page = _Page(parent_key, first=first)
        self._pages[page] = None
        return page

    def _pages_of(self, part: int) -> list[_Page]:
        pages = self._parts[part]
        return pages if isinstance(pages, list) else [pages]

    def _full(self, page: _Page, tier: int) -> bool:
        return page.held[tier] == (1 << self._page_parts) - 1

    def _hold(self, part: int, tier: int, changes: _Changes) -> None:
        pages = self._pages_of(part)
        again = False
        for page in pages:
            at = page.hashes.index(part)
            again = bool(page.held[tier] >> at & 1)
            page.held[tier] |= 1 << at
            # If all parts were held already, only the last part reports the page's key again.
            speaks = not again or at == self._page_parts - 1
            if speaks and page.key is not None and self._full(page, tier):
                changes.note(tier, True, page.key)
            changes.touched[page] = None
        if again and self._counts_copies:
            self._copies[part, tier] = self._copies.get((part, tier), 0) + 1

    # -- the pieces of `removed` -------------------------------------------------------------------

    def _remove(self, part: int, tier: int, left: int | None, changes: _Changes) -> None:
        others = self._copies.pop((part, tier), 0) if left is None else left
        if others > 0:
            if others > 1:
                self._copies[part, tier] = others - 1
            return
        for page in self._pages_of(part):
            was_full = page.key is not None and self._full(page, tier)
            page.held[tier] &= ~(1 << page.hashes.index(part))
            if was_full and not self._full(page, tier):
                assert page.key is not None
                changes.note(tier, False, page.key)
            changes.touched[page] = None
            if not any(page.held):
                self._forget(page, changes)

    def _forget(self, page: _Page, changes: _Changes) -> None:
        del self._pages[page]
        changes.touched.pop(page, None)
        changes.note_parts([], self.starts.forget(page))
        for part in page.hashes:
            pages = [other for other in self._pages_of(part) if other is not page]
            if not pages:
                del self._parts[part]
                for tier in range(len(TIERS)):
                    self._copies.pop((part, tier), None)
            else:
                self._parts[part] = pages[0] if len(pages) == 1 else pages

    def _evict(self, changes: _Changes) -> None:
        while len(self._parts) > self._parts_max:
            page = next(iter(self._pages))
            for tier in range(len(TIERS)):
                if page.key is not None and self._full(page, tier):
                    changes.note(tier, False, page.key)
            self.counts.evicted_parts += len(page.hashes)
            self._forget(page, changes)

    def _with_starts(self, changes: _Changes) -> list[Change]:
        """The changes of part keys added to those of blocks."""
        for page in changes.touched:
            held = page.held[0]
            leading = (held ^ (held + 1)).bit_length() - 1
            if leading == self._page_parts and not page.first:
                leading = 0  # it has its own key
            held_tokens = leading * self._part_tokens
            changes.note_parts(*self.starts.hold(page, page.parent_key, page.tokens, held_tokens))
        changes.note_parts([], self.starts.evict())
        return changes

    # -- parts whose parent is not known -----------------------------------------------------------

    def _wait(self, event: EngineStored, parent: int, now: float) -> None:
        self.counts.unknown_parents += len(event.hashes)
        waiting = _Waiting(event, now + WAITING_S)
        self._waiting.setdefault(parent, []).append(waiting)
        self.waiting_parts += len(event.hashes)
        for part in event.hashes:
            self._waiting_for[part] = waiting
        while self.waiting_parts > WAITING_MAX:
            self._give_up(next(iter(self._waiting)))

    def _take_waiting(self, parent: int) -> list[_Waiting]:
        """Remove and return the events that wait for this parent."""
        taken = self._waiting.pop(parent, [])
        for waiting in taken:
            self.waiting_parts -= len(waiting.event.hashes)
            for part in waiting.event.hashes:
                if self._waiting_for.get(part) is waiting:
                    del self._waiting_for[part]
        return taken

    def _give_up(self, parent: int) -> None:
        for waiting in self._take_waiting(parent):
            self.counts.expired_parts += len(waiting.event.hashes)

    def _expire(self, now: float) -> None:
        while self._waiting:
            parent, oldest = next(iter(self._waiting.items()))
            if oldest[0].until > now:
                break
            self._give_up(parent)

    def _disown(self, hashes: Sequence[int]) -> None:
        """Mark these parts as foreign, and the parts that wait for them too."""
        left = list(hashes)
        while left:
            part = left.pop()
            self._foreign[part] = None
            self.counts.foreign_parts += 1
            for waiting in self._take_waiting(part):
                left += waiting.event.hashes
        while len(self._foreign) > FOREIGN_MAX:
            del self._foreign[next(iter(self._foreign))]
