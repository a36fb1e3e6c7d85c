"""Rows about readers: the time to the first layer, and the rate of many concurrent readers."""

from __future__ import annotations

import contextlib
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from tiffin.kvstore.client.blocks.block_views import select
from tiffin.kvstore.client.client import Client

from ..limits import touched
from ..store.rows import MILLISECONDS, Row, Side, Spread, Target, interleave, times
from ..store.setting import prefix_of, schema_of, size_text
from .transfer import GIGA, get, pair

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tiffin.kvstore.client.verbs.arguments import Verify
    from tiffin.kvstore.format.keys import Prefix

    from .setting import Setting

# The target for the first of 32 layers: twice its share of the whole, and 2 ms for the request.
_SHARE = 1 / 16
_SET_UP_S = 0.002
_TIMEOUT_S = 60.0


# -- the first layer -------------------------------------------------------------------------------


class _Progress:
    """Streams one block and records the seconds to its first layer, and to its end."""

    def __init__(self, client: Client, prefix: Prefix, verify: Verify) -> None:
        self._client = client
        self._prefix = prefix
        self._verify = verify
        self.first: list[float] = []
        self.whole: list[float] = []

    def __call__(self) -> None:
        """Stream one block."""
        start_s = time.perf_counter()
        layers = self._client.stream(self._prefix, verify=self._verify, timeout_s=_TIMEOUT_S)
        for layer in layers:
            if not layer.index:
                self.first.append(time.perf_counter() - start_s)
        self.whole.append(time.perf_counter() - start_s)


def first_layer(setting: Setting) -> list[Row]:
    """Time until layer 0 of a block can be used, while the other layers are still in flight."""
    block_bytes = setting.sizes.layered_block_bytes
    setting.tell(f"a block of {size_text(block_bytes)}")
    policies: tuple[Verify, ...] = ("off", "always")
    rounds = 3 * setting.sizes.rounds
    with pair(block_bytes, 1) as both:
        readers = [_Progress(both.client, both.prefix, verify) for verify in policies]
        interleave([Side(reader) for reader in readers], rounds=rounds)
    return [
        _layer_row(block_bytes, verify, reader.first[-rounds:], reader.whole[-rounds:])
        for verify, reader in zip(policies, readers, strict=True)
    ]


def _layer_row(block_bytes: int, verify: str, first: list[float], whole: list[float]) -> Row:
    layers = len(select(schema_of(block_bytes)).layers)
    return Row(
        name=f"first-layer{'-verified' if verify == 'always' else ''}",
        what=f"first of {layers} layers of a block of {size_text(block_bytes)} over TCP, "
        f"verify={verify}",
        unit="ms",
        value=times(first, MILLISECONDS),
        limit_what="a sixteenth of the whole block's time, and 2 ms",
        limit=times([s * _SHARE + _SET_UP_S for s in whole], MILLISECONDS),
        targets=(Target("ratio", "<=", 1),),
        note=f"the whole block: {np.median(whole) * MILLISECONDS:.3g} ms",
    )


# -- many readers ----------------------------------------------------------------------------------


@contextlib.contextmanager
def _clients(url: str, count: int) -> Iterator[list[Client]]:
    with contextlib.ExitStack() as stack:
        yield [
            stack.enter_context(Client.open(url, name=f"bench reader {number}"))
            for number in range(count)
        ]


def concurrent_readers(setting: Setting) -> list[Row]:
    """The rate at which one node serves 1, 2, 4 ... clients that read at the same time."""
    sizes = setting.sizes
    block_bytes = min(sizes.block_bytes)
    blocks = max(1, sizes.reader_bytes // block_bytes)
    most = max(sizes.readers)
    schema = schema_of(block_bytes)
    prefix = prefix_of(schema, blocks)
    with (
        pair(block_bytes, blocks) as both,
        _clients(both.node.url, most) as clients,
        ThreadPoolExecutor(most) as threads,
    ):
        targets = [[touched(block_bytes) for _ in range(blocks)] for _ in clients]

        def work(reader: int, gets: int) -> None:
            for _ in range(gets):
                get(clients[reader], prefix, targets[reader], "off")

        def all_read(count: int, gets: int) -> None:
            list(threads.map(partial(work, gets=gets), range(count)))

        shares = {count: _gets(setting, count, blocks * block_bytes) for count in sizes.readers}
        setting.tell(f"up to {most} readers of {size_text(blocks * block_bytes)}")
        sides = [Side(partial(all_read, count, gets)) for count, gets in shares.items()]
        seconds = interleave(sides, rounds=sizes.reader_rounds)
    spreads = {
        count: _rates(taken, count * gets * blocks * block_bytes)
        for (count, gets), taken in zip(shares.items(), seconds, strict=True)
    }
    peak = max(spreads.values(), key=lambda spread: spread.p50)
    return [
        Row(
            name=f"readers-{count}",
            what=f"{count} clients get(into=) {blocks} blocks of {size_text(block_bytes)} at a "
            "time from one node, together",
            unit="GB/s",
            value=spread,
            limit_what="the best of these rows",
            limit=peak,
            targets=(Target("ratio", ">=", 0.8),),
        )
        for count, spread in spreads.items()
    ]


def _gets(setting: Setting, count: int, nbytes: int) -> int:
    """How often each of `count` readers reads, so that all runs read the same number of bytes."""
    return max(1, setting.sizes.read_bytes // (count * nbytes))


def _rates(seconds: list[float], nbytes: int) -> Spread:
    return Spread.of([nbytes / s / GIGA for s in seconds], lower_is_better=False)
