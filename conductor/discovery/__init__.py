"""Finds engines, asks them what they are and how busy they are, and registers them."""
