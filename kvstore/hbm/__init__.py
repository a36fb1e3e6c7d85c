"""The HBM tier for engines: a cache of blocks in a GPU's memory, in front of any client."""

from .core.hbm_core import HbmOptions
from .handles import HbmBlock, HbmBlocks, HbmSlot, HbmSlots
from .store import HbmStore
from .writeback import Saved

__all__ = [
    "HbmBlock",
    "HbmBlocks",
    "HbmOptions",
    "HbmSlot",
    "HbmSlots",
    "HbmStore",
    "Saved",
]
