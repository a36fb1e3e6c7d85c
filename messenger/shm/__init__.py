"""Shared memory between processes of one host: regions, transports, and copies with checksums."""
