"""Gather pages into quantised blocks, and scatter those back into pages, dequantised."""
