"""Mooncake (FAST '25; arXiv 2407.00079)."""
