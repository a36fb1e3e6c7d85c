"""Prefill scheduling: the choice of an instance, of the cached blocks, and queueing. Pure."""
