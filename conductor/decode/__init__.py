"""Decode scheduling: the choice of an instance, and the forecast of its load. Pure."""
