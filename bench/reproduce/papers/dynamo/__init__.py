"""Dynamo (its documentation)."""
