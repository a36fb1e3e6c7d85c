"""The extent allocator of a tier, and the eviction policies. Pure: no I/O."""
