"""The HBM tier as an engine uses it: blocks in a GPU's memory, in front of any client."""

from .core import HbmOptions
from .exporting import ImportedBlocks, attach
from .held import HbmBlock, HbmBlocks, HbmSlot, HbmSlots
from .saving import Saved
from .store import HbmStore

__all__ = [
    "HbmBlock",
    "HbmBlocks",
    "HbmOptions",
    "HbmSlot",
    "HbmSlots",
    "HbmStore",
    "ImportedBlocks",
    "Saved",
    "attach",
]
