"""Exceptions from signal handlers, at random times in the calls of an HBM tier's store.

On device `cpu`, in front of a node in this process and of a node over its socket, in turns.
Afterwards no use of the tier's memory may be held, the core's invariants hold, reads return the
right bytes, and the store can be opened, used and closed again.
"""

from __future__ import annotations

import contextlib
import gc
import time
from typing import TYPE_CHECKING, Any

from kvsupport import wait_until

from tiffin.kvstore import Client
from tiffin.kvstore.hbm import HbmOptions, HbmStore
from tiffin.kvstore.memory.arena import GRANULE_BYTES
from tiffin.kvstore.node.node import Node, NodeOptions

from .interrupts import EXPECTED, LOOK_EVERY, TIMEOUT_S, Campaign, payloads_of
from .world import DRAM_BLOCKS, SCHEMA, SETTLE_S, Broken, Late, check_at_rest, check_bytes

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from tiffin.kvstore import Prefix
    from tiffin.kvstore.hbm import HbmBlock

# The requested blocks never fit here either, and demotions are nearly always due.
HBM_BLOCKS = 6
OPTIONS = HbmOptions(high_watermark=0.5, low_watermark=0.3)


class HbmCampaign(Campaign):
    """Stores, one after the other."""

    def start(self) -> None:
        """Start both nodes, and use one store without interrupts: threads and files that it leaves
        are allowed."""
        super().start()
        self._node = Node(NodeOptions(DRAM_BLOCKS * SCHEMA.extent_bytes, prefault=False))
        self._stack.callback(self._node.close)
        with self.client() as client, self.store(client) as store:
            self.store_used_again(client, store)

    def numbers(self) -> Iterator[dict[str, Any]]:
        """The statistics of both nodes."""
        assert self._node is not None
        yield self._node.statistics()
        for monitor in self._monitors:
            yield monitor.statistics()

    def client(self) -> Client:
        """A client of one of the nodes."""
        assert self._node is not None
        if self.dice.randrange(2):
            return Client.attach(self._node, name="campaign")
        return Client.open(f"unix:{self._nodes[0].socket}", name="campaign")

    def store(self, client: Client) -> HbmStore:
        """A new store."""
        nbytes = HBM_BLOCKS * GRANULE_BYTES  # a block is smaller
        return HbmStore(client, SCHEMA, nbytes, "cpu", options=OPTIONS)

    def client_of(self, number: int) -> None:
        """One client and its store, from its opening to its end."""
        until = self.report.interrupts + number
        with self.client() as client:
            stores: list[HbmStore] = []
            while not stores:
                self.interrupt("open", lambda: stores.append(self.store(client)))
            (store,) = stores
            try:
                while self.report.interrupts < until:
                    name = self.dice.choice(list(CALLS))
                    if self.interrupt(name, lambda n=name: CALLS[n](self, store)):
                        self.store_used_again(client, store)
                        if not self.report.interrupts % LOOK_EVERY:
                            self.check_store(store)
                self.check_store(store)
            finally:
                while self.interrupt("close", store.close):
                    pass

    def check_store(self, store: HbmStore) -> None:
        """Nothing of the store is held, nor of the pool through it, and nothing was lost."""
        gc.collect()
        found: list[dict[str, Any]] = []

        def quiet() -> bool:
            found[:] = [store.statistics()]
            kinds = ("uses", "saving_blocks", "reserved_bytes", "quarantined_bytes")
            return not any(found[0][kind] for kind in kinds)

        try:
            wait_until(quiet, "no use of the tier's memory is held", SETTLE_S)
        except AssertionError as error:
            raise Broken(f"{error}: {found}") from None
        if found[0]["free_bytes"] + found[0]["committed_bytes"] != found[0]["capacity_bytes"]:
            raise Broken(f"the tier is not conserved: {found}")
        store.check()
        check_at_rest(self.numbers)

    def store_used_again(self, client: Client, store: HbmStore) -> None:
        """The store answers in time, with the right bytes."""
        prefix = self.dice.choice(self.prompts)
        began = time.monotonic()
        with contextlib.suppress(*EXPECTED):
            client.put(prefix, payloads_of(prefix), timeout_s=TIMEOUT_S)
        with store.promote(prefix, timeout_s=TIMEOUT_S) as blocks:
            self.right_tensors(blocks, prefix)
        with contextlib.suppress(*EXPECTED):
            write(store, self.some())
        if time.monotonic() - began > 2 * TIMEOUT_S + 2.0:
            raise Late("a store that was interrupted does not answer in time")

    def right_tensors(self, blocks: Sequence[HbmBlock], prefix: Prefix) -> None:
        """Every block has the bytes of its key."""
        self.report.gets += 1
        for block, key in zip(blocks, prefix.keys, strict=False):
            check_bytes(block.tensor.numpy(), key)
            self.report.checked_blocks += 1


# -- calls -----------------------------------------------------------------------------------------


def fill(slots: Any, prefix: Prefix) -> None:
    """Write the right bytes into every slot."""
    import torch

    payloads = payloads_of(prefix)
    for slot in slots:
        slot.tensor.copy_(torch.from_numpy(payloads[slot.index]))


def write(store: HbmStore, prefix: Prefix) -> None:
    """Publish the missing blocks of a prefix."""
    with store.reserve(prefix) as slots:
        fill(slots, prefix)


def _commit(run: HbmCampaign, store: HbmStore) -> None:
    prefix = run.some()
    slots = store.reserve(prefix, timeout_s=0.05)
    fill(slots, prefix)
    slots.commit()


def _lease(run: HbmCampaign, store: HbmStore) -> None:
    prefix = run.some()
    with store.lease(prefix) as blocks:
        run.right_tensors(blocks, prefix)


def _promote(run: HbmCampaign, store: HbmStore) -> None:
    prefix = run.some()
    with store.promote(prefix, timeout_s=TIMEOUT_S) as blocks:
        run.right_tensors(blocks, prefix)


def _release(run: HbmCampaign, store: HbmStore) -> None:
    store.promote(run.some(), timeout_s=TIMEOUT_S).release()


def _view(run: HbmCampaign, store: HbmStore) -> None:
    """The memory of a view is not reused, even if the result that it came from is gone."""
    prefix = run.some()
    views = [block.tensor[:] for block in store.promote(prefix, timeout_s=TIMEOUT_S)]
    for _ in range(2):
        with contextlib.suppress(*EXPECTED):
            write(store, run.some())
    for view, key in zip(views, prefix.keys, strict=False):
        check_bytes(view.numpy(), key)


CALLS: dict[str, Callable[[HbmCampaign, HbmStore], Any]] = {
    "reserve": lambda run, store: write(store, run.some()),
    "commit": _commit,
    "abort": lambda run, store: store.reserve(run.some()).abort(),
    "lease": _lease,
    "promote": _promote,
    "release": _release,
    "view": _view,
    "demote": lambda run, store: store.demote(run.some(), timeout_s=TIMEOUT_S),
    "match": lambda run, store: store.match(run.some()),
    "pin": lambda run, store: store.pin(run.some(), ttl_s=0.05),
    "unpin": lambda run, store: store.unpin(run.some()),
    "remove": lambda run, store: store.remove(run.some(), timeout_s=TIMEOUT_S),
    "statistics": lambda run, store: store.statistics(),
}
