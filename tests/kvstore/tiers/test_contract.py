"""The three tiers against the exported contract, NVMe also without direct I/O."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tiffin.kvstore.testing import TIER_BYTES, TierContract, checked
from tiffin.kvstore.tiers.dram import DramTier
from tiffin.kvstore.tiers.nvme import NvmeTier

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tiffin.kvstore.tiers.base import Tier


class TestDram(TierContract):
    @pytest.fixture
    def tier(self) -> Iterator[Tier]:
        with checked(DramTier(TIER_BYTES)) as tier:
            yield tier


class TestNvme(TierContract):
    durable = True

    @pytest.fixture
    def tier(self, tmp_path: Path) -> Iterator[Tier]:
        # Small pieces, so that the suite's small blocks are cut into several.
        with checked(NvmeTier(tmp_path / "slab", TIER_BYTES, piece_bytes=16 << 10)) as tier:
            yield tier


class TestNvmeBuffered(TierContract):
    durable = True

    @pytest.fixture
    def tier(self, tmp_path: Path) -> Iterator[Tier]:
        with checked(NvmeTier(tmp_path, TIER_BYTES, direct_io=False, queue_depth=1)) as tier:
            yield tier


class TestHbmOnCpu(TierContract):
    @pytest.fixture
    def tier(self) -> Iterator[Tier]:
        pytest.importorskip("torch")
        from tiffin.kvstore.tiers.hbm import HbmTier

        with checked(HbmTier(TIER_BYTES, "cpu")) as tier:
            yield tier


def test_dram_view_is_the_memory_itself() -> None:
    with DramTier(TIER_BYTES) as tier:
        extent = tier.reserve(100)
        tier.view(extent)[:] = 9
        target = bytearray(100)
        tier.read(extent, 0, target)
        assert target == b"\x09" * 100


def test_capacity_is_rounded_down_to_pages() -> None:
    with DramTier(3 * 4096 + 4095, prefault=False) as tier:
        assert tier.capacity_bytes == tier.region.nbytes == 3 * 4096
