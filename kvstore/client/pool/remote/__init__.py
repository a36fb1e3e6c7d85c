"""Reads and writes of blocks at one remote node."""
