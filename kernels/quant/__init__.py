"""Gather into quantised blocks, and scatter them back into pages as numbers."""
