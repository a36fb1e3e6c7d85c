"""Connectors: how inference engines save and load KV caches. Each module imports its engine."""
