"""The tiers that store blocks: DRAM, NVMe, and a GPU's HBM, behind one interface."""
