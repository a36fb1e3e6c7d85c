"""The contract of a tier as a test suite, for the tiers of this package and for third-party tiers.

    class TestMyTier(TierContract):
        @pytest.fixture
        def tier(self):
            with checked(MyTier(TIER_BYTES)) as tier:
                yield tier

Nothing here imports pytest: the suite is plain methods that ask for a fixture named `tier`.
"""

from __future__ import annotations

import contextlib
import random
import threading
from typing import TYPE_CHECKING, TypeVar

import numpy as np

from .errors import InvalidInput, NoRoom, TierUnavailable
from .format.header import KEY_BYTES, PAGE_BYTES, header_bytes, pack_header, segment_checksum
from .memory.arena import Extent

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

    from .tiers.base import Tier

_TierT = TypeVar("_TierT", bound="Tier")

# The least capacity of a tier under test.
TIER_BYTES = 4 << 20


@contextlib.contextmanager
def checked(tier: _TierT) -> Iterator[_TierT]:
    """Yield the tier; at the end of the block check that free and used bytes add up to its
    capacity, and close it."""
    try:
        yield tier
        statistics = tier.statistics()
        assert statistics.free_bytes + statistics.used_bytes == statistics.capacity_bytes
        assert statistics.largest_free_bytes <= statistics.free_bytes
        tier.arena.check()
    finally:
        tier.close()


def random_bytes(nbytes: int, seed: int) -> NDArray[np.uint8]:
    """Random bytes, the same for the same seed."""
    return np.random.default_rng(seed).integers(0, 256, nbytes, np.uint8)


def block_header(
    extent: Extent,
    payload: NDArray[np.uint8],
    *,
    key: bytes = b"k" * KEY_BYTES,
    generation: int = 1,
    tokens: bytes = bytes(range(64)),
) -> bytes:
    """A valid header of a block with one segment, for a payload right behind it in `extent`."""
    page = bytearray(header_bytes(1, len(tokens) // 4))
    pack_header(
        page,
        key=key,
        parent=bytes(KEY_BYTES),
        schema_fingerprint=b"s" * KEY_BYTES,
        namespace_fingerprint=b"n" * KEY_BYTES,
        generation=generation,
        payload_bytes=len(payload),
        extent_offset=extent.offset,
        extent_bytes=extent.length,
        tokens=tokens,
        checksums=[segment_checksum(payload.data)],
        segment_bytes=[len(payload)],
    )
    return bytes(page)


def store_block(
    tier: Tier,
    payload: NDArray[np.uint8],
    *,
    key: bytes = b"k" * KEY_BYTES,
    generation: int = 1,
) -> Extent:
    """Reserve, write and commit one block."""
    extent = tier.reserve(PAGE_BYTES + len(payload))
    tier.write(extent, PAGE_BYTES, payload)
    tier.commit(extent, block_header(extent, payload, key=key, generation=generation))
    return extent


class TierContract:
    """The tests that every tier passes. `durable`: whether a scan finds the committed blocks."""

    durable = False

    def test_bytes_written_come_back(self, tier: Tier) -> None:
        payload = random_bytes(3 * PAGE_BYTES, 1)
        extent = store_block(tier, payload)
        assert np.array_equal(_read(tier, extent, PAGE_BYTES, len(payload)), payload)
        header = _read(tier, extent, 0, PAGE_BYTES).tobytes()
        assert header == block_header(extent, payload)
        tier.release(extent)

    def test_extents_are_whole_pages_inside_the_tier(self, tier: Tier) -> None:
        for length in (1, PAGE_BYTES - 1, PAGE_BYTES, PAGE_BYTES + 1):
            extent = tier.reserve(length)
            assert extent.offset % PAGE_BYTES == extent.length % PAGE_BYTES == 0
            assert 0 <= extent.length - length < PAGE_BYTES
            assert 0 <= extent.offset <= tier.capacity_bytes - extent.length
        with raises(InvalidInput):
            tier.reserve(0)

    def test_reads_and_writes_at_any_byte(self, tier: Tier) -> None:
        """Compare with a shadow copy: ends of ranges and memory, both aligned and unaligned."""
        chance = random.Random(2)
        extent = tier.reserve(64 * PAGE_BYTES)
        shadow = random_bytes(extent.length, 2)
        tier.write(extent, 0, shadow)
        memory = np.empty(extent.length + PAGE_BYTES, np.uint8)
        for turn in range(60):
            at, stop = sorted(chance.sample(range(extent.length + 1), 2))
            if turn % 3 == 0:
                at, stop = at // PAGE_BYTES * PAGE_BYTES, stop // PAGE_BYTES * PAGE_BYTES
            shift = chance.choice((0, 0, 1, 512, at % PAGE_BYTES))
            part = memory[shift : shift + stop - at]
            part[:] = random_bytes(len(part), turn)
            tier.write(extent, at, part)
            shadow[at:stop] = part
            assert np.array_equal(_read(tier, extent, 0, extent.length), shadow)
            part[:] = 0
            tier.read(extent, at, part)
            assert np.array_equal(part, shadow[at:stop])

    def test_extents_do_not_disturb_each_other(self, tier: Tier) -> None:
        chance = random.Random(3)
        held: dict[Extent, NDArray[np.uint8]] = {}
        for turn in range(120):
            if held and (chance.random() < 0.4 or tier.arena.largest_free_bytes < 40 * PAGE_BYTES):
                extent = chance.choice(sorted(held))
                expected = held.pop(extent)
                assert np.array_equal(_read(tier, extent, PAGE_BYTES, len(expected)), expected)
                tier.release(extent)
            else:
                payload = random_bytes(chance.randrange(1, 32 * PAGE_BYTES), turn)
                held[store_block(tier, payload, generation=turn + 1)] = payload
            assert tier.statistics().used_bytes == sum(extent.length for extent in held)
        for extent, expected in held.items():
            assert np.array_equal(_read(tier, extent, PAGE_BYTES, len(expected)), expected)

    def test_threads_write_and_read_at_once(self, tier: Tier) -> None:
        payloads = {tier.reserve(33 * PAGE_BYTES): random_bytes(130_000, seed) for seed in range(6)}
        wrong: list[Extent] = []

        def work(extent: Extent, payload: NDArray[np.uint8]) -> None:
            for _ in range(4):
                tier.write(extent, PAGE_BYTES, payload)
                if not np.array_equal(_read(tier, extent, PAGE_BYTES, len(payload)), payload):
                    wrong.append(extent)

        threads = [threading.Thread(target=work, args=pair) for pair in payloads.items()]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert wrong == []
        assert tier.statistics().writes == tier.statistics().reads == 4 * len(payloads)

    def test_a_full_tier_says_so_and_room_returns(self, tier: Tier) -> None:
        with raises(NoRoom):
            tier.reserve(tier.capacity_bytes + 1)
        whole = tier.reserve(tier.capacity_bytes)
        assert tier.statistics().free_bytes == tier.statistics().largest_free_bytes == 0
        with raises(NoRoom):
            tier.reserve(1)
        tier.release(whole)
        assert tier.reserve(tier.capacity_bytes) == whole

    def test_ranges_outside_are_refused_untouched(self, tier: Tier) -> None:
        extent, neighbour = tier.reserve(2 * PAGE_BYTES), tier.reserve(PAGE_BYTES)
        tier.write(extent, 0, np.zeros(extent.length, np.uint8))
        tier.write(neighbour, 0, np.full(PAGE_BYTES, 7, np.uint8))
        ones = np.ones(PAGE_BYTES, np.uint8)
        before = tier.statistics()
        for at in (-1, PAGE_BYTES + 1, extent.length):
            with raises(InvalidInput):
                tier.write(extent, at, ones)
            with raises(InvalidInput):
                tier.read(extent, at, ones.copy())
        nowhere = (
            Extent(extent.offset + 1, PAGE_BYTES),
            Extent(extent.offset, PAGE_BYTES + 1),
            Extent(extent.offset, 0),
            Extent(-PAGE_BYTES, PAGE_BYTES),
            Extent(tier.capacity_bytes, PAGE_BYTES),
        )
        for wrong in nowhere:
            with raises(InvalidInput):
                tier.write(wrong, 0, ones[:0])
            with raises(InvalidInput):
                tier.erase(wrong)
            with raises(InvalidInput):
                tier.wipe([extent, wrong])
        assert tier.statistics() == before
        assert not _read(tier, extent, 0, extent.length).any()
        assert (_read(tier, neighbour, 0, PAGE_BYTES) == 7).all()

    def test_unsuitable_memory_is_refused(self, tier: Tier) -> None:
        extent = tier.reserve(PAGE_BYTES)
        with raises(InvalidInput):
            tier.read(extent, 0, bytes(16))
        with raises(InvalidInput):
            tier.write(extent, 0, np.zeros(32, np.uint8)[::2])
        tier.write(extent, 0, b"bytes are a fine source")
        assert _read(tier, extent, 0, 23).tobytes() == b"bytes are a fine source"

    def test_commit_wants_the_header_of_this_extent(self, tier: Tier) -> None:
        payload = random_bytes(100, 4)
        extent, other = tier.reserve(2 * PAGE_BYTES), tier.reserve(3 * PAGE_BYTES)
        header = bytearray(block_header(extent, payload))
        longer = Extent(extent.offset, other.length)
        for wrong in (
            b"",
            header[:-1],
            header + bytes(PAGE_BYTES),
            block_header(other, payload),
            block_header(longer, payload),
        ):
            with raises(InvalidInput):
                tier.commit(extent, wrong)
        header[200] ^= 1
        with raises(InvalidInput):
            tier.commit(extent, header)
        assert list(tier.scan()) == []

    def test_statistics_count(self, tier: Tier) -> None:
        start = tier.statistics()
        assert start.used_bytes == start.reads == start.writes == start.errors == 0
        assert start.healthy
        assert tier.healthy
        extent = store_block(tier, random_bytes(100, 5))
        _read(tier, extent, PAGE_BYTES, 100)
        now = tier.statistics()
        assert (now.writes, now.written_bytes) == (2, PAGE_BYTES + 100)
        assert (now.reads, now.read_bytes) == (1, 100)
        assert now.used_bytes == extent.length

    def test_scan_finds_what_is_committed(self, tier: Tier) -> None:
        kept = [
            store_block(tier, random_bytes(9000, seed), key=bytes([seed]) * 16, generation=seed + 1)
            for seed in range(7)
        ]
        reserved_only = tier.reserve(PAGE_BYTES)
        tier.write(reserved_only, 0, block_header(reserved_only, random_bytes(0, 0)[:0]))
        tier.release(kept.pop(0))
        tier.erase(kept.pop(2))
        tier.wipe([kept.pop(3), kept.pop(0)])
        tier.wipe([])
        found = dict(tier.scan())
        assert sorted(found) == (kept if self.durable else [])
        for extent, header in found.items():
            assert header.extent_offset == extent.offset
            assert header.extent_bytes == extent.length
            assert header.key == bytes([header.generation - 1]) * 16

    def test_a_closed_tier_is_unavailable(self, tier: Tier) -> None:
        extent = tier.reserve(PAGE_BYTES)
        tier.close()
        tier.close()
        with raises(TierUnavailable):
            tier.write(extent, 0, bytes(PAGE_BYTES))
        with raises(TierUnavailable):
            tier.read(extent, 0, bytearray(PAGE_BYTES))


@contextlib.contextmanager
def raises(kind: type[Exception]) -> Iterator[None]:
    """Assert that the block raises an exception of this class or a subclass."""
    try:
        yield
    except kind:
        return
    raise AssertionError(f"nothing was raised; expected {kind.__name__}")


def _read(tier: Tier, extent: Extent, at: int, nbytes: int) -> NDArray[np.uint8]:
    target = np.empty(nbytes, np.uint8)
    tier.read(extent, at, target)
    return target
