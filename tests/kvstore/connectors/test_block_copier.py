"""Copies of blocks between a cache and host memory: layout, stages, pinned memory or not."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from tiffin.kernels.errors import KernelError  # noqa: E402
from tiffin.kernels.layout.engine_cache import PagedCache  # noqa: E402
from tiffin.kernels.layout.transfer_plan import PageMap  # noqa: E402
from tiffin.kvstore import Client, KVSchema  # noqa: E402
from tiffin.kvstore.connectors import block_copier, cache_transfer  # noqa: E402
from tiffin.kvstore.connectors.block_copier import BlockMover  # noqa: E402
from tiffin.kvstore.connectors.cache_transfer import Carrier  # noqa: E402
from tiffin.kvstore.connectors.kernel_tables import (  # noqa: E402
    layout_of,
    quantised_layout_of,
)
from tiffin.kvstore.errors import NodeUnavailable, TierUnavailable  # noqa: E402
from tiffin.kvstore.hbm.device import host_pinning  # noqa: E402
from tiffin.messenger.errors import MessengerError  # noqa: E402

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tiffin.kvstore import Prefix

LAYERS, HEADS, DIM, TOKENS, BLOCKS = 2, 3, 4, 8, 5
SCHEMA = KVSchema.gqa(
    model="m",
    layers=LAYERS,
    kv_heads=HEADS,
    head_dim=DIM,
    dtype="bfloat16",
    block_tokens=TOKENS,
)
PAGES = PageMap.of_sequence(
    [0], tokens=BLOCKS * TOKENS, block_tokens=TOKENS, page_tokens=BLOCKS * TOKENS
)


def filled(seed: int = 0) -> tuple[PagedCache, list[Any]]:
    """A cache of one page, and its K and V, [1, heads, tokens, dim] each."""
    torch.manual_seed(seed)
    tensors = [
        torch.randn(1, HEADS, BLOCKS * TOKENS, DIM).to(torch.bfloat16) for _ in range(2 * LAYERS)
    ]
    return PagedCache.contiguous(tensors[::2], tensors[1::2]), tensors


def expected(tensors: list[Any]) -> list[bytes]:
    """The blocks, by the definition of their order: layer, part, head, token, dim."""
    return [
        b"".join(
            tensor[0, head, block * TOKENS : (block + 1) * TOKENS]
            .view(torch.uint8)
            .numpy()
            .tobytes()
            for tensor in tensors
            for head in range(HEADS)
        )
        for block in range(BLOCKS)
    ]


def arrays() -> list[Any]:
    return [np.full(SCHEMA.block_bytes, 0xEE, np.uint8) for _ in range(BLOCKS)]


@pytest.fixture
def mover() -> Iterator[BlockMover]:
    one = BlockMover(SCHEMA, "cpu")
    yield one
    one.close()


@pytest.fixture(params=["direct", "staged", "mixed"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """A CPU can address all blocks; here some count as not addressable by the device."""
    reached = {"direct": lambda _: True, "staged": lambda _: False}
    firsts: list[int] = []

    def mixed(block: Any) -> bool:
        if block.ctypes.data not in firsts:
            firsts.append(block.ctypes.data)
        return firsts.index(block.ctypes.data) < 2

    name = str(request.param)
    chosen = reached.get(name, mixed)
    monkeypatch.setattr(BlockMover, "_reaches", lambda _, block: chosen(block))
    monkeypatch.setattr(block_copier, "STAGE_BYTES", 2 * SCHEMA.block_bytes)  # several stages
    return name


def test_blocks_have_the_pools_order(mover: BlockMover, way: str) -> None:
    cache, tensors = filled()
    blocks = arrays()
    mover.gather(cache, PAGES, blocks)
    assert [block.tobytes() for block in blocks] == expected(tensors)


def test_they_come_back_as_they_were(mover: BlockMover, way: str) -> None:
    cache, tensors = filled()
    blocks = arrays()
    mover.gather(cache, PAGES, blocks)
    for block in blocks:
        block.flags.writeable = False  # as leased ones are
    other, found = filled(seed=1)
    mover.scatter(other, PAGES, blocks)
    assert all(torch.equal(a, b) for a, b in zip(tensors, found, strict=True))


def test_what_is_staged_goes_through_the_copier(
    mover: BlockMover, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = []
    monkeypatch.setattr(
        BlockMover, "_open_copier", lambda self: opened.append(1) or _copier_of(self)
    )
    cache, _ = filled()
    mover.gather(cache, PAGES, arrays())
    # two blocks to a stage: 2 + 2 + 1, and 2 + 1 after two that are addressed directly
    assert len(opened) == {"direct": 0, "staged": 3, "mixed": 2}[way]


def _copier_of(mover: BlockMover) -> Any:
    if mover._copier is None:
        mover._copier = block_copier.DeviceCopier("cpu")
    return mover._copier


def test_a_copy_that_fails_is_a_tier_that_is_not_there(
    mover: BlockMover, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(BlockMover, "_reaches", lambda *_: False)

    def fail(*_: object, **__: object) -> None:
        raise MessengerError("the link is down")

    monkeypatch.setattr(block_copier.DeviceCopier, "submit", fail)
    cache, _ = filled()
    with pytest.raises(TierUnavailable, match="the link is down"):
        mover.gather(cache, PAGES, arrays())


def test_the_end_of_a_move_waits_for_a_slow_copy(
    mover: BlockMover, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if the move fails in the middle: memory that is still being written is not released."""
    waited = []

    class Slow:
        def wait(self, timeout_s: float) -> None:
            waited.append(timeout_s)
            if len(waited) < 3:
                raise block_copier.StillCopying("not yet", self)  # type: ignore[arg-type]

    monkeypatch.setattr(BlockMover, "_reaches", lambda *_: False)
    monkeypatch.setattr(block_copier, "STAGE_BYTES", 4 * SCHEMA.block_bytes)
    submits: list[object] = []

    def submit(*_: object, **__: object) -> Slow:
        submits.append(1)
        if len(submits) == 2:
            raise MessengerError("the second fails")
        return Slow()

    monkeypatch.setattr(block_copier.DeviceCopier, "submit", submit)
    cache, _ = filled()
    with pytest.raises(TierUnavailable, match="the second fails"):
        mover.gather(cache, PAGES, arrays())
    assert len(waited) == 3


def test_bad_input_touches_nothing(mover: BlockMover) -> None:
    cache, _ = filled()
    blocks = arrays()
    blocks[-1] = blocks[-1][:-1]
    with pytest.raises(KernelError):
        mover.gather(cache, PAGES, blocks)
    assert all((block == 0xEE).all() for block in blocks)


def test_layouts_are_the_schemas() -> None:
    layout = layout_of(SCHEMA)
    assert layout.nbytes == SCHEMA.block_bytes
    assert layout.offset(1, 1, 2) == SCHEMA.range(1, "v", heads=(2, 3)).offset
    assert layout_of(SCHEMA) is layout
    assert quantised_layout_of(SCHEMA) is None
    halved = KVSchema.gqa(
        model="m",
        layers=1,
        kv_heads=2,
        head_dim=4,
        dtype="int8",
        block_tokens=TOKENS,
        scale_tokens=4,
    )
    quantised = quantised_layout_of(halved)
    assert quantised is not None
    assert quantised.nbytes == halved.block_bytes
    assert quantised.layout.offset(0, 1, 1) == halved.range(0, "v", heads=(1, 2)).offset


# -- pinning ---------------------------------------------------------------------------------------


@pytest.fixture
def pins(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """In place of CUDA's registration: (address, device) of memory while it is pinned."""
    found: list[Any] = []

    def fake(memory: Any, device: str) -> Any:
        entry = memory.ctypes.data, device
        found.append(entry)
        return SimpleNamespace(close=lambda: found.remove(entry))

    monkeypatch.setattr(host_pinning, "Pinned", fake)
    return found


@pytest.fixture
def client() -> Iterator[Client]:
    with Client.open("embedded:?dram=1MiB&prefault=false") as client:
        yield client


def missed(carrier: Carrier, prefix: Prefix) -> None:
    """A load that finds nothing."""

    def no_room(blocks: int) -> Any:
        raise AssertionError(f"asked for room for {blocks} blocks")

    assert carrier.load(prefix, no_room, 1.0) == (0, "miss")


def test_a_carrier_pins_its_clients_memory_from_the_first_use_on(
    pins: list[Any], client: Client
) -> None:
    prefix = SCHEMA.prefix(range(TOKENS))
    one, two = (Carrier(client, SCHEMA, "cuda:0") for _ in range(2))
    assert pins == []
    missed(one, prefix)
    missed(two, prefix)
    assert pins == [(client.near_link.mapping.memory.ctypes.data, "cuda:0")]
    one.close()
    assert pins
    two.close()
    two.close()
    assert pins == []


def test_pinning_takes_nothing_of_the_pools_time_to_answer(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    carrier, now_s = Carrier(client, SCHEMA, "cpu"), [100.0]
    left_s: list[float] = []

    def pin() -> None:
        now_s[0] += 5.0

    def asked(_: Prefix, timeout_s: float) -> Any:
        left_s.append(timeout_s)
        raise NodeUnavailable("as far as this test goes")

    clock = SimpleNamespace(monotonic=lambda: now_s[0])
    monkeypatch.setattr(cache_transfer, "time", clock)
    monkeypatch.setattr(cache_transfer, "until_s", lambda deadline: deadline - now_s[0])
    monkeypatch.setattr(carrier, "_pin", pin)
    monkeypatch.setattr(client, "get", asked)
    monkeypatch.setattr(client, "reserve", asked)
    prefix = SCHEMA.prefix(range(TOKENS))
    with pytest.raises(NodeUnavailable):
        carrier.load(prefix, lambda _: pytest.fail("nothing was found"), 1.0)
    nothing: Any = None
    with pytest.raises(NodeUnavailable):
        carrier.save(nothing, nothing, prefix, [], blocks_at_once=1, timeout_s=1.0)
    assert left_s == [1.0, 1.0]


def test_on_a_cpu_a_carrier_pins_nothing(pins: list[Any], client: Client) -> None:
    carrier = Carrier(client, SCHEMA, "cpu")
    missed(carrier, SCHEMA.prefix(range(TOKENS)))
    assert pins == []
    carrier.close()


def test_a_mover_is_idle_when_its_copies_have_ended() -> None:
    done: list[bool] = []
    mover = BlockMover(SCHEMA, "cpu")
    assert mover.while_idle(lambda: done.append(True))
    numbers = {"in_flight_bytes": 1}
    mover._copier = SimpleNamespace(statistics=lambda: numbers)  # type: ignore[assignment]
    assert not mover.while_idle(lambda: done.append(False))
    numbers["in_flight_bytes"] = 0
    assert mover.while_idle(lambda: done.append(True))
    assert done == [True, True]
