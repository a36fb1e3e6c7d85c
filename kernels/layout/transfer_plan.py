"""The pages of a move, decided and checked on the host before anything is launched.

`PageMap` says which pages hold the tokens of which block; lanes.py says which heads go where in a
block. Both are numpy, without loops over pages or tokens, and serve every kind of move: copies
(paged/gather_scatter.py) and conversions (quant/quantised_gather.py) use the same tables.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Self

import numpy as np

from ..errors import DeviceError, PageError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from .engine_cache import PagedCache


class PageMap:
    """Which pages hold the tokens of each of n blocks.

    `pages`: int64 [n, pages_per_block]; the `tokens[i]` tokens of a block fill its pages in order,
    from slot `first_slots[i]` of the first page on. Further ids in a row are ignored. Page ids are
    on the host (lists, numpy, CPU tensors): checking a CUDA tensor would make the host wait for all
    work that is queued on the device.

    Raises PageError for ids that are negative, for a slot that two tokens share (a page may be
    shared by two blocks that meet in it), and for rows with too few pages; DeviceError for ids on a
    device. `check_fits` checks whether a cache has these pages.
    """

    __slots__ = (
        "first_slots",
        "highest_page",
        "most_tokens",
        "page_tokens",
        "pages",
        "table",
        "tokens",
    )

    def __init__(
        self,
        pages: Any,
        *,
        page_tokens: int,
        tokens: Any = None,
        first_slots: Any = 0,
    ) -> None:
        ids = _host_ids("pages", pages)
        if ids.ndim != 2 or not ids.size:
            raise PageError(f"pages is [blocks, pages of a block], not of shape {ids.shape}")
        self.page_tokens = _positive("page_tokens", page_tokens)
        count, width = ids.shape
        # The kernels' table, one array that is copied once: first slots, tokens, then pages.
        self.table: NDArray[np.int64] = np.empty(count * (2 + width), np.int64)
        self.first_slots = self.table[:count]
        self.tokens = self.table[count : 2 * count]
        self.pages = self.table[2 * count :].reshape(count, width)
        self.first_slots[:] = _per_block("first_slots", first_slots, count)
        filled = width * self.page_tokens - self.first_slots if tokens is None else tokens
        self.tokens[:] = _per_block("tokens", filled, count)
        self.pages[:] = ids
        self.highest_page = self._check()
        self.most_tokens = int(self.tokens.max())
        for array in (self.table, self.first_slots, self.tokens, self.pages):
            array.flags.writeable = False

    def __len__(self) -> int:
        return len(self.pages)

    def __repr__(self) -> str:
        return (
            f"<PageMap: {len(self)} blocks, {int(self.tokens.sum())} tokens,"
            f" pages of {self.page_tokens}>"
        )

    @classmethod
    def of_sequence(
        cls,
        page_ids: Any,
        *,
        tokens: int,
        block_tokens: int,
        page_tokens: int,
        first_token: int = 0,
    ) -> Self:
        """Blocks of `block_tokens` of a sequence's tokens [first_token, first_token + tokens).

        `page_ids`: the sequence's page table, from its token 0 on. Blocks may begin in mid-page,
        and the last one may be short.
        """
        ids = _host_ids("page_ids", page_ids)
        if ids.ndim != 1:
            raise PageError(f"page_ids is a sequence's table, not of shape {ids.shape}")
        _positive("tokens", tokens), _positive("block_tokens", block_tokens)
        _positive("page_tokens", page_tokens)
        if first_token < 0:
            raise PageError(f"first_token is {first_token}")
        needed = -(-(first_token + tokens) // page_tokens)
        if needed > len(ids):
            raise PageError(
                f"tokens {first_token} to {first_token + tokens} need {needed} pages of"
                f" {page_tokens}; the table has {len(ids)}"
            )
        begins = first_token + np.arange(0, tokens, block_tokens)
        counts = np.full(len(begins), block_tokens)
        counts[-1] = first_token + tokens - begins[-1]
        first_pages, first_slots = np.divmod(begins, page_tokens)
        width = int(_pages_needed(first_slots, counts, page_tokens).max())
        columns = first_pages[:, None] + np.arange(width)
        return cls(
            ids[np.minimum(columns, needed - 1)],
            page_tokens=page_tokens,
            tokens=counts,
            first_slots=first_slots,
        )

    @classmethod
    def of_slots(cls, slot_mapping: Any, *, block_tokens: int, page_tokens: int) -> Self:
        """Blocks of consecutive tokens, each token at a slot of its own: vLLM's `slot_mapping`.

        A slot is `page * page_tokens + place in the page`. Tokens have to fill their pages in
        order, as for paged attention; for pools in which they lie anywhere, use page_tokens=1 and
        a cache of one-token pages. Raises PageError for tokens in another order, and for slots
        below 0 (padding).
        """
        slots = _host_ids("slot_mapping", slot_mapping)
        if slots.ndim != 1 or not slots.size:
            raise PageError(f"slot_mapping has one entry per token, not the shape {slots.shape}")
        _positive("block_tokens", block_tokens), _positive("page_tokens", page_tokens)
        if slots.min() < 0:
            at = int(slots.argmin())
            raise PageError(f"token {at} has slot {slots[at]}: leave padding out")
        begins = np.arange(0, len(slots), block_tokens)
        counts = np.minimum(block_tokens, len(slots) - begins)
        pages, places = np.divmod(slots, page_tokens)
        tokens = np.arange(len(slots))
        within = places[begins].repeat(counts) + tokens - begins.repeat(counts)
        columns, expected = np.divmod(within, page_tokens)
        table = np.zeros((len(begins), int(columns.max()) + 1), np.int64)
        rows = (tokens // block_tokens, columns)
        first = (expected == 0) | (tokens % block_tokens == 0)  # of a page in a block
        table[rows[0][first], columns[first]] = pages[first]
        wrong = (expected != places) | (table[rows] != pages)
        if wrong.any():
            at = int(wrong.argmax())
            raise PageError(
                f"token {at} has slot {slots[at]}, which does not follow the one before in a page"
                f" of {page_tokens}; one-token pages can lie anywhere"
            )
        return cls(table, page_tokens=page_tokens, tokens=counts, first_slots=places[begins])

    @classmethod
    def join(cls, maps: Sequence[PageMap]) -> Self:
        """The blocks of several maps, one after the other: many requests in one launch."""
        if not maps or len({one.page_tokens for one in maps}) != 1:
            raise PageError("maps that are joined are at least one, with pages of one size")
        width = max(one.pages.shape[1] for one in maps)
        pages = np.zeros((sum(map(len, maps)), width), np.int64)
        row = 0
        for one in maps:
            pages[row : row + len(one), : one.pages.shape[1]] = one.pages
            row += len(one)
        return cls(
            pages,
            page_tokens=maps[0].page_tokens,
            tokens=np.concatenate([one.tokens for one in maps]),
            first_slots=np.concatenate([one.first_slots for one in maps]),
        )

    def places(
        self, block: int, first: int, step: int = 1
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Page and slot of a block's tokens from `first` on, of every `step`th: int64 each."""
        tokens = np.arange(first, max(first, int(self.tokens[block])), step)
        columns, slots = np.divmod(self.first_slots[block] + tokens, self.page_tokens)
        return self.pages[block, columns], slots

    def check_fits(self, cache: PagedCache, tokens: int) -> None:
        """Raises PageError unless the cache has these pages and a block has room for the tokens."""
        if self.page_tokens != cache.page_tokens:
            raise PageError(
                f"a map of pages of {self.page_tokens} tokens; the cache's have {cache.page_tokens}"
            )
        if self.highest_page >= cache.pages:
            raise PageError(f"page {self.highest_page} of a cache of {cache.pages} pages")
        if self.most_tokens > tokens:
            raise PageError(f"{self.most_tokens} tokens for a block of {tokens}")

    def _check(self) -> int:
        """The highest page id; raises PageError for ids that no cache can have."""
        if self.first_slots.min() < 0 or self.first_slots.max() >= self.page_tokens:
            raise PageError(f"a first slot lies outside its page of {self.page_tokens} tokens")
        if self.tokens.min() < 1:
            raise PageError(f"block {int(self.tokens.argmin())} has {self.tokens.min()} tokens")
        needed = _pages_needed(self.first_slots, self.tokens, self.page_tokens)
        width = self.pages.shape[1]
        if needed.max() > width:
            at = int(needed.argmax())
            raise PageError(
                f"block {at}: {self.tokens[at]} tokens from slot {self.first_slots[at]} on need"
                f" {needed[at]} pages of {self.page_tokens}; it names {width}"
            )
        used: NDArray[np.int64] = self.pages
        if needed.min() == width:
            used = used.reshape(-1)
        else:
            used = used[np.arange(width) < needed[:, None]]
        if used.min() < 0:
            at = int(np.flatnonzero((self.pages < 0).any(axis=1))[0])
            raise PageError(f"block {at} names page {used.min()}")
        ordered = np.sort(used)
        if (ordered[1:] == ordered[:-1]).any():
            self._check_shared(needed)
        return int(ordered[-1])

    def _check_shared(self, needed: NDArray[np.int64]) -> None:
        """Raises PageError if two tokens share a slot; two blocks may share a page."""
        blocks, columns = np.nonzero(np.arange(self.pages.shape[1]) < needed[:, None])
        pages, size = self.pages[blocks, columns], self.page_tokens
        first, last = self.first_slots[blocks], (self.first_slots + self.tokens)[blocks]
        begins = pages * size + np.where(columns == 0, first, 0)
        ends = pages * size + np.minimum(size, last - columns * size)
        order = np.argsort(begins)
        clash = ends[order[:-1]] > begins[order[1:]]
        if clash.any():
            one, other = order[int(clash.argmax())], order[int(clash.argmax()) + 1]
            raise PageError(
                f"page {pages[one]} is named twice, by block {blocks[one]} and block"
                f" {blocks[other]}, for the same slots"
            )


def _pages_needed(
    first_slots: NDArray[np.int64], tokens: NDArray[np.int64], page_tokens: int
) -> NDArray[np.int64]:
    return -(-(first_slots + tokens) // page_tokens)


def _host_ids(what: str, ids: Any) -> NDArray[np.int64]:
    """Integers on the host as int64. Raises PageError, and DeviceError for a device's tensor."""
    device = getattr(ids, "device", None)
    if device is not None and str(device) != "cpu":
        raise DeviceError(
            f"{what} are on {device}: checking them there would stall the device; pass the host's"
            " copy, which the scheduler made them from"
        )
    try:
        array = np.asarray(ids)
    except ValueError as error:
        raise PageError(f"{what} is no array: {error}") from error
    if array.dtype.kind not in "iu" or array.dtype == np.uint64:
        raise PageError(f"{what} has integers, not {array.dtype}")
    return array.astype(np.int64, copy=False)


def _per_block(what: str, values: Any, count: int) -> NDArray[np.int64]:
    array = _host_ids(what, values)
    if array.ndim and array.shape != (count,):
        raise PageError(f"{what} has shape {array.shape}; there are {count} blocks")
    return array


def _positive(what: str, value: int) -> int:
    if value < 1:
        raise PageError(f"{what} is {value}")
    return int(value)
