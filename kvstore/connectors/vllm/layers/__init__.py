"""Loads and saves of a block layer by layer, beside the forward pass."""
