"""Checksums of segments where they lie, in HBM or in DRAM."""
