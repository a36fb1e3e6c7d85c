"""Saves that go layer by layer, while the engine computes the blocks.

The engine's thread only notes that a layer is computed. A thread of its own reserves the blocks,
copies the layer's pages and publishes it, so that others can read it; what it has not done when the
step ends, it does behind it, as nobody writes these pages before they are drained. When the blocks
are confirmed, it commits them; what it could not reserve or publish is saved as whole blocks then.
"""

from __future__ import annotations

import contextlib
import logging
import time
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

from ....errors import TiffinError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from ....client.client import Client
    from ....client.verbs.slots import Slots
    from ..pages.copier import EngineCopier
    from ..pool_link import PoolLink
    from ..save import Save
    from ..transfer_counters import TransferCounters

log = logging.getLogger(__name__)

# How long the thread waits for room: other saves are behind it, and what gets none is saved once it
# is confirmed.
_RESERVE_S = 1.0


class LayerSave:
    """One save that goes layer by layer. `slots`: its reservation, while it can still be committed.
    `settled`: whether it was confirmed or given up. `ended`: done once it is stored, or is not."""

    def __init__(self, save: Save) -> None:
        self.save = save
        self.slots: Slots | None = None
        self.settled = False
        self.ended: Future[None] = Future()


class LayerSaves:
    """The saves by layer of one worker. Methods are called by the engine's thread only.

    `options`: of `Client.reserve`; None for a worker that writes nothing. `save_whole`: stores what
    of a save the pool lacks, and returns when that has ended; called in the publishing thread.
    """

    def __init__(
        self,
        link: PoolLink,
        counters: TransferCounters,
        options: dict[str, Any] | None,
        timeout_s: float,
        save_whole: Callable[[Save], None],
    ) -> None:
        self._link = link
        self._counters = counters
        self._options = options
        self._timeout_s = timeout_s
        self._save_whole = save_whole
        self._publisher = ThreadPoolExecutor(1, thread_name_prefix="tiffin-publish")
        self._copier: EngineCopier | None = None
        self._open: dict[int, LayerSave] = {}
        self._step: list[LayerSave] = []
        self._left: dict[int, None] = {}  # layers that the step has not computed, in order

    def begin(self, saves: Sequence[Save], copier: EngineCopier | None) -> list[LayerSave]:
        """A step begins that completes the blocks of these saves."""
        self._copier = copier
        self._step = [LayerSave(save) for save in saves]
        layers = len(saves[0].order.prefix.schema.layers) if saves else 0
        self._left = dict.fromkeys(range(layers))
        for one in self._step:
            self._open[one.save.order.number] = one
            self._publisher.submit(self._reserve, one)
        return self._step

    def computed(self, layer: int) -> None:
        """The step has computed this layer, or launched it on the device."""
        if layer not in self._left:  # as in most steps
            return
        del self._left[layer]
        assert self._copier is not None
        self._publisher.submit(self._publish, self._step, layer, self._copier.mark())

    def end_step(self) -> None:
        """The step has computed all layers."""
        for layer in tuple(self._left):
            self.computed(layer)
        self._step = []

    def confirm(self, numbers: Iterable[int]) -> None:
        """What these saves have written is right: store it."""
        for number in numbers:
            one = self._settle(number)
            self._publisher.submit(self._store, one)

    def give_up(self, numbers: Iterable[int]) -> None:
        """Store nothing of these saves. Returns when their pages are not read any more."""
        for number in numbers:
            one = self._settle(number)
            one.save.drain()
            self._publisher.submit(self._end, one)

    def _settle(self, number: int) -> LayerSave:
        one = self._open.pop(number)
        one.settled = True
        return one

    def give_up_all(self) -> None:
        """`give_up` what is not confirmed."""
        self.give_up(tuple(self._open))

    def close(self) -> None:
        """End the thread, at most a message later: all pages are drained."""
        self._publisher.shutdown(wait=True, cancel_futures=True)

    # -- in the publishing thread; raise nothing ---------------------------------------------------

    def _reserve(self, one: LayerSave) -> None:
        prefix, timeout_s = one.save.order.prefix, min(_RESERVE_S, self._timeout_s)
        options = self._options
        if options is None or one.settled:  # too late: nobody needs to wait for its layers
            return

        def reserve(client: Client) -> Slots:
            return client.reserve(prefix, by_layer=True, timeout_s=timeout_s, **options)

        with self._failing(one):
            one.slots = self._link.call(reserve)

    def _publish(self, saves: list[LayerSave], layer: int, computed: Any) -> None:
        for one in saves:
            if one.slots:  # none if others have the blocks
                with self._failing(one):
                    self._publish_one(one, one.slots, layer, computed)

    def _publish_one(self, one: LayerSave, slots: Slots, layer: int, computed: Any) -> None:
        assert self._copier is not None
        if not one.save.begin_copy():
            self._abort(one)
            return
        try:
            pages = one.save.pages_of([slot.index for slot in slots], self._copier.pages)
            self._copier.gather_layer(layer, [slot.view for slot in slots], pages, computed)
        finally:
            one.save.end_copy()
        self._link.call(lambda _: slots.publish(layer, timeout_s=self._timeout_s))
        name = one.save.order.request_id
        log.debug("%s: layer %d of %d blocks published", name, layer, len(slots))

    def _store(self, one: LayerSave) -> None:
        """Commit, and save what is not stored then as whole blocks."""
        there: set[int] = set()
        slots = one.slots
        if slots is not None:
            with self._failing(one):
                self._link.call(lambda _: slots.commit())
                one.slots = None
                tokens = len(slots.stored) * slots.prefix.schema.block_tokens
                self._counters.add("saved_tokens", tokens)
                there = {*slots.stored, *slots.pending, *slots.resident}
        if len(there) < len(one.save.order.prefix):
            self._save_whole(one.save)
        self._end(one)

    def _end(self, one: LayerSave) -> None:
        self._abort(one)
        one.save.drain()
        one.ended.set_result(None)

    def _abort(self, one: LayerSave) -> None:
        """Give the reservation back, if there is one: who reads it learns that."""
        slots, one.slots = one.slots, None
        if slots is not None:
            with contextlib.suppress(TiffinError):
                slots.abort()

    @contextlib.contextmanager
    def _failing(self, one: LayerSave) -> Iterator[None]:
        """What fails ends the reservation: the blocks are saved whole, once they are confirmed."""
        began = time.monotonic()
        try:
            yield
        except Exception as error:
            expected = isinstance(error, TiffinError)
            request_id = one.save.order.request_id
            log.log(
                logging.DEBUG if expected else logging.ERROR,
                "%s: not saved by layer: %s",
                request_id,
                error,
                exc_info=not expected,
            )
            self._counters.add("save_failures", label=type(error).__name__)
            self._abort(one)
        finally:
            self._counters.add("save_seconds", time.monotonic() - began)
