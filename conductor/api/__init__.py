"""The conductor's REST service."""
