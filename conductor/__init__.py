"""Decides where requests run: by what is cached where, by load, and by what was promised."""
