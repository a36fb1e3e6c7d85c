"""The three tiers against the exported contract, NVMe also without direct I/O."""

from __future__ import annotations

import importlib.util
from typing import TYPE_CHECKING

import pytest

from tiffin.kvstore.errors import TierUnavailable
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


def devices() -> list[str]:
    """Devices for an HBM tier: the CPU in place of a GPU, and a GPU if there is one."""
    if importlib.util.find_spec("torch") is None:
        return []
    import torch

    return ["cpu", "cuda:0"] if torch.cuda.is_available() else ["cpu"]


class TestHbm(TierContract):
    @pytest.fixture(params=devices())
    def tier(self, request: pytest.FixtureRequest) -> Iterator[Tier]:
        from tiffin.kvstore.tiers.hbm import HbmTier

        with checked(HbmTier(TIER_BYTES, request.param)) as tier:
            yield tier


@pytest.mark.parametrize("device", devices())
def test_hbm_view_is_the_memory_itself(device: str) -> None:
    from tiffin.kvstore.tiers.hbm import HbmTier

    with HbmTier(TIER_BYTES, device) as tier:
        tier.reserve(4096)
        extent = tier.reserve(100)
        tier.view(extent)[:100] = 9
        if tier.device.type == "cuda":
            tier.torch.cuda.current_stream(tier.device).synchronize()
        target = bytearray(100)
        tier.read(extent, 0, target)
        assert target == b"\x09" * 100
        assert tier.view_all()[4096:4196].tolist() == [9] * 100
    with pytest.raises(TierUnavailable):
        tier.view_all()


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
