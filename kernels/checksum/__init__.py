"""Checksums of segments in place, in HBM or in DRAM."""
