"""Gather an engine's pages into blocks, scatter blocks into pages, and reshard heads."""
