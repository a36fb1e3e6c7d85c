"""A pool of the model engine's blocks: a dictionary behind the interface that `WorkerSide` uses.

The content of a page is modelled, not stored: see `PageMemory`.
"""

from __future__ import annotations

import contextlib
import math
from concurrent.futures import Future
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from tiffin.kvstore import KVSchema
from tiffin.kvstore.client.blocks.block_places import BlockPlaces, RegionId
from tiffin.kvstore.connectors.vllm.held_leases import HeldBlocks
from tiffin.kvstore.errors import NodeUnavailable

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from random import Random

    from tiffin.kvstore import Prefix
    from tiffin.kvstore.connectors.vllm.pages.copier import PageLoad

PAGE, BLOCK = 4, 8  # tokens
BLOCK_PAGES = BLOCK // PAGE
SCHEMA = KVSchema.gqa(
    model="model", layers=1, kv_heads=2, head_dim=1, dtype="uint8", block_tokens=BLOCK
)
GARBAGE = -1


def content_of(tokens: Sequence[int]) -> list[int]:
    """The right content of each token's K and V: it depends on all tokens up to there."""
    found, before = [], 0
    for token in tokens:
        before = hash((before, token)) & 0xFFFFFFFFFFFF
        found.append(before)
    return found


class BrokenPromise(AssertionError):
    """An invariant that the connector promises to keep does not hold."""


class PageMemory:
    """The pages of one rank. A page is a list of its tokens' contents, right ones or GARBAGE."""

    pages = BLOCK_PAGES  # of a block, as `PageCopier.pages`
    block_bytes = 32 << 20  # so that loads from other nodes come in parts of two blocks
    layerwise_bytes = math.inf

    def __init__(self, count: int) -> None:
        self.content = [[GARBAGE] * PAGE for _ in range(count)]

    def scatter(self, blocks: Sequence[Any], pages: Sequence[int], skipped: int = 0) -> None:
        """See `PageCopier.scatter`."""
        loaded = [page for block in blocks for page in block][skipped:]
        for page, content in zip(pages, loaded, strict=False):
            self.content[page] = list(content)

    def scatter_layers(self, loads: Sequence[PageLoad]) -> Iterator[tuple[int, None]]:
        """See `PageCopier.scatter_layers`; there is one layer."""
        for load in loads:
            self.scatter(*load)
        yield 1, None

    def await_layers(self, event: None) -> None:
        """See `PageCopier.await_layers`."""

    def gather(self, blocks: Sequence[Any], pages: Sequence[int]) -> None:
        """See `PageCopier.gather`."""
        for index, block in enumerate(blocks):
            mine = pages[index * BLOCK_PAGES : (index + 1) * BLOCK_PAGES]
            block[:] = [list(self.content[page]) for page in mine]


class FakePool:
    """Blocks by key, one part per rank. It refuses content that is not the right one."""

    def __init__(self, ranks: int, random: Random, failures: float) -> None:
        self.random = random
        self.failures = failures
        self._ranks = ranks
        self._parts: dict[bytes, dict[int, Any]] = {}
        self.right: dict[bytes, list[int]] = {}  # every prompt's keys, and what belongs there
        self.broken: list[str] = []
        self.region = RegionId(0, 0)
        self.leased: dict[tuple[RegionId, int], dict[int, Any]] = {}  # by place: each rank's part
        self._offset = 0

    def expect(self, prefix: Prefix, tokens: Sequence[int]) -> None:
        """Note what the blocks of these tokens have to contain."""
        content = content_of(tokens)
        for index, key in enumerate(prefix.keys):
            self.right[key] = content[index * BLOCK : (index + 1) * BLOCK]

    def fill(self, tokens: Sequence[int]) -> None:
        """Store the blocks of these tokens, as another engine would."""
        prefix = SCHEMA.prefix(tokens)
        self.expect(prefix, tokens)
        for key in prefix.keys:
            right = self.right[key]
            pages = [right[at : at + PAGE] for at in range(0, BLOCK, PAGE)]
            self._parts[key] = dict.fromkeys(range(self._ranks), pages)

    def has(self, key: bytes) -> bool:
        """Whether all ranks have stored their parts."""
        return len(self._parts.get(key, ())) == self._ranks

    def hit(self, prefix: Prefix) -> int:
        """How many leading blocks are here."""
        found = (index for index, key in enumerate(prefix.keys) if not self.has(key))
        return next(found, len(prefix))

    def evict_one(self) -> None:
        """Forget some block."""
        if self._parts:
            del self._parts[self.random.choice(list(self._parts))]

    def lease(self, prefix: Prefix) -> HeldBlocks:
        """Hold the leading blocks, as `SchedulerSide._lease` does."""
        offsets = []
        for key in prefix.keys[: self.hit(prefix)]:
            self._offset += 1
            self.leased[self.region, self._offset] = dict(self._parts[key])
            offsets.append(self._offset)
        places = BlockPlaces(self.region, tuple(offsets), BLOCK)
        return HeldBlocks(FakeLease(self, places), places)  # type: ignore[arg-type]

    def restart(self) -> None:
        """As if the node were restarted: its memory is another, the old one is kept by readers."""
        self.region = RegionId(0, self.region.inode + 1)

    def fails(self) -> bool:
        return self.random.random() < self.failures

    def store(self, rank: int, key: bytes, pages: list[list[int]]) -> None:
        """Store one rank's part; note in `broken` if its content is not the right one."""
        content = [token for page in pages for token in page]
        if content != self.right.get(key):
            self.broken.append(f"stored {content}, right is {self.right.get(key)}")
        self._parts.setdefault(key, {})[rank] = pages

    def part(self, rank: int, key: bytes) -> Any:
        return self._parts[key][rank]


class FakeLease:
    def __init__(self, pool: FakePool, places: BlockPlaces) -> None:
        self._pool = pool
        self._places = [(places.region, offset) for offset in places.offsets]
        self._released = False

    def release(self) -> None:
        """The memory is anybody's from now on."""
        assert not self._released, "a lease was released twice"
        self._released = True
        for place in self._places:
            del self._pool.leased[place]


class FakeRegion:
    """One rank's mapping of the memory of a node."""

    def __init__(self, pool: FakePool, rank: int) -> None:
        self.identity = pool.region
        self._pool = pool
        self._rank = rank

    def views(self, places: BlockPlaces) -> list[Any]:
        """See `MappedRegion.views`; GARBAGE where there is no lease."""
        assert places.region == self.identity
        garbage = dict.fromkeys([self._rank], [[GARBAGE] * PAGE] * BLOCK_PAGES)
        found = [self._pool.leased.get((places.region, at), garbage) for at in places.offsets]
        return [parts[self._rank] for parts in found]


class FakeLink:
    """In place of `PoolLink`, and the client that it passes: one rank's view of the pool."""

    def __init__(self, pool: FakePool, rank: int) -> None:
        self._pool = pool
        self._rank = rank

    def call(self, action: Callable[[Any], Any], wait_s: float = 0.0) -> Any:
        if self._pool.fails():
            raise NodeUnavailable("no answer")
        return action(self)

    def region(self) -> FakeRegion | None:
        return None if self._pool.fails() else FakeRegion(self._pool, self._rank)

    def close(self) -> None:
        pass

    @contextlib.contextmanager
    def get(self, prefix: Prefix, **_: Any) -> Iterator[Any]:
        """As `Client.get`: the leading blocks, fewer if one is damaged."""
        count = self._pool.hit(prefix)
        if count and self._pool.fails():
            count = self._pool.random.randrange(count)
        parts = [self._pool.part(self._rank, key) for key in prefix.keys[:count]]
        yield FakeBlocks(parts, complete=count == len(prefix))

    def reserve(self, prefix: Prefix, **_: Any) -> FakeSlots:
        """As `Client.reserve`: slots of the blocks that the pool lacks."""
        return FakeSlots(self._pool, self._rank, prefix)


class FakeBlocks:
    reason = "miss"

    def __init__(self, parts: list[Any], *, complete: bool) -> None:
        self._parts = parts
        self.complete = complete

    def __len__(self) -> int:
        return len(self._parts)

    def __getitem__(self, index: int) -> Any:
        return SimpleNamespace(memory=self._parts[index])


class FakeSlots:
    def __init__(self, pool: FakePool, rank: int, prefix: Prefix) -> None:
        self._pool = pool
        self._rank = rank
        self._slots = [
            SimpleNamespace(index=index, view=[], key=key)
            for index, key in enumerate(prefix.keys)
            if not pool.has(key)
        ]

    def __iter__(self) -> Iterator[Any]:
        return iter(self._slots)

    def abort(self) -> None:
        self._slots = []

    def commit(self) -> None:
        for slot in self._slots:
            self._pool.store(self._rank, slot.key, slot.view)
        self.stored = tuple(slot.index for slot in self._slots)


class SteppedExecutor:
    """In place of `ThreadPoolExecutor`: tasks run when the test says so, in their order."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self._tasks: list[tuple[Future[Any], Callable[..., Any], tuple[Any, ...]]] = []

    def submit(self, task: Callable[..., Any], *arguments: Any) -> Future[Any]:
        future: Future[Any] = Future()
        self._tasks.append((future, task, arguments))
        return future

    def __len__(self) -> int:
        return len(self._tasks)

    def run_one(self) -> None:
        future, task, arguments = self._tasks.pop(0)
        future.set_result(task(*arguments))

    def shutdown(self, **_: Any) -> None:
        pass
