"""Copies between a GPU and the host, and the memory that both can reach."""
