"""Simulated clusters, the conductor's core in them, and what else can decide."""
