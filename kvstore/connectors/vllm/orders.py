"""What the scheduler side tells the workers in each step, and what each worker reports.

Both are pickled: in vLLM's default mode the two sides are processes.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ...client.blocks.block_places import BlockPlaces, RegionId
    from ...format.keys import Prefix


@dataclass(frozen=True, slots=True)
class LoadOrder:
    """Fill `pages` from the blocks of `prefix`, in order, without the first `skipped_pages` pages
    of the first block, which the engine has. `number` is unique.

    `held`: where the blocks lie in this host's memory, if the scheduler side has leased and
    verified them: it keeps the lease until all workers report the end of the load, which can't
    fail. `synchronous`: before this step's forward pass; only what is held. `remote`: other nodes
    have blocks of it, so that their bytes come over the network. `streamed`: another engine is
    writing them, at the node with the number `node` if that is known."""

    number: int
    request_id: str
    prefix: Prefix
    skipped_pages: int
    pages: tuple[int, ...]
    held: BlockPlaces | None = None
    synchronous: bool = False
    remote: bool = False
    streamed: bool = False
    node: int | None = None

    def parts(self, blocks: int, block_pages: int) -> Iterator[LoadOrder]:
        """The same as orders of at most `blocks` blocks of `block_pages` pages."""
        page = 0
        for first in range(0, len(self.prefix), blocks):
            prefix = self.prefix[first : first + blocks]
            skipped = self.skipped_pages if first == 0 else 0
            end = page + len(prefix) * block_pages - skipped
            yield replace(self, prefix=prefix, skipped_pages=skipped, pages=self.pages[page:end])
            page = end

    def rest(self, blocks: int, block_pages: int) -> LoadOrder:
        """The same without the first `blocks` blocks of `block_pages` pages."""
        if not blocks:
            return self
        page = blocks * block_pages - self.skipped_pages
        held = self.held.part(blocks, len(self.held)) if self.held is not None else None
        prefix, pages = self.prefix[blocks:], self.pages[page:]
        return replace(self, prefix=prefix, skipped_pages=0, pages=pages, held=held)


@dataclass(frozen=True, slots=True)
class SaveOrder:
    """Store the blocks of `prefix`, whose tokens are in `pages`, in order. `number` is unique."""

    number: int
    request_id: str
    prefix: Prefix
    pages: tuple[int, ...]


@dataclass(slots=True)
class StepOrders:
    """The orders of one step. `preempted`: requests whose pages the engine may overwrite in this
    step, so saves from them must have been copied, or be given up, before. `finished`: requests
    whose pages the engine keeps until the worker reports that their saves have ended. `idle`: the
    step has no forward pass. `left_regions`: memory in which no blocks will be held any more, of
    nodes that are gone. `layer_saves`: blocks that this step's forward pass completes, to be saved
    layer by layer; `reset`: the loads of earlier steps are of blocks that are not valid any more;
    `confirmed`, `given_up`: numbers of such saves of earlier steps, which are to be
    stored, or not."""

    step: int = 0
    idle: bool = False
    loads: list[LoadOrder] = field(default_factory=list)
    saves: list[SaveOrder] = field(default_factory=list)
    preempted: list[str] = field(default_factory=list)
    finished: list[str] = field(default_factory=list)
    left_regions: list[RegionId] = field(default_factory=list)
    layer_saves: list[SaveOrder] = field(default_factory=list)
    confirmed: list[int] = field(default_factory=list)
    given_up: list[int] = field(default_factory=list)
    reset: bool = False


@dataclass(slots=True)
class StepReport:
    """What happened in one worker since its last report, or in several workers.

    `failed`: by request, the position in its prompt of the first block that could not be loaded.
    `ended_saves`: numbers of save orders that have ended, whether or not blocks were stored;
    `failed_saves`: those of them that have left blocks unstored.
    `ended_loads`: those of load orders with held blocks. `mapped`: memory of nodes of this host
    that can be read now. Those that count say how many workers report it.
    """

    failed: dict[str, int] = field(default_factory=dict)
    ended_saves: Counter[int] = field(default_factory=Counter)
    ended_loads: Counter[int] = field(default_factory=Counter)
    mapped: Counter[RegionId] = field(default_factory=Counter)
    failed_saves: frozenset[int] = frozenset()

    def __bool__(self) -> bool:
        return bool(self.failed or self.ended_saves or self.ended_loads or self.mapped)

    def joined(self, other: StepReport) -> StepReport:
        """The report of two ranks together: a load has failed if any rank's has."""
        failed = dict(self.failed)
        for request_id, block in other.failed.items():
            failed[request_id] = min(block, failed.get(request_id, block))
        return StepReport(
            failed,
            self.ended_saves + other.ended_saves,
            self.ended_loads + other.ended_loads,
            self.mapped + other.mapped,
            self.failed_saves | other.failed_saves,
        )
