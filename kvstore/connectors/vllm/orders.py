"""What the scheduler side tells the workers in each step, and what each worker reports.

Both are pickled: in vLLM's default mode the two sides are processes.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ...format.keys import Prefix


@dataclass(frozen=True, slots=True)
class LoadOrder:
    """Fill `pages` from the blocks of `prefix`, in order, without the first `skipped_pages` pages
    of the first block, which the engine has. `synchronous`: before this step's forward pass.
    `remote`: other nodes have blocks of it, so that their bytes come over the network."""

    request_id: str
    prefix: Prefix
    skipped_pages: int
    pages: tuple[int, ...]
    synchronous: bool
    remote: bool = False

    def parts(self, blocks: int, block_pages: int) -> Iterator[LoadOrder]:
        """The same as orders of at most `blocks` blocks of `block_pages` pages."""
        page = 0
        for first in range(0, len(self.prefix), blocks):
            prefix = self.prefix[first : first + blocks]
            skipped = self.skipped_pages if first == 0 else 0
            end = page + len(prefix) * block_pages - skipped
            yield replace(self, prefix=prefix, skipped_pages=skipped, pages=self.pages[page:end])
            page = end


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
    step has no forward pass."""

    step: int = 0
    idle: bool = False
    loads: list[LoadOrder] = field(default_factory=list)
    saves: list[SaveOrder] = field(default_factory=list)
    preempted: list[str] = field(default_factory=list)
    finished: list[str] = field(default_factory=list)


@dataclass(slots=True)
class StepReport:
    """What happened in one worker since its last report.

    `failed`: by request, the position in its prompt of the first block that could not be loaded.
    `tainted_pages`: pages that a step may have computed with although their load had failed.
    `ended_saves`: numbers of save orders that have ended, whether or not blocks were stored.
    """

    failed: dict[str, int] = field(default_factory=dict)
    tainted_pages: set[int] = field(default_factory=set)
    ended_saves: dict[int, int] = field(default_factory=dict)  # number: how many ranks ended it

    def __bool__(self) -> bool:
        return bool(self.failed or self.tainted_pages or self.ended_saves)

    def joined(self, other: StepReport) -> StepReport:
        """The report of two ranks together: a load has failed if any rank's has."""
        failed = dict(self.failed)
        for request_id, block in other.failed.items():
            failed[request_id] = min(block, failed.get(request_id, block))
        ended = dict(self.ended_saves)
        for number, ranks in other.ended_saves.items():
            ended[number] = ended.get(number, 0) + ranks
        return StepReport(failed, self.tainted_pages | other.tainted_pages, ended)
