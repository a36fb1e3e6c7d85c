"""Shared memory between processes of one host: regions, and copies with checksums."""
