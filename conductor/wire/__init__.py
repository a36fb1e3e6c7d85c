"""The HTTP wire format: bodies, errors, and their conversion from and to the core's records."""
