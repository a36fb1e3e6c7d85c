"""Rows about the HBM store's verbs: whole blocks, by the host's clock, beside plain copies.

The pool is a node in this process; with a GPU the store pins its memory. All blocks of a call are
one prefix. On device `cpu` the tier is host memory, and every copy a memcpy: the rows then are the
cost of the store itself.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from tiffin.kvstore.client.client import Client
from tiffin.kvstore.hbm import HbmOptions, HbmStore

from ..store.rows import MICROSECONDS, Row, Side, rates, times
from ..store.setting import prefix_of, room_for, schema_of, size_text

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tiffin.kvstore.client.verbs.arguments import Verify
    from tiffin.kvstore.format.keys import Prefix

    from .setting import Setting

_TIMEOUT_S = 60.0
_LEASE_ROUNDS = 10  # rounds of leases per round of verbs that move bytes


@dataclass(frozen=True, slots=True)
class _Tier:
    """A store over a pool, and the plain copies that it is compared with."""

    setting: Setting
    store: HbmStore
    prefix: Prefix
    host: Any  # uint8 [bytes of all blocks], pinned if there is a GPU
    near: tuple[Any, Any]  # as many bytes on the device, twice

    @property
    def nbytes(self) -> int:
        return len(self.prefix) * self.prefix.schema.block_bytes

    @property
    def what(self) -> str:
        return f"{len(self.prefix)} blocks of {size_text(self.prefix.schema.block_bytes)}"

    def publish(self) -> None:
        """Publish all blocks with whatever bytes the memory has: only the store's own work."""
        with self.store.reserve(self.prefix) as slots:
            count = len(slots)
        if len(slots.stored) != len(self.prefix):
            raise ValueError(f"{count} slots, {len(slots.stored)} blocks stored: {slots!r}")

    def lease(self, verify: Verify) -> None:
        with self.store.lease(self.prefix, verify=verify) as blocks:
            _complete(blocks)

    def promote(self) -> None:
        with self.store.promote(self.prefix, timeout_s=_TIMEOUT_S) as blocks:
            _complete(blocks)

    def demote(self) -> None:
        saved = self.store.demote(self.prefix, timeout_s=_TIMEOUT_S)
        if saved.saved != len(self.prefix):
            raise ValueError(f"not all blocks went down: {saved}")

    def forget(self, *, pool: bool) -> None:
        """Remove the blocks from HBM, and if `pool` from the pool too. The memory is free once the
        streams have passed."""
        self.store.remove(self.prefix, pool=pool, timeout_s=_TIMEOUT_S)
        self.setting.machine.synchronise()
        self.store.statistics()

    def copy_near(self) -> None:
        self.near[0].copy_(self.near[1])
        self.setting.machine.synchronise()

    def copy_up(self) -> None:
        self.near[0].copy_(self.host, non_blocking=True)
        self.setting.machine.synchronise()

    def copy_down(self) -> None:
        self.host.copy_(self.near[0], non_blocking=True)
        self.setting.machine.synchronise()


@contextlib.contextmanager
def _tier(setting: Setting, checksum: Any = "xxh3_64_pages") -> Iterator[_Tier]:
    sizes, where = setting.sizes, setting.machine
    schema = replace(schema_of(sizes.block_bytes), checksum=checksum)
    prefix = prefix_of(schema, sizes.blocks)
    nbytes = sizes.blocks * schema.block_bytes
    setting.tell(f"{sizes.blocks} blocks of {size_text(schema.block_bytes)}")
    url = f"embedded:?dram={4 * room_for(schema, sizes.blocks)}"
    options = HbmOptions(write_back=False)
    with contextlib.ExitStack() as stack:
        client = stack.enter_context(Client.open(url, name="bench"))
        # Room for twice the blocks: those of the round before may not be free yet.
        store = HbmStore(client, schema, 2 * nbytes, str(where.device), options=options)
        stack.enter_context(store)
        store.tensor.copy_(where.bytes_of(store.tensor.numel()))
        near = where.bytes_of(nbytes), where.bytes_of(nbytes)
        yield _Tier(setting, store, prefix, where.pinned(nbytes), near)


def publish(setting: Setting) -> list[Row]:
    """`reserve` and commit of blocks that are already filled: checksums and bookkeeping."""
    with _tier(setting) as tier:
        forget = partial(tier.forget, pool=False)
        return _rows(tier, "publish", Side(tier.publish, forget), tier.copy_near, _near(setting))


def lease(setting: Setting) -> list[Row]:
    """`lease` of resident blocks, verified on the device, and not verified."""
    with _tier(setting) as tier:
        tier.publish()
        action = Side(partial(tier.lease, "always"))
        rows = _rows(tier, "lease-verified", action, tier.copy_near, _near(setting))
        sides = [Side(partial(tier.lease, "off")), Side(tier.copy_near)]
        rounds = _LEASE_ROUNDS * setting.sizes.rounds
        taken, copied = setting.machine.host_turns(sides, rounds=rounds)
        what = f"lease and release of {tier.what}, not verified; no byte moves"
        value, limit = (times(seconds, MICROSECONDS) for seconds in (taken, copied))
        return [*rows, Row("lease", what, "us", value, _near(setting), limit)]


def promote(setting: Setting) -> list[Row]:
    """Blocks of the pool copied into HBM, and verified there."""
    rows = []
    for checksum, name in (("xxh3_64_pages", "promote"), ("xxh3_64", "promote-rehashed")):
        with _tier(setting, checksum) as tier:
            tier.publish()
            tier.demote()
            forget = partial(tier.forget, pool=False)
            forget()
            found = _rows(tier, name, Side(tier.promote, forget), tier.copy_up, _link(setting))
        rows += [replace(row, what=f"{row.what}, schema of {checksum}") for row in found]
    return rows


def demote(setting: Setting) -> list[Row]:
    """Blocks of HBM copied into the pool, verified there and committed."""
    with _tier(setting) as tier:

        def again() -> None:
            tier.forget(pool=True)
            tier.publish()

        tier.publish()
        return _rows(tier, "demote", Side(tier.demote, again), tier.copy_down, _link(setting))


def _rows(
    tier: _Tier, name: str, side: Side, limit: Callable[[], None], limit_what: str
) -> list[Row]:
    """The rate, and the time per block. The host's clock is enough: the verb and its limit return
    when all is done."""
    setting = tier.setting
    sides = [side, Side(limit)]
    taken, copied = setting.machine.host_turns(sides, rounds=setting.sizes.rounds)
    count = len(tier.prefix)
    each, each_limit = (
        times([s / count for s in seconds], MICROSECONDS) for seconds in (taken, copied)
    )
    value, rate = (rates(seconds, tier.nbytes) for seconds in (taken, copied))
    what = f"{name} of {tier.what}"
    return [
        Row(name, what, "GB/s", value, limit_what, rate),
        Row(f"{name}-block", f"{what}, time per block", "us", each, limit_what, each_limit),
    ]


def _near(setting: Setting) -> str:
    return f"{setting.machine.copy_text}, waited for"


def _link(setting: Setting) -> str:
    if setting.machine.on_gpu:
        return "asynchronous copy between pinned memory and the device, waited for"
    return setting.machine.copy_text


def _complete(blocks: Any) -> None:
    if not blocks.complete:
        raise ValueError(f"not all blocks are there: {blocks!r}")
