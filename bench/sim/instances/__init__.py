"""Engines of a simulated cluster: they prefill, decode, or do both."""
