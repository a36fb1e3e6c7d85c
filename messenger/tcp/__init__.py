"""Streams over TCP and TLS: the client's pool of them, and the listener that serves them."""
