"""Decode scheduling: the choice of an instance, and the forecast of its load. Pure."""

# It registers its predictors by name (`length_predictor.predictor`).
from . import length_windows

__all__ = ["length_windows"]
